"""Helpers shared by the tests of bad input."""

import pytest
import torch

import trainfold
from trainfold.core import errors
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.problem import Problem
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState


def state_at(step):
    model = ModelState(Leaves({"w": torch.full((64, 3), float(step)), "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": torch.full((64, 3), float(step))}})
    optimizer = OptimizerState("torch.optim.sgd.SGD", slots, (ParamGroup({"lr": 0.1}, ("w", "b")),))
    return TrainState(model=model, optimizer=optimizer, trainer=Progress(step))


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        trainfold.save(state_at(step), tmp_path / "run")
    return tmp_path / "run"


def refused(run, like=None, **request):
    """The refusal, after checking that the target was left alone and that every reason says what to do."""
    like = state_at(0) if like is None else like
    before = fingerprint(like)
    with pytest.raises(errors.ResumeRefused) as caught:
        trainfold.load(run, like=like, **request)
    assert fingerprint(like) == before
    for reason in caught.value.refusal.reasons:
        assert reason.where
        if isinstance(reason, Problem):
            says_all(reason)
    return caught.value


def says_all(error):
    """Check that an error names the place, both sides and the next move."""
    assert all(str(part).strip() for part in (error.where, error.expected, error.found, error.fix)), error


def names_of(error):
    return [getattr(reason, "error", getattr(reason, "kind", None)) for reason in error.refusal.reasons]
