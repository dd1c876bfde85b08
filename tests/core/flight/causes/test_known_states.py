"""What saved states show: the last one that is the same before a difference, and what began elsewhere without an effect."""

import attrs
import pytest

from trainfold.core.flight.causes.known_states import SavedState, of_states

BEGUN = SavedState(1, {"model.params['w']": "0", "rng.value['seed']": "1", "rng.value['torch']": "5"}, {"lr": "1"}, {"threads": "1"}, frozenset({"model"}))  # fmt: skip


def run(**changes):
    """States of steps 1 to 6; ``w_4="x"`` is another weight from step 4 on."""
    leaves = dict(BEGUN.leaves)
    states = []
    for step in range(1, 7):
        leaves = {path: changes.get(f"{path[-3]}_{step}", text) for path, text in leaves.items()}
        states.append(attrs.evolve(BEGUN, step=step, leaves=leaves))
    return states


def found(one, other, until=None):
    return of_states((one[0], other[0]), zip(one, other, strict=True), until)


@pytest.mark.parametrize(("until", "same_at"), [(None, 6), (5, 4), (1, None)])
def test_the_last_same_state_is_one_before_the_difference_in_the_logs(until, same_at):
    """One that is the same again after it hid what the logs exclude, and a replay began at the start."""
    known = found(run(), run(), until)
    assert (known.same_at, known.apart_at, known.leaves) == (same_at, None, ())
    assert ("environment" in known.alike) == (until is not None)


def test_what_began_elsewhere_is_no_difference_where_nothing_depends_on_it():
    known = found(run(), run(d_1="2", h_1="6"))
    assert (known.same_at, known.apart_at, known.seeds) == (6, None, ("1", "2"))
    assert "start" not in known.alike
    known = found(run(), run(d_1="2", h_1="6", w_4="x"))
    assert (known.same_at, known.apart_at, [leaf.path for leaf in known.leaves]) == (3, 4, ["model.params['w']"])


def test_streams_that_come_apart_later_are_a_difference():
    known = found(run(), run(h_3="6"))
    assert (known.same_at, known.apart_at, known.seeds) == (2, 3, None)


def test_a_state_without_a_component_on_purpose_is_not_known_to_be_the_same():
    """Weights that are kept outside of a checkpoint."""
    states = [attrs.evolve(each, is_partial=True) for each in run()]
    assert found(states, states).same_at is None


@pytest.mark.parametrize("fact", ["environment", "settings"])
def test_what_is_not_recorded_is_not_known_to_be_the_same(fact):
    hidden = [attrs.evolve(each, **{fact: {}}) for each in run()]
    assert fact in found(run(), run(), 3).alike
    assert fact not in found(run(), hidden, 3).alike
    assert fact not in found(hidden, hidden, 3).alike


def test_the_environment_of_other_ranks_than_the_first_is_not_known_to_be_the_same():
    """A checkpoint has that of rank 0: other threads on rank 1 alone were excluded."""
    of_ranks = [attrs.evolve(each, ranks=2) for each in run()]
    assert "environment" not in found(of_ranks, of_ranks, 3).alike


def test_first_rates_that_differ_are_no_setting_and_the_schedule_is_not_the_same():
    """Rates may follow from another seed: a setting explains others, and a rate is explained by them."""
    noted = [attrs.evolve(each, rates={"first rates of second.param_groups[0]": "[0.1, 0.2]"}) for each in run(w_3="x")]
    plain = [attrs.evolve(each, leaves={**each.leaves, "optimizer.step": "1"}) for each in run()]
    noted = [attrs.evolve(each, leaves={**each.leaves, "optimizer.step": "1"}) for each in noted]
    known = found(plain, noted)
    assert known.settings == ()
    assert known.rates == (("first rates of second.param_groups[0]", "absent", "[0.1, 0.2]"),)
    assert "schedule" not in known.alike
    assert "schedule" in found(plain, [attrs.evolve(each, rates={}) for each in noted]).alike
