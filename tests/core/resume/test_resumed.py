"""What a resumed state takes from the checkpoint and what it keeps of the run, decided from values: no store, no file."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.format.manifest import Head, Manifest
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.resume.resumed import resumed_contract, resumed_optimizer, resumed_origin, with_kept_hyper
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import OptimizerState, Origin, OwnOptimizerState, ParamGroup, TrainState

NAMES = ("lr", "eps", "betas", "initial_lr")
HYPER = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3))


def optimizer(hyper, *params):
    return OptimizerState("k", Leaves({}), (ParamGroup(dict(hyper), params or ("w",)),))


def plan_of(*actions, contract=None, drifts=(), saved=None):
    manifest = Manifest(Head("r", 7, 2, ((0, 3),)), 1, (), (), saved or {}, {}, ())
    return ResumePlan("runs/a", "step-00000007", manifest, actions, drifts, (), contract=contract or {})


@given(saved=HYPER, wanted=HYPER, kept=st.sets(st.sampled_from(NAMES)))
def test_a_kept_hyperparameter_is_that_of_the_run_and_any_other_that_of_the_checkpoint(saved, wanted, kept):
    """By a simple model of both dicts. What the run does not have and keeps is dropped."""
    keys = [f"optimizer.groups['w'].{name}" for name in kept]
    found = with_kept_hyper(optimizer(saved), optimizer(wanted), keys).groups[0].hyper
    assert found == {
        name: (wanted if name in kept else saved)[name]
        for name in NAMES
        if (name in wanted if name in kept else name in saved)
    }


def test_a_group_whose_label_the_run_does_not_have_keeps_what_was_saved():
    found = with_kept_hyper(optimizer({"lr": 1}, "gone"), optimizer({"lr": 2}), ["optimizer.groups['gone'].lr"])
    assert found.groups[0].hyper == {"lr": 1}


def test_the_optimizers_inside_of_one_are_decided_under_their_own_names():
    """A key of the outer optimizer does not decide about a held one."""
    saved = OwnOptimizerState(base=optimizer({"lr": 1}), held={"inner": optimizer({"lr": 1})})
    wanted = OwnOptimizerState(base=optimizer({"lr": 2}), held={"inner": optimizer({"lr": 2})})
    outer = resumed_optimizer(saved, wanted, None, ["optimizer.groups['w'].lr"])
    assert (outer.base.groups[0].hyper["lr"], outer.held["inner"].groups[0].hyper["lr"]) == (2, 1)
    inner = resumed_optimizer(saved, wanted, None, ["optimizer.held['inner'].groups['w'].lr"])
    assert (inner.base.groups[0].hyper["lr"], inner.held["inner"].groups[0].hyper["lr"]) == (1, 2)


def test_what_is_no_optimizer_stays_as_it_was_saved():
    saved = {"ema": torch.ones(2)}
    assert resumed_optimizer(saved, None, None, ()) is saved


@pytest.mark.parametrize(("verb", "continues"), [("load", True), ("adopt", True), ("keep", False), ("reset", False)])
def test_a_state_descends_from_a_checkpoint_if_it_continues_its_counts(verb, continues):
    """The best weights alone, loaded into another run, do not make it a continuation."""
    mine = Origin({"other": ParentCheckpoint(0, 1)}, frozenset({"old"}))
    origin = resumed_origin(plan_of(ComponentAction("trainer", verb), ComponentAction("model", "load")), mine)
    assert origin.runs == {
        "other": ParentCheckpoint(0, 1),
        **({"r": ParentCheckpoint(2, 7, ((0, 3),))} if continues else {}),
    }
    assert origin.adapts == frozenset()


def test_the_contract_of_a_resumed_state_is_the_runs_own_with_what_the_plan_and_the_checkpoint_add():
    """In the order of their precedence: the run, the plan, the notes of the checkpoint."""
    saved = {"rates": {"w": [0.1]}, "unsaved": {"model.p": "a number"}, "batch_size": 4, "step.accumulate": 2}
    like = TrainState(contract={"batch_size": 8, "step.accumulate": 1, "unsaved": {"model.q": "mine"}})
    plan = plan_of(contract={"step.accumulate": 2}, saved=saved)
    assert resumed_contract(plan, like, None) == {
        "batch_size": 8,
        "rates": {"w": [0.1]},
        "step.accumulate": 2,
        "unsaved": {"model.p": "a number"},
    }


def test_settings_of_the_checkpoint_are_recorded_for_objects_that_are_attached_later():
    saved = {"attached.ema.decay": 0.9, "attached.model.p": 0.1}
    like = TrainState(contract={"attached.model.p": 0.5})
    assert resumed_contract(plan_of(saved=saved), like, None) == {"attached.ema.decay": 0.9, "attached.model.p": 0.5}


def test_a_drift_that_adapts_a_scheduler_is_in_the_origin():
    """Attached schedulers continue under the settings of the run only where the plan says `adapt`."""
    drifts = (
        Drift("scheduler", "scheduler.lr.base_lrs", "10", "20", "adapt"),
        Drift("schedule_function", "scheduler.f", "a", "b", "warn"),
    )
    assert resumed_origin(plan_of(drifts=drifts), Origin()).adapts == frozenset({"scheduler.lr.base_lrs"})
