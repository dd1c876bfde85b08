"""The conclusion from the records of three runs: every difference is found, and equal values are never blamed."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.rehearsal.conclusion import conclude
from trainfold.core.rehearsal.number import exact_text, float_of, relative_difference
from trainfold.core.rehearsal.resized import of_ranks, without_ranks
from trainfold.core.rehearsal.trajectory import SavedStep, Stretch

NAMES = ("loss", "norm")


def values_of(step, tick=0):
    """Two recorded values of a step; one occurs twice, as in an accumulation window."""
    return {"loss": (f"{step}", f"{step}5"), "norm": (f"{step + tick}.5",)}


def saved_of(step, tick=0):
    return SavedStep(
        {"model": f"m{step + tick}", "rng": "r"}, {"model.params['w']": f"w{step + tick}", "rng.value['torch']": "r"}
    )


def stretch(number, start, end, *, every, is_cut=False, partial=0):
    """The record of a process from one step to another; a killed one may contain a part of its last step."""
    values = {step: values_of(step) for step in range(start + 1, end + 1)}
    if partial:
        values[end + 1] = {"loss": (f"{end + 1}",)}
    saved = {("run", step): saved_of(step) for step in range(start + 1, end + 1) if step % every == 0}
    return Stretch(number, start, start > 0, is_cut, end, values, saved)


@st.composite
def rehearsals(draw):
    """A whole run, and one killed at several times after its first save and resumed from its newest save each time."""
    every = draw(st.integers(1, 4))
    steps = draw(st.integers(2 * every, 5 * every))
    whole = stretch(1, 0, steps, every=every)
    killed, start = [], 0
    for number in range(1, draw(st.integers(1, 3)) + 1):
        end = draw(st.integers(max(start, every), steps - 1))
        killed.append(stretch(number, start, end, every=every, is_cut=True, partial=draw(st.integers(0, 1))))
        start = end - end % every
    killed.append(stretch(len(killed) + 1, start, steps, every=every))
    return whole, killed


@given(rehearsals())
def test_runs_that_are_the_same_are_identical(rehearsal):
    """Wherever they were killed: a partial step does not count as a difference."""
    whole, killed = rehearsal
    conclusion = conclude(whole, whole, killed, tolerance=None)
    last = killed[-1]
    assert conclusion.outcome == ("identical" if any(each.saved for each in killed[1:]) else "nothing")
    assert conclusion.found == conclusion.noise == ()
    assert conclusion.values >= sum(len(texts) for values in last.values.values() for texts in values.values())


@given(rehearsals(), st.data())
def test_one_value_of_a_resumed_process_that_is_another_is_found_where_it_is(rehearsal, data):
    whole, killed = rehearsal
    which = data.draw(st.integers(1, len(killed) - 1))
    resumed = killed[which]
    steps = [step for step in resumed.values if step <= resumed.last_step]
    if not steps:
        return
    step, name = data.draw(st.sampled_from(steps)), data.draw(st.sampled_from(NAMES))
    texts = list(resumed.values[step][name])
    texts[data.draw(st.integers(0, len(texts) - 1))] = "other"
    bent = attrs.evolve(resumed, values={**resumed.values, step: {**resumed.values[step], name: tuple(texts)}})
    conclusion = conclude(whole, whole, [*killed[:which], bent, *killed[which + 1 :]], tolerance=1.0)
    assert conclusion.outcome == "differs"
    (found,) = conclusion.found
    assert (found.kind, found.step, found.name, found.found, found.number) == ("value", step, name, "other", which + 1)
    assert conclusion.reasons


@given(rehearsals(), st.data())
def test_one_leaf_of_a_resumed_process_that_is_another_is_found_where_it_is(rehearsal, data):
    whole, killed = rehearsal
    places = [(which, key) for which, each in enumerate(killed) for key in each.saved if which]
    if not places:
        return
    which, key = data.draw(st.sampled_from(places))
    component, leaf = data.draw(st.sampled_from([("model", "model.params['w']"), ("rng", "rng.value['torch']")]))
    saved = killed[which].saved[key]
    bent = SavedStep({**saved.components, component: "other"}, {**saved.leaves, leaf: "other"})
    changed = attrs.evolve(killed[which], saved={**killed[which].saved, key: bent})
    conclusion = conclude(whole, whole, [*killed[:which], changed, *killed[which + 1 :]], tolerance=None)
    assert conclusion.outcome == "differs"
    (found,) = conclusion.found
    assert (found.kind, found.step, found.name) == ("component", key[1], component)
    assert found.leaves == ((leaf, saved.leaves[leaf], "other"),)


@given(rehearsals(), st.data())
def test_a_step_that_a_resumed_process_did_not_record_is_found(rehearsal, data):
    """A gap in the middle is a difference; at the ends, where the process was killed, it is not."""
    whole, killed = rehearsal
    last = killed[-1]
    inner = sorted(last.values)[:-1] if last.values else []
    if not inner:
        return
    step = data.draw(st.sampled_from(inner))
    missing = attrs.evolve(last, values={key: values for key, values in last.values.items() if key != step})
    conclusion = conclude(whole, whole, [*killed[:-1], missing], tolerance=None)
    expected = (
        "differs" if step > last.resumed_at + 1 else conclusion.outcome
    )  # before the first record, the step was already saved
    assert conclusion.outcome == expected
    if expected == "differs":
        assert {each.step for each in conclusion.found} == {step}
        assert {each.found for each in conclusion.found} == {"absent"}


@given(rehearsals(), st.data())
def test_a_value_that_whole_runs_have_otherwise_is_left_out_by_name(rehearsal, data):
    """W15: a time, for example: nothing depends on it, and no other value is left out."""
    whole, killed = rehearsal
    step = data.draw(st.integers(1, min(killed[0].last_step, whole.last_step)))
    restless = {"again": whole, "first": killed[0]}
    name = data.draw(st.sampled_from(sorted(restless)))
    bent = {**restless[name].values, step: values_of(step, tick=100)}
    restless[name] = attrs.evolve(restless[name], values=bent)
    conclusion = conclude(whole, restless["again"], [restless["first"], *killed[1:]], tolerance=None)
    assert conclusion.outcome == ("identical" if any(each.saved for each in killed[1:]) else "nothing")
    assert conclusion.restless == ("norm",)
    assert conclusion.found == conclusion.noise == ()


@given(rehearsals(), st.data())
def test_whatever_differs_between_whole_runs_is_never_blamed_on_a_resume(rehearsal, data):
    """W15: it is reported as unrepeatable, even if only the process before the first kill shows it."""
    whole, killed = rehearsal
    step = data.draw(st.integers(1, min(killed[0].last_step, whole.last_step)))
    restless = {"again": whole, "first": killed[0]}
    name = data.draw(st.sampled_from(sorted(restless)))
    keys = [key for key in restless[name].saved if key[1] >= step]
    if not keys:
        return
    bent = {**restless[name].values, step: values_of(step, tick=100)}
    saved = {**restless[name].saved, **{key: saved_of(key[1], tick=100) for key in keys}}
    restless[name] = attrs.evolve(restless[name], values=bent, saved=saved)
    conclusion = conclude(whole, restless["again"], [restless["first"], *killed[1:]], tolerance=None)
    assert conclusion.outcome == "unrepeatable"
    assert conclusion.noise[0].step == step
    assert conclusion.found == ()


@given(st.floats(), st.floats())
def test_texts_are_equal_if_and_only_if_the_bits_are(one, other):
    """Except for NaN, which has one text."""
    same = (one != one and other != other) or one.hex() == other.hex()
    assert (exact_text(one) == exact_text(other)) == same
    assert exact_text(float_of(exact_text(one))) == exact_text(one)
    assert (relative_difference(exact_text(one), exact_text(other)) == 0) >= same


@pytest.mark.parametrize("number", [True, 7, -(2**80), 0.1, -0.0, float("nan"), float("-inf"), 2 + 3j])
def test_a_number_is_as_far_from_itself_as_can_be_hoped(number):
    assert relative_difference(exact_text(number), exact_text(number)) == 0.0


# --- on other numbers of ranks ---------------------------------------------------------------------------------------


def on_ranks(stretch, count, *, bits=0, moved=0, samples=0):
    """What a process on so many ranks has saved: each rank its own streams, and one position in the data."""

    def saved(step):
        ranks = [""] if count == 1 else [f"@rank{rank}" for rank in range(count)]
        leaves = {"model.params['w']": f"w{step + bits}", "trainer.samples": f"{8 * step + samples}"}
        for rank, name in enumerate(ranks):
            leaves[f"rng{name}.value['torch']"] = f"stream {rank} of {count}"
            position = {
                "epoch": "0",
                "shared']['seed": "3",
                "shared']['length": "99",
                "shared']['next": f"{8 * step + moved}",
            }
            leaves |= {f"dataset{name}.value['{key}']": text for key, text in position.items()}
            leaves[f"dataset{name}.value['shared']['rank']"] = f"{rank}"
        names = dict.fromkeys(path.partition("@")[0].partition(".")[0] for path in leaves)
        return SavedStep(
            {name: f"{[each for each in leaves.items() if each[0].startswith(name)]}" for name in names}, leaves
        )

    return attrs.evolve(stretch, saved={key: saved(key[1]) for key in stretch.saved})


counts = st.lists(st.integers(1, 4), min_size=2, max_size=5).filter(lambda each: len(set(each)) > 1)


@given(rehearsals(), counts, st.integers(0, 1), st.data())
def test_other_numbers_of_ranks_may_change_bits_and_never_counts(rehearsal, worlds, bits, data):
    """W15, G06: the position in the data and the counts are compared exactly on any numbers of ranks; other bits are not a wrong resume."""
    whole, killed = rehearsal
    worlds = [worlds[number % len(worlds)] for number in range(len(killed))]
    runs = [on_ranks(each, world, bits=bits * (number > 0)) for number, (each, world) in enumerate(zip(killed, worlds, strict=True))]  # fmt: skip
    one = on_ranks(whole, worlds[0])
    left, again, *ran = without_ranks([one, one, *runs])
    has_checkpoints = any(each.saved for each in ran[1:])
    found = conclude(left, again, ran, tolerance=None, is_resized=True)
    assert found.outcome == ("nothing" if not has_checkpoints else "samples" if bits else "identical")
    assert found.found == ()
    moved, samples = data.draw(st.sampled_from([(1, 0), (0, 1)]))
    places = [number for number, each in enumerate(ran) if number and each.saved]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    wrong = on_ranks(killed[at], worlds[at], bits=bits, moved=moved, samples=samples)
    left, again, *ran = without_ranks([one, one, *runs[:at], wrong, *runs[at + 1 :]])
    found = conclude(left, again, ran, tolerance=1e9, is_resized=True)
    assert found.outcome == "differs"
    assert {(each.name, each.number) for each in found.found} == {("dataset" if moved else "trainer", at + 1)}


def test_what_belongs_to_ranks_is_left_out_of_all_runs_by_name():
    """On one rank a component has no rank in its leaves, and is left out all the same; a position that each rank has for itself too."""
    (key,) = {("run", 4)}
    one = on_ranks(stretch(1, 0, 4, every=4), 1)
    two = on_ranks(stretch(2, 0, 4, every=4), 2)
    assert of_ranks([one, two]) == ("rng",)
    left = without_ranks([one, two])
    assert left[0].saved[key].leaves == left[1].saved[key].leaves
    assert left[0].saved[key].components["dataset"] == "epoch 0, sample 32 of 99 in the order of seed 3"
    assert left[0].saved[key].components.keys() == {"model", "trainer", "dataset"}
    assert without_ranks([one]) != left[:1]
    own = [
        attrs.evolve(each, saved={key: SavedStep(saved.components, {path: text for path, text in saved.leaves.items() if "shared" not in path})})
        for each in (one, two)
        for saved in each.saved.values()
    ]  # fmt: skip
    assert of_ranks(own) == ("rng", "dataset")
    assert {tuple(each.saved[key].components) for each in without_ranks(own)} == {("model", "trainer")}


def test_values_without_a_checkpoint_to_compare_say_nothing_about_samples():
    whole, resumed = stretch(1, 0, 4, every=2), attrs.evolve(stretch(2, 2, 4, every=2), saved={})
    bent = attrs.evolve(resumed, values={**resumed.values, 4: {"loss": ("7", "8"), "norm": ("1.5",)}})
    for tolerance in (None, 1e9):
        found = conclude(
            whole, whole, [stretch(1, 0, 2, every=2, is_cut=True), bent], tolerance=tolerance, is_resized=True
        )
        assert found.outcome == "nothing"
