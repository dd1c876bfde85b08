"""The newest checkpoint that can do what was asked is taken, by every door, and the newer ones that cannot are named."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold.adapters.cli.plan import plan_run
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import open_store
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointMissing, InvalidArgument, InvalidState, ResumeRefused
from trainfold.core.state.state import Progress
from trainfold.weights import CheckpointWeights, HubDirectory

HAS = ("model", "optimizer", "trainer", "rng", "ema")
MODES = {
    "full": ({}, HAS),
    "weights": ({"components": ["model"]}, ("model",)),
    "weights and counters": ({"components": ["model", "trainer"]}, ("model", "trainer")),
    "all but streams": ({"reset": {"rng": "a new seed"}}, ("model", "optimizer", "trainer", "ema")),
    "all but the average": ({"components": ["model", "optimizer", "trainer", "rng"]}, HAS[:4]),
}


def state_at(step):
    model, adamw = nn.Linear(2, 1), trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    state = trainfold.init_state(model, adamw, seed=0, extra={"ema": {"w": torch.full((1,), float(step))}})
    with torch.no_grad():
        state.model.params["weight"].fill_(step)
    return state.evolve(trainer=Progress(step=step))


def run_of(selections, store):
    for step, names in enumerate(selections):
        trainfold.save(state_at(step), store, components=sorted(names))
    return store


def expected(selections, needed):
    return next((step for step in reversed(range(len(selections))) if set(needed) <= selections[step]), None)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.sampled_from(HAS), min_size=1), min_size=1, max_size=4), st.sampled_from(sorted(MODES)))
def test_the_newest_that_has_what_was_asked_for_is_taken_and_the_newer_ones_are_named(selections, mode):
    """V06, T24: weights only, weights and counters, full, and all but one; an export is passed over by what it cannot do."""
    options, needed = MODES[mode]
    store, like = run_of(selections, MemoryStore()), state_at(100)
    step = expected(selections, needed)
    plan = trainfold.plan(store, like=like, **options)
    if step is None:
        with pytest.raises(ResumeRefused):
            trainfold.load(store, like=like, **options)
        assert plan.checkpoint == f"step-{len(selections) - 1:08d}"
        lacks = set(needed) - selections[-1]
        assert lacks <= {getattr(each, "where", "") for each in plan.reasons}
    else:
        assert plan.step == step
        passed = {str(each.where).rpartition("/")[2] for each in plan.passed_over}
        assert passed == {f"step-{each:08d}" for each in range(step + 1, len(selections))}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = trainfold.load(store, like=like, **options)
        assert found.model.params["weight"].unique().tolist() == [step]
        said = [str(each.message) for each in caught if each.category is CheckpointPassedOver]
        assert len(said) == len(passed)
        assert all(any(name in text for text in said) for name in passed)
    if mode == "weights":
        if step is None:
            with pytest.raises((CheckpointMissing, InvalidState)):
                CheckpointWeights(store).specs()
        else:
            assert CheckpointWeights(store).pinned().step == step


def test_the_command_line_and_a_manager_choose_alike(tmp_path):
    """V06, V18: of a run that ends with an export; and the plan says which weights are ignored (V02)."""
    run = tmp_path / "run"
    run_of([set(HAS), {"model", "trainer"}, {"model"}], open_store(run))
    for components, step in ((None, 0), (["model", "trainer"], 1), (["model"], 2)):
        answer = plan_run(run, components=components)
        assert answer.data["step"] == step
        assert trainfold.plan(run, like=state_at(9), components=components).step == step
        with trainfold.CheckpointManager(run, components=components) as manager:
            decision = manager.should_load(state_at(9))
            assert decision.step == step
            assert decision.reason.count("passed over") == 2 - step if components is None else True
    plan = trainfold.plan(run, like=state_at(9), initial=HubDirectory("models/base"))
    assert "note         initial weights ignored: HubDirectory('models/base'): the run has checkpoints of its own" in str(plan)  # fmt: skip
    with pytest.raises(
        InvalidArgument, match=r"plan\.initial: expected a WeightSource that supplies what is trained, found str"
    ):
        trainfold.plan(run, like=state_at(9), initial="models/base")
