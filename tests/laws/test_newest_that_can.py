"""The newest checkpoint that can do what was asked is taken, by every door, and the newer ones that cannot are named."""

import warnings

import attrs
import pytest
import torch
from hypothesis import example, given, settings
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


@st.composite
def histories(draw):
    """Saves in the order in which they were made: (step, components). A step that is not above the last one goes back first."""
    saves, last = [], 0
    for names in draw(st.lists(st.sampled_from([set(HAS), {"model"}, {"model", "trainer"}]), min_size=1, max_size=6)):
        last = draw(st.sampled_from([last + 1, last + 1, *range(last + 1)]))
        saves.append((last, names))
    return saves


def by_model(saves, needed):
    """What a full resume takes, and what it may name: the newest of the current timeline, and the newest that rewinds have left behind."""
    there, current, timeline = {}, [], 0
    for step, names in saves:
        if current and step < current[-1]:
            current, timeline = [each for each in current if each < step], timeline + 1
        current = [*(each for each in current if each != step), step]
        there[step] = (timeline, names)
    able = [step for step in there if set(needed) <= there[step][1]]
    taken = max((step for step in able if step in current), default=None)
    left = max((step for step in able if step not in current), key=lambda step: (there[step][0], step), default=None)
    return current, taken, left


@settings(deadline=None, max_examples=30)
@given(histories(), st.sampled_from(["full", "weights and counters"]))
@example([(1, set(HAS)), (2, set(HAS)), (0, {"model"})], "full")
def test_what_a_rewind_has_left_behind_is_named_with_the_call_that_takes_it_where_nothing_else_can(tmp_path_factory, saves, mode):  # fmt: skip
    """V03, V06, V18, T24: what was left behind never wins by itself; where only it has what was asked for, the refusal says which step to name, also on the command line."""
    options, needed = MODES[mode]
    store, like = tmp_path_factory.mktemp("top") / "run", state_at(100)
    for step, names in saves:
        trainfold.save(state_at(step), store, components=sorted(names))
    current, taken, left = by_model(saves, needed)
    plan, shown = trainfold.plan(store, like=like, **options), plan_run(store, **options)
    if taken is not None:
        assert plan.step == shown.data["step"] == taken
        passed = {int(str(each.where)[-8:]) for each in plan.passed_over}
        assert passed == {step for step in current if step > taken}
        return
    assert plan.checkpoint == f"step-{current[-1]:08d}"
    if left is None:
        assert "left it behind" not in str(plan)
        return
    assert f"step {left} has them" in str(plan.reasons[0])
    assert shown.error.exit_code
    assert [each["where"] for each in shown.data["reasons"]] == [each.where for each in plan.reasons]
    assert shown.data["reasons"][0] == attrs.asdict(plan.reasons[0])
    assert f"restore(live, step={left})" in plan.fix
    with pytest.raises(ResumeRefused, match=f"step={left}"):
        trainfold.load(store, like=like, **options)
    assert trainfold.load(store, like=like, step=left, **options).trainer.step == left


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
