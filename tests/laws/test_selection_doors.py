"""A selection of components means the same at every door: what saves, plans, loads, restores or is attached."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.runs.scan import read_manifest
from trainfold.core.errors import NothingSelected, TrainfoldError
from trainfold.core.resume.resume_plan import Refusal
from trainfold.stores import MemoryStore

ADAMW = trainfold.optimizer(torch.optim.AdamW, lr=0.1)


def state(is_full):
    """A state with every built-in component, or without a schedule and a position in the data."""
    more = {"schedule": trainfold.schedules.constant(), "dataset": trainfold.data.make_cursor(4)} if is_full else {}
    return trainfold.init_state(torch.nn.Linear(1, 1), ADAMW, seed=0, **more)


def live(is_full, components=None):
    """An attached loop with every built-in component, or without a scheduler and a loader."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1), "loader": DataLoader(range(4))} if is_full else {}
    return trainfold.attach(model, sgd, components=components, **more)


def held(store):
    """The components of the checkpoint of a store."""
    (name,) = {each.partition("/")[0] for each in store.list("") if each.startswith("step-")}
    return {each.name for each in read_manifest(store, name).components}


def saved(whole):
    store = MemoryStore()
    trainfold.save(whole, store)
    return store


def by_save(names, is_full):
    store = MemoryStore()
    trainfold.save(state(is_full), store, components=names)
    return held(store)


def by_select(names, is_full):
    store = MemoryStore()
    trainfold.save(trainfold.select(state(is_full), [*names, "trainer"]), store)
    return held(store) - ({"trainer"} - {*names})


def by_attach(names, is_full):
    store, run = MemoryStore(), live(is_full, names)
    with trainfold.CheckpointManager(store) as manager:
        manager.save(run)
    return held(store)


def by_manager(run, names):
    store = MemoryStore()
    with trainfold.CheckpointManager(store, components=names) as manager:
        manager.save(run)
    return held(store)


def by_plan(names, is_full):
    plan = trainfold.plan(saved(state(is_full)), like=state(is_full), components=names)
    if isinstance(plan, Refusal):
        raise trainfold.errors.ResumeRefused("run", plan)
    return {each.name for each in plan.actions if each.verb in ("load", "adopt")}


def by_load(names, is_full):
    whole = state(is_full)
    new = trainfold.load(saved(whole.evolve(trainer=trainfold.Progress(step=3))), like=whole, components=names)
    return None if "trainer" in names and new.trainer.step != 3 else {each for each in names if getattr(new, each)}


def by_manager_load(names, is_full):
    with trainfold.CheckpointManager(saved(state(is_full)), components=names) as manager:
        new = manager.load(state(is_full))
    return {each for each in names if getattr(new, each)}


def by_restore(names, is_full):
    run = live(is_full)
    run.restore(live(is_full).capture(), components=names)
    return {*names} & {*run.present}


def by_manager_restore(names, is_full):
    run, store = live(is_full), MemoryStore()
    trainfold.save(live(is_full).capture(), store)
    with trainfold.CheckpointManager(store, components=names) as manager:
        manager.restore(run)
    return {*names} & {*run.present}


SAVES = {
    "save": by_save,
    "select": by_select,
    "attach": by_attach,
    "manager of a loop": lambda names, is_full: by_manager(live(is_full), names),
    "manager of a state": lambda names, is_full: by_manager(state(is_full), names),
}
LOADS = {
    "plan": by_plan,
    "load": by_load,
    "manager.load": by_manager_load,
    "live.restore": by_restore,
    "manager.restore": by_manager_restore,
}
DOORS = {**SAVES, **LOADS}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("absent", [["dataset"], ["scheduler"], ["scheduler", "dataset"]])
@pytest.mark.parametrize("names", [["model"], ["model", "trainer"], ["model", "optimizer", "trainer"]])
def test_a_known_name_that_the_run_does_not_produce_is_ignored(door, names, absent):
    """B02: also where it belongs to another component that is left out; some doors refused it, and others did not."""
    assert DOORS[door]([*names, *absent], False) == {*names}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model", "optimizer", "trainer"], "expected scheduler with optimizer"),
        (["model", "scheduler", "trainer"], "expected optimizer with scheduler"),
        (["model", "dataset"], "expected trainer with dataset"),
    ],
)
def test_half_of_a_pair_is_refused(door, names, said):
    """B04, G10: `select` had dropped the other half, and its state was saved without a word."""
    if door == "select" and "trainer" not in names:
        return  # without counters nothing is saved at all
    with pytest.raises(TrainfoldError, match=said):
        DOORS[door](names, True)


def test_half_of_a_pair_that_was_selected_before_is_refused_where_it_is_restored():
    """B04: into a loop that has no scheduler either, from which only a log said that one was ignored."""
    half = trainfold.select(live(is_full=True).capture(), ["model", "optimizer", "trainer", "rng"])
    with pytest.raises(TrainfoldError, match="expected scheduler with optimizer"):
        live(is_full=False).restore(half)
    live(is_full=False).restore(half, components=["model", "trainer", "rng"])


def test_half_of_a_pair_that_the_checkpoint_has_is_refused():
    """B04: the learning rate is that of a schedule which the program that loads does not have."""
    store = saved(state(is_full=True))
    with pytest.raises(TrainfoldError, match="expected scheduler with optimizer"):
        trainfold.load(store, like=state(is_full=False), components=["model", "optimizer", "trainer"])


def test_a_checkpoint_of_half_a_pair_still_loads_into_a_state_like_it():
    """B04: such checkpoints were written; the state that is loaded can be saved again."""
    store = saved(state(is_full=True).evolve(scheduler=None))
    like = trainfold.select(state(is_full=True), ["model", "optimizer", "trainer", "dataset", "rng"])
    assert trainfold.save(trainfold.load(store, like=like), MemoryStore()).omitted == ()


@pytest.mark.parametrize("door", [each for each in DOORS if each not in ("select", "plan")])
@pytest.mark.parametrize("names", [[], ["dataset"], ["scheduler", "dataset"]])
def test_a_selection_of_nothing_warns(door, names):
    """B01: ``[]`` is legal, and mostly a mistake; so is a selection of what the run does not have."""
    with pytest.warns(NothingSelected, match="selects none of model, optimizer, "):
        assert DOORS[door](names, False) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingSelected)
        assert DOORS[door](["model"], False) == {"model"}


@pytest.mark.parametrize("command", ["plan", "inspect", "verify", "diff"])
def test_commands_ignore_what_a_checkpoint_does_not_have(command, tmp_path, capsys):
    """B02."""
    trainfold.save(state(is_full=False), tmp_path)
    runs = [str(tmp_path)] * (2 if command == "diff" else 1)
    assert main([command, *runs, "--components", "model,scheduler,dataset"]) == 0
    capsys.readouterr()


def test_a_name_that_an_earlier_selection_left_out_is_known():
    """B02: it was unknown, so a configuration that names it was refused for a part of the run."""
    whole = state(is_full=False).evolve(extra={"ema": {"w": 1}})
    part = trainfold.select(whole, ["model", "trainer"])
    assert trainfold.select(part, ["model", "ema"]).model is part.model
    assert trainfold.save(part, MemoryStore(), components=["model", "trainer", "ema"]).omitted == (
        "optimizer",
        "rng",
        "ema",
    )
    with trainfold.CheckpointManager(MemoryStore(), components=["model", "trainer", "ema"]) as manager:
        manager.save(part)
