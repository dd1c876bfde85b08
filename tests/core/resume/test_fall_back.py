"""Whether all ranks decided the same, and what follows a load that failed: decided from values, without a store or a rank."""

import attrs
import pytest

from trainfold.core.errors import (
    CheckpointDamaged,
    InvalidState,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
)
from trainfold.core.format.manifest import Head, Manifest
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.fall_back import (
    RELISTINGS,
    after_failure,
    decided,
    disagreement,
    failure_of,
    lists_again,
    outcome_of_all,
)
from trainfold.core.resume.request import ResumeRequest
from trainfold.core.resume.resume_plan import Refusal, ResumePlan

RUN = Inventory("r", "r", tuple(Entry(f"step-{step:08d}", Head("r", step)) for step in (10, 20)))
DAMAGED = failure_of(CheckpointDamaged("step-00000020/a", expected="a digest", found="another", fix="use an older one"))
UNFIT = failure_of(InvalidState("state.model", expected="a place", found="none", fix="build it"))


def plan_of(step):
    manifest = Manifest(Head("r", step), 1, (), (), {}, {}, ())
    return ResumePlan("r", f"step-{step:08d}", manifest, (), (), ())


def refusal_of(checkpoint):
    return Refusal("r", checkpoint, (Problem("SpecMismatch", "model.w", "(2,)", "(3,)", "build it so"),))


def raised(*outcomes):
    """What each rank raises."""
    decisions = [decided(each) for each in outcomes]
    return [type(disagreement("runs/a", decisions, each)) for each in outcomes]


def test_ranks_with_equal_plans_or_equal_refusals_go_on_together():
    assert raised(plan_of(20), plan_of(20)) == [type(None)] * 2
    assert raised(refusal_of("step-00000020"), refusal_of("step-00000020")) == [type(None)] * 2


def test_ranks_that_chose_different_checkpoints_all_say_that_they_disagree():
    """Also if one of them refuses its own: the cause is what they see, not what is wrong with it."""
    assert raised(plan_of(20), plan_of(10)) == [RanksDisagree] * 2
    assert raised(plan_of(20), refusal_of("step-00000010")) == [RanksDisagree] * 2
    assert raised(plan_of(20), refusal_of(None)) == [RanksDisagree] * 2


def test_a_rank_that_refuses_alone_raises_its_reasons_and_the_others_name_it():
    """The rank that is to blame is named on every other rank."""
    outcomes = plan_of(20), refusal_of("step-00000020"), plan_of(20)
    assert raised(*outcomes) == [RankFailed, ResumeRefused, RankFailed]
    error = disagreement("runs/a", [decided(each) for each in outcomes], outcomes[0])
    assert error.where == "rank 1"
    assert "model.w" in error.found


@pytest.mark.parametrize(
    ("step", "failures", "next_one"),
    [
        (None, [DAMAGED], "step-00000010"),
        (None, [DAMAGED, DAMAGED], "step-00000010"),
        (20, [DAMAGED], None),  # it was asked for
        (None, [UNFIT], None),  # it would not fit from an older checkpoint either
        (None, [DAMAGED, UNFIT], None),
    ],
)
def test_an_older_checkpoint_is_tried_only_if_it_may_be_free_of_the_problem(step, failures, next_one):
    found = after_failure(RUN, ResumeRequest(step), "step-00000020", failures)
    assert (None if found is None else lineage(found)[0].name) == next_one
    if found is not None:
        assert found.entry("step-00000020").problem == DAMAGED.problem


def test_the_quarantine_records_the_worst_of_all_ranks():
    assert outcome_of_all([UNFIT, DAMAGED]).ending == "damaged"
    assert outcome_of_all([]).ending == "loaded"


def test_a_refusal_lists_the_run_again_if_a_rank_sees_a_change_but_not_for_ever():
    assert [lists_again(0, has_changed) for has_changed in (False, True)] == [False, True]
    assert not lists_again(RELISTINGS, True)


def test_each_failure_removes_a_candidate_so_that_a_load_ends():
    inventory, tried = RUN, []
    while found := lineage(inventory):
        tried.append(found[0].name)
        inventory = after_failure(inventory, ResumeRequest(), found[0].name, [DAMAGED])
    assert tried == ["step-00000020", "step-00000010"]
    assert attrs.evolve(inventory, entries=()) == attrs.evolve(RUN, entries=())


def test_a_refusal_is_about_optional_components_only_if_every_reason_is():
    """Then the run goes on without them; a reason of another kind is never passed over."""
    drifts = [Drift("missing", f"{name}.w", "", "", "refuse") for name in ("ema", "probe")]
    assert Refusal("r", None, tuple(drifts)).about_optional({"ema", "probe", "other"}).keys() == {"ema", "probe"}
    assert Refusal("r", None, tuple(drifts)).about_optional({"ema"}) == {}
    assert not attrs.evolve(refusal_of(None), reasons=(*drifts, *refusal_of(None).reasons)).about_optional(
        {"ema", "probe"}
    )
