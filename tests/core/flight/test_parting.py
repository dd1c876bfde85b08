"""Which cause is named, from what is known of two runs."""

import attrs
import pytest

from trainfold.core.flight.parting import Evidence, LeafApart, parting_of
from trainfold.core.flight.step_difference import StepDifference

BUFFER, WEIGHT = LeafApart("model.buffers['n.mean']", differing=3), LeafApart("model.params['w']", differing=1)
ENV = (("environment.threads", "1", "2"),)
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
    (Evidence(difference=logs("loss"), repeats=(True, False)), 5, "fault"),
    (Evidence(difference=logs("loss"), repeats=(True, True)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), repeats=(True, False), own=(True, True)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), repeats=(True, False), own=(True, False)), 5, "fault"),
    (Evidence(difference=logs("loss"), repeats=(False, False), own=(False, False)), 5, "chance"),
    (Evidence(difference=logs("loss"), repeats=(False, True), own=(False, None)), 5, "fault"),
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
]


@pytest.mark.parametrize(("evidence", "step", "cause"), CASES)
def test_the_cause_that_explains_the_others_is_named(evidence, step, cause):
    found = parting_of(evidence)
    assert (found.step, found.cause) == (step, cause)


def test_a_fault_names_the_run_that_does_not_repeat():
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, True)))
    assert found.names == ("the first",)
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, False), own=(False, True)))
    assert found.names == ("the first",)


def test_where_they_part_is_said_as_closely_as_it_is_known():
    late = Evidence(same_at=4, apart_at=8, leaves=(WEIGHT,))
    assert str(parting_of(late)).startswith("part after step 4, at step 8 at the latest: one element")
    assert str(parting_of(attrs.evolve(late, same_at=None))).startswith("part at step 8 at the latest: ")
    assert str(parting_of(Evidence(difference=logs("batch")))).startswith("part in step 5: they read other data")
    assert str(parting_of(Evidence())) == "nothing that is known differs"
