"""The newest checkpoint is skipped, by name, if it lacks requested components and an older one has them."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold.adapters.cli import main
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, ResumeRefused, TrainfoldError


def make_live(extra=None):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), extra=extra)


def train(live, manager):
    model = live.modules[0]
    model(torch.ones(1, 2)).sum().backward()
    live.optimizers["optimizer"].step()
    live.optimizers["optimizer"].zero_grad()
    live.advance(samples=1)
    manager.save(live)


def run_with(store, *parts):
    """One save for each, of these components."""
    live = make_live()
    for components in parts:
        with CheckpointManager(store, components=components) as manager:
            train(live, manager)
    return live


MODEL_ONLY, WEIGHTLESS, WITHOUT_COUNTERS = ["model"], ["optimizer", "trainer", "rng"], ["model", "optimizer", "rng"]


@pytest.mark.parametrize("newest", [MODEL_ONLY, WEIGHTLESS, WITHOUT_COUNTERS])
@pytest.mark.parametrize("above", [1, 2])
def test_a_newest_one_without_what_is_asked_for_is_passed_over_and_named(newest, above):
    """V06, T24: a full resume does not pick a final export of the weights."""
    store = MemoryStore()
    run_with(store, None, *[newest] * above)
    plan = trainfold.plan(store, like=make_live().capture())
    assert plan.step == 1
    assert [problem.where for problem in plan.passed_over] == [
        f"memory:/step-{at:08d}" for at in range(above + 1, 1, -1)
    ]
    assert "ComponentsLeftOut" in str(plan)
    live = make_live()
    with CheckpointManager(store) as manager:
        with pytest.warns(CheckpointPassedOver, match="saved with") as told:
            assert manager.restore(live).step == 1
        assert len(told) == above
        train(live, manager)
    assert trainfold.plan(store, like=make_live().capture()).step == 2  # what was left behind is behind


def test_what_has_all_that_is_asked_for_is_taken_however_little_that_is():
    store = MemoryStore()
    run_with(store, None, MODEL_ONLY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        like = make_live().capture()
        assert trainfold.plan(store, like=like, components=["model"]).step == 2
        assert trainfold.plan(store, like=like, policy={"missing_component": "adapt"}).step == 2
    run_with(other := MemoryStore(), None, WEIGHTLESS)
    assert trainfold.plan(other, like=like, components=["model"]).step == 1
    assert trainfold.plan(other, like=like, policy={"external_weights": "adapt"}).step == 2
    assert trainfold.plan(other, like=like, reset={"model": "weights come from elsewhere"}).step == 2


def test_an_explicit_step_is_refused_as_before():
    store = MemoryStore()
    run_with(store, None, MODEL_ONLY)
    live = make_live()
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match=r"optimizer.*nothing"):
        manager.restore(live, step=2)


def test_where_no_older_one_has_it_the_newest_is_refused_with_its_reasons():
    store = MemoryStore()
    run_with(store, MODEL_ONLY, MODEL_ONLY)
    refusal = trainfold.plan(store, like=make_live().capture())
    assert refusal.checkpoint == "step-00000002"
    assert {reason.where for reason in refusal.reasons} == {"optimizer", "trainer", "rng"}


def test_an_older_one_that_is_refused_for_something_else_says_both():
    store = MemoryStore()
    run_with(store, None, MODEL_ONLY)
    model = nn.Linear(2, 1)
    other = attach(model, torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9))
    refusal = trainfold.plan(store, like=other.capture())
    assert refusal.checkpoint == "step-00000001"
    assert "lr" in str(refusal)
    assert "ComponentsLeftOut" in str(refusal)


def test_a_component_that_the_script_has_got_since_sends_nobody_back():
    """Nothing says that it was left out: an older checkpoint with it is another run's past, and going back would be silent loss."""
    store = MemoryStore()
    held = {"notes": {"n": 1}}
    extra = {"notes": (lambda: held["notes"], lambda notes: held.update(notes=notes))}
    live = make_live(extra)
    with CheckpointManager(store) as manager:
        train(live, manager)
    live = make_live()
    live.advance(samples=1, steps=5)
    trainfold.save(live.capture(), store)
    refusal = trainfold.plan(store, like=make_live(extra).capture())
    assert refusal.checkpoint == "step-00000005"


def test_the_command_plans_what_a_resume_does(tmp_path, capsys):
    run_with(tmp_path / "run", None, MODEL_ONLY)
    assert main(["plan", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "step-00000001" in said
    assert "ComponentsLeftOut" in said


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("export", [MODEL_ONLY, WEIGHTLESS])
def test_exports_into_a_run_push_out_no_checkpoint_that_a_resume_needs(keep_last, export, tmp_path):
    """V06, E01: three exports after a full save, with room for one or two: the full one stays, and is what a resume takes."""
    live, exports = make_live(), 3
    with CheckpointManager(tmp_path, keep_last=keep_last) as manager:
        for _ in range(keep_last + 1):
            train(live, manager)
    for _ in range(exports):
        with CheckpointManager(tmp_path, keep_last=keep_last, components=export) as manager:
            train(live, manager)
    names = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
    full = list(range(2, keep_last + 2))
    assert names == [*full, *range(full[-1] + 1 + exports - keep_last, full[-1] + 1 + exports)]
    with CheckpointManager(tmp_path, keep_last=keep_last) as manager, pytest.warns(CheckpointPassedOver):
        assert manager.restore(make_live()).step == full[-1]


def test_an_export_goes_when_as_many_whole_ones_are_newer(tmp_path):
    """A whole checkpoint can replace an export."""
    live = make_live()
    with CheckpointManager(tmp_path, components=MODEL_ONLY) as manager:
        train(live, manager)
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for _ in range(2):
            train(live, manager)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == [2, 3]


@given(names=st.sets(st.sampled_from(["model", "optimizer", "scheduler", "dataset", "rng", "ema"])))
def test_a_selection_that_is_saved_records_what_it_lacks_as_components_do(names):
    """B03, B04: ``save(select(state, names))`` listed nothing as left out."""
    model = nn.Linear(2, 1)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    state = trainfold.init_state(model, adamw, seed=0, schedule=trainfold.schedules.constant(), extra={"ema": {"w": 1}})
    state = state.evolve(dataset=trainfold.data.DataCursor(length=4, seed=0, epoch=0, next_index=0))
    names = [*sorted(names), "trainer"]
    found = []
    for part, components in ((state, names), (trainfold.select(state, names), None)):
        store = MemoryStore()
        try:
            trainfold.save(part, store, components=components)
        except TrainfoldError as error:
            found.append(type(error))
        else:
            found.append(read_manifest(store, "step-00000000").omitted)
    if "optimizer" in names and "model" not in names and found[0] is not InvalidArgument:
        assert found[1] is InvalidState  # weights are left out by components= alone
    else:
        assert found[0] == found[1]


def test_a_selection_that_is_merged_again_lacks_nothing():
    """B03: the mark of a selection ends where the component is back."""
    state = make_live(extra={"ema": nn.Linear(1, 1)}).capture()
    whole = trainfold.merge(
        trainfold.select(state, ["model", "trainer"]), trainfold.select(state, ["optimizer", "rng", "ema"])
    )
    store = MemoryStore()
    trainfold.save(whole, store)
    assert read_manifest(store, "step-00000000").omitted == ()
