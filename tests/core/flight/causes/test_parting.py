"""Which cause is named, from what is known of two runs."""

import attrs
import pytest

from trainfold.core.flight.causes.evidence import Evidence, LeafApart
from trainfold.core.flight.causes.parting import parting_of
from trainfold.core.flight.step_difference import StepDifference

BUFFER, WEIGHT = LeafApart("model.buffers['n.mean']", differing=3), LeafApart("model.params['w']", differing=1)
ENV = (("environment.threads", "1", "2"),)
LEARNS = LeafApart("optimizer.groups[0].hyper['lr']")
COUNT = LeafApart("scheduler.value['last_epoch']")
BEST = LeafApart("scheduler.value['best']")
UPDATES = LeafApart("optimizer.slots['w']['step']", differing=1, size=1.0)
SAMPLES = LeafApart("dataset@rank1.value['samples']")
LOSS = frozenset({"loss"})
RATES = (("first rates of second.param_groups[0]", "absent", "[0.1, 0.2]"),)
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
    (Evidence(apart_at=8, unrecorded=(4, 8), leaves=(WEIGHT,), is_settled=True), 8, "unrecorded"),
    (Evidence(apart_at=8, leaves=(WEIGHT,), is_settled=True, environment=ENV), 8, "environment"),
    (Evidence(apart_at=8, leaves=(attrs.evolve(WEIGHT, ulps=2),), is_settled=True), 8, "state"),
    (Evidence(apart_at=8, leaves=(WEIGHT,)), 8, "state"),
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
    (Evidence(same_at=7, apart_at=8, leaves=(WEIGHT,), is_settled=True), 8, "bit"),
    (Evidence(difference=logs("loss", step=9), same_at=4, apart_at=8, leaves=(WEIGHT,), alike=LOSS), 8, "bit"),
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
    (
        Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT, LeafApart("optimizer.groups[0].hyper['eps']"))),
        5,
        "setting",
    ),
    (Evidence(difference=attrs.evolve(logs("state"), components=("scheduler",))), 5, "setting"),
    (Evidence(difference=logs("loss"), draws="both"), 5, "seed"),
    (Evidence(difference=logs("loss"), draws="one"), 5, "streams"),
    (Evidence(difference=logs("loss"), draws="both", before=frozenset({"loss"})), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), draws="both", same_at=4), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), draws="both", settings=RATE), 5, "setting"),
    (Evidence(difference=logs("loss"), apart_at=8, generators=("noise",)), 5, "seed"),
    (Evidence(difference=logs("loss", step=6), same_at=4, apart_at=8, generators=("noise",)), 6, "streams"),
    (Evidence(apart_at=8, unrecorded=(1, 8), leaves=(WEIGHT, SAMPLES)), 8, "position"),
    (Evidence(difference=logs("loss"), rates=RATES, draws="both", environment=ENV), 5, "setting"),
    (Evidence(difference=logs("loss", "batch"), rates=RATES), 5, "batch"),
    (Evidence(difference=logs("loss", "streams"), rates=RATES), 5, "streams"),
    (Evidence(difference=logs("loss"), apart_at=8, generators=("noise",), rates=RATES), 5, "seed"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT, BEST), rates=RATES), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), apart_at=5, leaves=(UPDATES, WEIGHT), environment=ENV), 5, "update"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(UPDATES, WEIGHT), environment=ENV), 5, "environment"),
    (Evidence(difference=logs("norm"), apart_at=8, leaves=(UPDATES, WEIGHT)), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(UPDATES, WEIGHT), is_settled=True), 5, "arithmetic"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(UPDATES, LEARNS)), 5, "setting"),
    (Evidence(difference=logs("loss"), apart_at=8, leaves=(attrs.evolve(UPDATES, size=0.5),)), 5, "arithmetic"),
]


@pytest.mark.parametrize(("evidence", "step", "cause"), CASES)
def test_the_cause_that_explains_the_others_is_named(evidence, step, cause):
    found = parting_of(evidence)
    assert (found.step, found.cause) == (step, cause)


def test_the_leaf_of_a_rate_is_named_before_the_note_of_the_first_rates():
    """The leaf is what the run trains with; the note alone shows a rate that was changed and put back."""
    of_note = Evidence(difference=logs("loss"), apart_at=8, leaves=(WEIGHT,), rates=RATES)
    assert parting_of(of_note).names == ("first rates of second.param_groups[0]",)
    assert parting_of(attrs.evolve(of_note, leaves=(WEIGHT, LEARNS))).names == (LEARNS.path,)


def test_a_fault_names_the_run_that_does_not_repeat():
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, True), own=(False, None)))
    assert found.names == ("the first",)
    found = parting_of(Evidence(difference=logs("loss"), repeats=(False, False), own=(False, True)))
    assert found.names == ("the first",)


def test_compiled_code_is_named_where_other_numbers_were_drawn():
    """The same dropout of a program that is compiled draws other numbers: "in one of them alone" was all that was said, and other code was excluded."""
    drawn = parting_of(Evidence(difference=logs("streams", "loss"), alike=SAVED - {"streams"} | {"streams before"}, is_whole=True))  # fmt: skip
    assert (drawn.cause, drawn.may_be) == ("streams", ())
    assert "by code that torch.compile has made" in str(drawn)


@pytest.mark.parametrize("parts", [("streams", "loss"), ("loss", "host_streams"), ("loss",)])
def test_batches_are_called_the_same_only_where_digests_show_it(parts):
    """A batch that one program left out moved the streams of its dataset: they drew other numbers "from the same batch on", and B read another one."""
    known = Evidence(difference=logs(*parts), alike=SAVED - {"streams", "host_streams"}, is_whole=True)
    assert ("from the same batch on" in str(parting_of(known))) == (parts != ("loss",))
    hidden = parting_of(attrs.evolve(known, alike=known.alike - {"batch"}))
    assert "from the same batch on" not in str(hidden)
    assert "that they read the same data is not known" in str(hidden)
    assert hidden.may_be[0] == "batch"


def test_where_they_part_is_said_as_closely_as_it_is_known():
    late = Evidence(same_at=4, apart_at=8, leaves=(WEIGHT,), alike=LOSS)
    assert str(parting_of(late)).startswith("part after step 4, at step 8 at the latest: one element")
    assert str(parting_of(attrs.evolve(late, same_at=None))).startswith("part at step 8 at the latest: ")
    read = Evidence(difference=logs("batch"))
    assert str(parting_of(read)).startswith("part in step 5 at the latest: they read other data")
    assert str(parting_of(attrs.evolve(read, is_whole=True))).startswith(
        "part in step 5 at the latest: they read other"
    )
    seen = attrs.evolve(read, is_whole=True, before=LOSS)
    assert str(parting_of(seen)).startswith("part in step 5: they read other data")
    result = Evidence(difference=logs("loss"), is_whole=True)
    assert str(parting_of(result)).startswith("part in step 5 at the latest: ")
    assert str(parting_of(attrs.evolve(result, is_settled=True))).startswith("part in step 5: ")
    assert str(parting_of(Evidence())) == "nothing that is known differs"


READ = frozenset({"samples", "batch", "streams", "loss", "order", "generators", "host_streams"})
SAVED = READ | {"seed", "component", "settings", "schedule", "environment", "buffers", "start"}
KNOWN = Evidence(alike=SAVED - {"loss"}, is_whole=True, difference=logs("loss"), same_at=4, apart_at=5, is_settled=True)
ALL = {"position", "seed", "batch", "component", "setting", "streams", "buffer", "bit", "environment"}
OPEN = [
    (KNOWN, {"bit"}),
    (attrs.evolve(KNOWN, is_settled=False), {"buffer", "setting", "bit"}),
    (attrs.evolve(KNOWN, is_settled=False, leaves=(UPDATES, LEARNS)), {"buffer", "bit", "update", "arithmetic"}),
    (attrs.evolve(KNOWN, is_settled=False, leaves=(UPDATES, WEIGHT)), {"buffer", "setting", "bit", "arithmetic"}),
    (attrs.evolve(KNOWN, leaves=(UPDATES, WEIGHT)), {"bit"}),
    (Evidence(difference=logs("batch", "loss"), alike=SAVED - {"batch"}, is_whole=True, leaves=(UPDATES,)), set()),
    (attrs.evolve(KNOWN, own=(True, True)), set()),
    (attrs.evolve(KNOWN, alike=SAVED - {"batch"}), {"batch", "bit"}),
    (attrs.evolve(KNOWN, alike=SAVED - {"streams"}), {"streams", "bit"}),
    (attrs.evolve(KNOWN, alike=SAVED - {"schedule"}), {"setting", "bit"}),
    (attrs.evolve(KNOWN, alike=SAVED - {"host_streams"}), {"seed", "streams", "bit"}),
    (attrs.evolve(KNOWN, alike=SAVED - {"environment"}), {"environment", "bit"}),
    (Evidence(difference=logs("loss")), ALL),
    (Evidence(difference=logs("loss"), alike=READ), ALL - {"position", "seed", "batch", "streams"}),
    (Evidence(difference=logs("batch", "loss"), alike=SAVED - {"batch"}, is_whole=True), set()),
    (Evidence(difference=logs("batch", "loss"), alike=SAVED - {"batch"}), {"buffer", "bit", "arithmetic", "setting"}),
    (Evidence(difference=logs("batch", "loss"), alike=frozenset({"samples"}), is_whole=True), {"seed", "component", "setting", "streams", "environment"}),
    (Evidence(difference=logs("batch", "loss"), alike=SAVED - {"batch", "environment"}, is_whole=True), {"environment"}),
    (Evidence(difference=logs("batch", "loss"), alike=SAVED - {"batch", "environment"} | {"versions"}, is_whole=True), set()),
    (Evidence(difference=logs("streams", "loss"), alike=SAVED - {"streams"} | {"streams before"}, is_whole=True), set()),
    (Evidence(difference=logs("streams", "loss"), alike=SAVED - {"streams", "start", "seed"}, is_whole=True), {"seed", "setting", "buffer", "bit", "arithmetic"}),
    (attrs.evolve(KNOWN, difference=None, leaves=(LeafApart("model.buffers['n.mean']", differing=1),), alike=SAVED - {"buffers"}), {"setting", "bit", "arithmetic"}),
]  # fmt: skip


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
