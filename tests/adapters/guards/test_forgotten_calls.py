"""A forgotten call or a wrong name is refused at the first call that can detect it, not at a resume."""

import contextlib
import pickle
import shutil

import pytest
import torch

import trainfold
from trainfold.adapters.cli import main
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.errors import (
    IncompleteWindow,
    InvalidArgument,
    ResumeRefused,
    RunNotRestored,
    SaveFailed,
    UnattachedOptimizer,
    UnknownComponent,
)
from trainfold.core.state.state import Progress, TrainState


@pytest.mark.parametrize(("name", "near"), [("modell", "model"), ("optimzer", "optimizer"), ("datasets", "dataset")])
def test_a_mistyped_component_is_refused_when_the_manager_is_made_with_the_nearest_name(name, near, tmp_path):
    """B02: not at the first save, which may be hours away; nothing is changed."""
    with pytest.raises(UnknownComponent, match=f"did you mean '{near}'"):
        CheckpointManager(tmp_path / "run", components=["trainer", name])
    config = CheckpointConfig(run=tmp_path / "run", components=[name])
    with pytest.raises(UnknownComponent, match=f"did you mean '{near}'"):
        create_checkpoint_manager(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("call", ["step", "should_save", "save", "restore", "should_load", "load"])
def test_a_component_that_the_run_does_not_have_is_refused_by_the_first_call_that_sees_the_run(call):
    """B02: also if no save is due; the error lists the names in the run."""
    live = attach(torch.nn.Linear(1, 1), extra={"ema": torch.nn.Linear(1, 1)})
    with (
        CheckpointManager(MemoryStore(), every=1000, components=["model", "emma"]) as manager,
        pytest.raises(UnknownComponent, match=r"'ema'.*did you mean 'ema'"),
    ):
        getattr(manager, call)(live)


def test_components_of_ones_own_that_are_numbered_or_qualified_are_not_taken_for_slips():
    model = torch.nn.Linear(1, 1)
    live = attach(model, extra={"model2": torch.nn.Linear(1, 1), "model_ema": torch.nn.Linear(1, 1)})
    with CheckpointManager(MemoryStore(), components=["model2", "model_ema"]) as manager:
        assert manager.save(live).status == "written"


# --- manager.restore --------------------------------------------------------------------------------------------------


def loop(store, steps, *, restore=True, **options):
    """A user's loop; returns the outcome of each save, and the run."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    with CheckpointManager(store, **options) as manager:
        if restore:
            manager.restore(live)
        for _ in range(steps):
            optimizer.step()
            live.advance(samples=1)
            manager.step(live)
    return live


def record_best(run, step):
    best = trainfold.retention.make_best_record(metric="loss", direction="min")
    best, _ = trainfold.retention.decide_best(best, {"loss": 1.0}, step=step)
    trainfold.retention.save_best(run, best)


def heads(store):
    return {entry.head.step: entry.head for entry in read_inventory(store).entries}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("steps", [1, 4, 9], ids=["below", "at an equal step", "above"])
def test_a_second_start_that_forgets_to_restore_is_refused_at_its_first_step(steps, mode):
    """W10: it used to abandon the run or overwrite its steps; also if no save is due yet, and if the run was restored once."""
    store = MemoryStore()
    loop(store, 4, every=2)
    before = {name: store.read(name) for name in everything(store)}
    for every in (1, 1000):
        with pytest.raises(RunNotRestored, match=r"call manager.restore\(live\).*start_over=True"):
            loop(store, steps, restore=False, every=every, mode=mode)
    with CheckpointManager(store, mode=mode) as manager, pytest.raises(SaveFailed):  # it is one
        manager.save(TrainState(trainer=Progress(step=steps)))
    assert {name: store.read(name) for name in everything(store)} == before
    assert loop(store, 2, every=2, mode=mode).progress.step == 6


def everything(store):
    return [f"{top}/{name}" for top in store.list() for name in store.list(top)]


def test_a_new_start_on_purpose_leaves_the_earlier_checkpoints_behind(caplog):
    """W10, E16: with or without a restore; it has no parent, and a resume continues from it."""
    store = MemoryStore()
    loop(store, 4, every=2)
    fresh = loop(store, 3, every=1, start_over=True)
    assert "starts over on purpose; 2 checkpoints are left behind" in caplog.text
    assert fresh.progress.step == 3
    found = heads(store)
    assert {step: (head.timeline, head.forks) for step, head in found.items()} == {
        1: (1, ()), 2: (1, ()), 3: (1, ()), 4: (0, ())
    }  # fmt: skip
    assert found[1].parent is None
    assert loop(store, 1, every=1).progress.step == 4
    with CheckpointManager(store, start_over=True) as manager:
        assert not manager.should_load(fresh)
        with pytest.raises(InvalidArgument, match="leave start_over=True out"):
            manager.restore(fresh, step=2)
    assert loop(store, 6, every=1, restore=False, start_over=True).progress.step == 6  # above the newest one
    assert {head.timeline for step, head in heads(store).items()} == {2}


@pytest.mark.parametrize("step", [None, 2, 4])
def test_a_state_that_load_brought_from_the_run_counts_as_restored(step):
    """W10, E16: it keeps its origin through steps, selections and copies, so that a rewind starts a timeline."""
    store, sgd, model = MemoryStore(), trainfold.optimizer(torch.optim.SGD, lr=0.1), torch.nn.Linear(2, 1)
    train = trainfold.make_step(model, lambda m, x: trainfold.Loss(m(x).sum(), len(x)), sgd)
    state = trainfold.init_state(model, sgd, seed=0)
    with CheckpointManager(store) as manager:
        for _ in range(4):
            state, _ = train(state, torch.ones(1, 2))
            manager.save(state)
    loaded = trainfold.load(store, like=trainfold.init_state(model, sgd, seed=1), step=step)
    with CheckpointManager(store) as manager:
        if step is None:
            assert manager.save(loaded).result.timeline == 0  # the same step again
        again, _ = train(
            pickle.loads(pickle.dumps(trainfold.merge(loaded, trainfold.select(loaded, None)))), torch.ones(1, 2)
        )
        assert manager.save(again).step == (step or 4) + 1
    newest = heads(store)[(step or 4) + 1]
    assert (newest.timeline, newest.forks) == ((0, ()) if step in (None, 4) else (1, ((0, step),)))


def test_a_rewind_in_a_state_that_is_saved_above_the_newest_step_leaves_it_behind():
    """E16: with a manager, ``trainfold.load`` records where the rewind starts; the steps alone do not show it."""
    store = MemoryStore()
    for step in (1, 2, 3):
        trainfold.save(TrainState(trainer=Progress(step=step)), store)
    loaded = trainfold.load(store, like=TrainState(trainer=Progress()), step=1)
    with CheckpointManager(store) as manager:
        assert manager.save(loaded.evolve(trainer=Progress(step=9))).result.forks == ((0, 1),)


def test_a_live_run_that_a_manager_has_saved_goes_on_with_another_manager():
    """W10: in one process, as in a notebook; its last save is its origin."""
    store, model = MemoryStore(), torch.nn.Linear(1, 1)
    live = attach(model)
    for mode in ("sync", "async", "sync"):
        live.advance(samples=1)
        with CheckpointManager(store, mode=mode) as manager:
            manager.save(live)
    assert {step: head.timeline for step, head in heads(store).items()} == {1: 0, 2: 0, 3: 0}
    captured = live.capture()
    other = attach(torch.nn.Linear(1, 1))
    other.restore(captured)
    other.advance(samples=1)
    with CheckpointManager(store) as manager:
        assert manager.save(other).step == 4


def test_weights_of_the_best_are_no_restore():
    """E15, W10: they bring no counters."""
    store = MemoryStore()
    loop(store, 2, every=1)
    record_best(store, 2)
    other = attach(torch.nn.Linear(1, 1))
    with CheckpointManager(store) as manager:
        manager.load_best(other)
        with pytest.raises(RunNotRestored):
            manager.save(other)


def test_an_origin_is_no_part_of_what_a_state_says():
    """Two states with equal values are equal, map together, and have one fingerprint, whatever their origins."""
    store, state = MemoryStore(), TrainState(trainer=Progress(step=1))
    trainfold.save(state, store)
    loaded = trainfold.load(store, like=state)
    assert loaded.origin.runs
    assert loaded == state
    assert tree.structure(loaded) == tree.structure(state)
    assert tree.map(lambda a, b: (a, b), loaded, state).trainer.step == (1, 1)
    assert trainfold.fingerprint(loaded) == trainfold.fingerprint(state)
    assert "origin" not in repr(loaded)


def test_all_ranks_refuse_together():
    """C07: each has its own manager; rank 0 looks."""
    store = MemoryStore()
    trainfold.save(TrainState(trainer=Progress(step=1)), store)

    def rank(world):
        with CheckpointManager(store, collectives=world) as manager, pytest.raises(RunNotRestored):
            manager.save(TrainState(trainer=Progress(step=2)))
        return True

    assert run_threads(2, rank) == [True, True]


# --- live.advance -----------------------------------------------------------------------------------------------------


def test_an_optimizer_step_that_was_not_counted_is_refused_by_the_next_manager_step():
    """W11: also if no save is due, because none ever would be; also by a disabled manager, so that a short test finds it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    for manager in (CheckpointManager(MemoryStore(), every=1000), DisabledManager()):
        with manager:
            manager.step(live)  # nothing has been done
            optimizer.step()
            with pytest.raises(
                IncompleteWindow, match=r"1 of optimizer; call live.advance\(samples=...\) after optimizer.step"
            ):
                manager.step(live)
            live.advance(samples=1)
            manager.step(live)


def test_an_optimizer_step_is_refused_also_where_the_optimizer_and_the_count_were_both_forgotten():
    """W11, W13: no attached optimizer reports a step, and the run silently saved nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer, live = torch.optim.SGD(model.parameters(), lr=0.1), attach(model)
    for manager in (CheckpointManager(MemoryStore(), every=1), DisabledManager()):
        with manager:
            optimizer.step()
            with pytest.raises(
                UnattachedOptimizer, match=r"manager.step.*SGD on weight, bias.*attach\(model, optimizer\)"
            ):
                manager.step(live)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_run_that_is_attached_anew_after_its_restore_is_refused(is_loaded):
    """W10: the restore went to another object; this one counts from 0, and its saves would abandon the run."""
    store = MemoryStore()
    loop(store, 4, every=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(store, every=1) as manager:
        first = attach(model, optimizer)
        manager.load(first) if is_loaded else manager.restore(first)
        second = attach(model, optimizer)
        optimizer.step()
        second.advance(samples=1)
        with pytest.raises(RunNotRestored, match=r"manager\.restore"):
            manager.step(second)
        first.advance(samples=1)
        assert manager.step(first).step == first.progress.step


def test_a_state_that_was_loaded_and_not_taken_is_refused():
    """W10: ``manager.load(state)`` returns the state; a call whose result is discarded restores nothing."""
    store = MemoryStore()
    save(TrainState(trainer=Progress(step=3)), store)
    with CheckpointManager(store) as manager:
        fresh = TrainState(trainer=Progress())
        loaded = manager.load(fresh)
        with pytest.raises(RunNotRestored):
            manager.step(fresh.evolve(trainer=Progress(step=1)))
        manager.save(loaded.evolve(trainer=Progress(step=4)))
    assert heads(store)[4].parent == "step-00000003"


def exporting(main, exported, *, components, restore=True):
    """One start of a loop that saves its weights for others, into a run of their own."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    with CheckpointManager(main) as manager, CheckpointManager(exported, components=components) as exporter:
        if restore:
            manager.restore(live)
        optimizer.step()
        live.advance(samples=1)
        if restore:
            manager.save(live)
        return exporter.save(live).step


def test_weights_beside_a_run_are_saved_on_after_a_resume():
    """W10: they have no counters to resume from; anything that can be resumed is refused as before."""
    main, exported = MemoryStore(), MemoryStore()
    assert [exporting(main, exported, components=["model"]) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RunNotRestored):
        exporting(MemoryStore(), exported, components=["model"], restore=False)  # of another loop, from its beginning
    with pytest.raises(RunNotRestored):
        exporting(main, exported, components=["model", "trainer"])
    with pytest.raises(RunNotRestored):
        exporting(MemoryStore(), main, components=["model"])


def test_a_restore_of_some_components_says_that_the_run_counts_from_the_beginning(caplog):
    """W10: `components=["model"]` on a run that has more gives its weights, and neither its step nor its optimizer."""
    store, kept = MemoryStore(), ["model", "trainer"]
    exporting(store, MemoryStore(), components=None)
    for names in (kept, ["model"]):
        caplog.clear()
        model = torch.nn.Linear(1, 1)
        with CheckpointManager(store, components=names) as manager:
            manager.restore(attach(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        said = [each.getMessage() for each in caplog.records if "components=" in each.getMessage()]
        assert len(said) == (names != kept)
    assert "at step 1 only model is restored" in said[0]
    assert "counts from step 0" in said[0]


def test_a_cadence_that_is_a_word_is_refused_with_a_fix_that_saves_as_often_as_was_meant():
    """A command line gives the string "500"; every='auto' is another cadence."""
    with pytest.raises(InvalidArgument, match=r"found '500'; pass a number of optimizer steps, such as every=500"):
        CheckpointManager(MemoryStore(), every="500")


# --- a whole checkpoint -----------------------------------------------------------------------------------------------


def killed_in_its_first_save(run):
    """The remains of a run whose first save, of step 2, was killed before its commit."""
    save(TrainState(trainer=Progress(step=2), rng=torch.zeros(2)), run)
    (run / "step-00000002" / "manifest.json").unlink()
    (run / "latest").unlink()


def test_a_run_that_was_killed_in_its_first_save_starts_fresh(tmp_path):
    """A14, W21: nothing was ever committed, so there is nothing to lose."""
    killed_in_its_first_save(tmp_path)
    assert loop(tmp_path, 3, every=1).progress.step == 3


@pytest.mark.parametrize("damage", ["no manifest", "no directory", "no latest, a best"])
def test_a_run_that_has_lost_its_checkpoints_is_refused_and_not_started_fresh(damage, tmp_path, capsys):
    """W21, E13: an interrupted copy; the error names the evidence of a lost checkpoint, and the fix."""
    loop(tmp_path, 4, every=2)
    if damage == "no latest, a best":
        record_best(tmp_path, 4)
        (tmp_path / "latest").unlink()
        (tmp_path / "best").unlink()
    for directory in tmp_path.glob("step-*"):
        if directory.is_symlink():
            continue
        shutil.rmtree(directory) if damage == "no directory" else (directory / "manifest.json").unlink()
    with pytest.raises(ResumeRefused, match=r"(?s)RunDamaged.*(latest names step-00000004|best.json).*start_over=True"):
        loop(tmp_path, 3, every=1)
    with pytest.raises(ResumeRefused, match="RunDamaged"):
        trainfold.load(tmp_path, like=TrainState(trainer=Progress()))
    assert main(["plan", str(tmp_path)]) == 19
    capsys.readouterr()
    assert loop(tmp_path, 5, every=1, start_over=True).progress.step == 5
    assert loop(tmp_path, 1, every=1).progress.step == 6


@pytest.mark.parametrize("call", ["step", "save", "should_save", "none", "none, and an error"])
def test_a_manager_that_is_closed_and_was_never_asked_to_save_says_so(call, caplog):
    """W11: a loop without ``manager.step`` restored, trained, closed, and silently lost everything."""
    model = torch.nn.Linear(2, 1)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps, failing = (1, contextlib.suppress(ZeroDivisionError)) if "error" in call else (6, contextlib.nullcontext())
    with failing, CheckpointManager(MemoryStore()) as manager:
        manager.restore(live)
        for _ in range(steps):
            live.optimizers["optimizer"].step()
            live.advance(samples=1)
        if call in ("step", "save", "should_save"):
            getattr(manager, call)(live)
        if "error" in call:
            raise ZeroDivisionError  # in the first step, before the loop comes to ask
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == (call == "none")
    if told:
        assert "6 steps were trained since the restore, and none of them was saved" in told[0]
        assert "manager.step(live)" in told[0]
