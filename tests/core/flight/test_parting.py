"""Which cause is named, from what is known of two runs."""

import attrs
import pytest

from trainfold.core.flight.evidence import Evidence, LeafApart
from trainfold.core.flight.parting import parting_of
from trainfold.core.flight.step_difference import StepDifference

BUFFER, WEIGHT = LeafApart("model.buffers['n.mean']", differing=3), LeafApart("model.params['w']", differing=1)
ENV = (("environment.threads", "1", "2"),)
LEARNS = LeafApart("optimizer.groups[0].hyper['lr']")
COUNT = LeafApart("scheduler.value['last_epoch']")
BEST = LeafApart("scheduler.value['best']")
SAMPLES = LeafApart("dataset@rank1.value['samples']")
RATE = (("optimizer.groups[0].lr", "0.1", "0.2"),)


def logs(*parts, step=5):
    return StepDifference(step, parts, (), None, None)


CASES = [
    (Evidence(), None, "nothing"),
    (Evidence(difference=logs("samples", "batch", "loss")), 5, "position"),
    (Evidence(difference=logs("samples", step=21), unrecorded=(16, 20), settings=RATE), 21, "position"),
    (Evidence(difference=logs("loss", "streams", step=21), unrecorded=(16, 20), environment=ENV), 21, "unrecorded"),
    (Evidence(difference=logs("loss", step=21), unrecorded=(16, 20), settings=RATE), 21, "setting"),
    (Evidence(apart_at=8, unrecorded=(4, 8), leaves=(BUFFER, WEIGHT)), 8, "unrecorded"),
    (Evidence(apart_at=8, unrecorded=(4, 8), leaves=(WEIGHT,)), 8, "bit"),
    (Evidence(difference=logs("batch", "loss", "streams"), seeds=("1", "2"), environment=ENV), 5, "seed"),
    (Evidence(difference=logs("batch", "loss"), settings=RATE), 5, "batch"),
    (Evidence(difference=logs("loss"), absent=("scheduler",), settings=RATE), 5, "component"),
    (Evidence(difference=logs("loss"), settings=RATE, environment=ENV), 5, "setting"),
    (Evidence(difference=logs("loss", "streams"), environment=ENV), 5, "streams"),
    (Evidence(difference=logs("loss", "host_streams")), 5, "streams"),
    (Evidence(difference=logs("loss", "norm"), environment=ENV), 5, "environment"),
    (Evidence(difference=logs("loss", "norm")), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), repeats=(True, False), own=(True, None)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), own=(True, False), environment=ENV), 5, "environment"),
    (Evidence(difference=logs("loss"), repeats=(True, True)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), repeats=(True, False), own=(True, True)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), repeats=(True, False), own=(True, False)), 5, "fault"),
    (Evidence(difference=logs("loss"), repeats=(False, False), own=(False, False)), 5, "chance"),
    (Evidence(difference=logs("loss"), settings=RATE, own=(False, False)), 5, "setting"),
    (Evidence(same_at=4, apart_at=8, leaves=(BUFFER,)), 8, "buffer"),
    (Evidence(same_at=4, apart_at=8, leaves=(BUFFER, WEIGHT)), 8, "state"),
    (Evidence(same_at=4, apart_at=8, leaves=(WEIGHT,)), 8, "bit"),
    (Evidence(difference=logs("loss", step=9), same_at=4, apart_at=8, leaves=(WEIGHT,)), 8, "bit"),
    (Evidence(difference=logs("loss", step=5), same_at=4, apart_at=8, leaves=(WEIGHT,)), 5, "arithmetic"),
    (
        Evidence(
            difference=attrs.evolve(logs("state"), components=("model", "optimizer")),
            same_at=4,
            apart_at=8,
            leaves=(WEIGHT,),
        ),
        5,
        "arithmetic",
    ),
    (Evidence(difference=attrs.evolve(logs("state"), components=("model",))), 5, "state"),
    (Evidence(difference=logs("state", step=8), same_at=4, apart_at=8, leaves=(BUFFER,)), 8, "buffer"),
    (Evidence(difference=logs("loss"), repeats=(False, False), own=(False, None)), 5, "chance"),
    (Evidence(difference=logs("loss"), repeats=(False, True), own=(False, None)), 5, "fault"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT, LEARNS), own=(True, False)), 5, "setting"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT, BEST, LEARNS)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT, BEST, COUNT)), 5, "setting"),
    (Evidence(difference=logs("batch"), apart_at=8, leaves=(WEIGHT, LEARNS)), 5, "batch"),
    (Evidence(difference=attrs.evolve(logs("state"), components=("scheduler",))), 5, "setting"),
    (Evidence(difference=logs("loss"), draws="both"), 5, "seed"),
    (Evidence(difference=logs("loss"), draws="one"), 5, "streams"),
    (Evidence(difference=logs("loss"), draws="both", before=frozenset({"loss"})), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), draws="both", same_at=4), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), draws="both", settings=RATE), 5, "setting"),
    (Evidence(difference=logs("loss"), apart_at=8, generators=("noise",)), 5, "seed"),
    (Evidence(difference=logs("loss", step=6), same_at=4, apart_at=8, generators=("noise",)), 6, "streams"),
    (Evidence(apart_at=8, unrecorded=(1, 8), leaves=(WEIGHT, SAMPLES)), 8, "position"),
]


@pytest.mark.parametrize(("evidence", "step", "cause"), CASES)
def test_the_cause_that_explains_the_others_is_named(evidence, step, cause):
    found = parting_of(evidence)
    assert (found.step, found.cause) == (step, cause)


def test_a_fault_names_the_run_that_does_not_repeat():
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, True), own=(False, None)))
    assert found.names == ("the first",)
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, False), own=(False, True)))
    assert found.names == ("the first",)


def test_where_they_part_is_said_as_closely_as_it_is_known():
    late = Evidence(same_at=4, apart_at=8, leaves=(WEIGHT,))
    assert str(parting_of(late)).startswith("part after step 4, at step 8 at the latest: one element")
    assert str(parting_of(attrs.evolve(late, same_at=None))).startswith("part at step 8 at the latest: ")
    assert str(parting_of(Evidence(difference=logs("batch")))).startswith("part in step 5: they read other data")
    assert str(parting_of(Evidence())) == "nothing that is known differs"


KNOWN = frozenset({"samples", "batch", "streams"})
COMPARED = Evidence(is_compared=True, shown=KNOWN, difference=logs("loss"), same_at=4, is_settled=True)
OPEN = [
    (COMPARED, {"bit"}),
    (attrs.evolve(COMPARED, is_settled=False, same_at=3, apart_at=8), {"buffer", "bit"}),
    (attrs.evolve(COMPARED, own=(True, True)), set()),
    (attrs.evolve(COMPARED, shown=KNOWN - {"batch"}), {"batch", "bit"}),
    (attrs.evolve(COMPARED, shown=KNOWN - {"streams"}), {"streams", "bit"}),
    (attrs.evolve(COMPARED, apart_at=8, leaves=(LEARNS, BEST)), {"setting", "bit"}),
    (attrs.evolve(COMPARED, draws="both", host=("numpy",)), {"seed", "streams", "bit"}),
    (Evidence(difference=logs("loss"), shown=KNOWN), {"seed", "component", "setting", "buffer", "bit", "environment"}),
    (Evidence(difference=logs("batch", "streams")), {"seed", "streams"}),
    (Evidence(difference=logs("batch", "streams"), before=KNOWN), set()),
    (Evidence(difference=logs("batch"), is_compared=True), set()),
    (Evidence(same_at=4, apart_at=8, leaves=(LeafApart("model.buffers['n.mean']", differing=1),)), {"bit"}),
]


@pytest.mark.parametrize(("evidence", "may_be"), OPEN)
def test_what_it_may_be_is_what_nothing_excludes(evidence, may_be):
    """Where the cause is not certain; the sentence says each of them."""
    found = parting_of(evidence)
    assert {*found.may_be} == may_be
    assert ("it may also be" in str(found)) == bool(may_be)


@pytest.mark.parametrize("own", [(True, False), (False, True)])
def test_a_fault_is_never_certain(own):
    """The program that does not repeat a run may be another version of the one that made it."""
    found = parting_of(Evidence(difference=logs("loss"), own=own))
    assert found.cause == "fault"
    assert {"arithmetic", "environment"} <= {*found.may_be}
