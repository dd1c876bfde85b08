"""However a run ends, its last state is saved exactly once; one decision for all ranks answers requests."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked, Combined, SignalRequests
from trainfold.adapters.requests.stop_file import StopFile
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import IncompleteWindow
from trainfold.core.state.state import Progress, TrainState


class Job:
    """A run of three epochs of five batches."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(20, 2)), batch_size=4)
        self.live = attach(self.model, self.optimizer, loader=loader)

    def run(self, store, *, epochs=3, steps=None, at=None, **options):
        """Train to the end or until asked to stop; the steps that were saved now, and how often."""
        saved = []
        with CheckpointManager(store, on_event=saved.append, **options) as manager:
            manager.restore(self.live)
            for (x,) in self.live.batches(epochs=epochs, steps=steps):
                self.model(x).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.live.advance(samples=len(x))
                if at is not None:
                    at(self.live.progress.step)
                manager.step(self.live)
                if manager.should_stop:
                    break
            manager.finish(self.live)
        return [event.step for event in saved if event.kind == "committed"]


@pytest.fixture(params=["sync", "async"])
def mode(request):
    return request.param


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"every": 4}, [4, 8, 12, 15]),  # the data ends off the cadence (T53)
        ({"every": 5}, [5, 10, 15]),  # and on it: not a second time (A14)
        ({"every": None}, [15]),
        ({"every": 4, "at_end": False}, [4, 8, 12]),
        ({"every": 4, "steps": 10}, [4, 8, 10]),
    ],
)
def test_the_last_state_is_saved_exactly_once(mode, options, wanted):
    """A14, T53, M48."""
    assert Job().run(MemoryStore(), mode=mode, **options) == wanted


def test_a_finished_run_that_is_launched_again_saves_nothing(mode):
    """A11, M49: it does not replace its last checkpoint either."""
    store = MemoryStore()
    Job().run(store, mode=mode, every=4)
    before = len(store.effects)
    assert Job().run(store, mode=mode, every=4) == []
    assert [str(effect) for effect in store.effects[before:] if effect.name.startswith("step-")] == []


@pytest.mark.parametrize(
    ("request_", "wanted", "stops_at"),
    [("save", [3, 15], 15), ("stop", [3], 3), ("save_and_stop", [3], 3), ("abort", [], 3)],
)
def test_a_request_is_answered_at_the_boundary_that_follows(mode, request_, wanted, stops_at):
    """R01, R02: save now, stop as at the end, save and stop, stop without saving."""
    job, asked = Job(), Asked()
    saved = job.run(MemoryStore(), mode=mode, requests=asked, at=lambda step: step == 3 and asked.ask(request_))
    assert job.live.progress.step == stops_at
    assert saved == wanted


def test_a_stop_that_is_not_to_be_saved_is_not(mode):
    """A search over settings keeps nothing of a stopped run, unless the request is save_and_stop."""
    for request_, wanted in (("stop", []), ("save_and_stop", [3])):
        asked = Asked()
        at = lambda step, ask=asked, what=request_: step == 3 and ask.ask(what)
        assert Job().run(MemoryStore(), mode=mode, requests=asked, at=at, at_end=False) == wanted


def test_a_request_at_a_step_that_is_saved_already_is_answered_by_that():
    store, asked, state = MemoryStore(), Asked(), TrainState(trainer=Progress(step=1))
    with CheckpointManager(store, every=1, requests=asked) as manager:
        assert manager.step(state) is not None
        asked.ask("save")
        assert manager.step(state) is None
        assert not manager.should_save(state).save


def test_a_request_inside_a_window_waits_for_the_boundary_that_closes_it():
    """A06, P29: not lost, and nothing is saved in the middle."""
    model = nn.Linear(2, 1)
    live, store, asked = attach(model), MemoryStore(), Asked()
    with CheckpointManager(store, requests=asked) as manager:
        live.advance(samples=2, steps=0)
        asked.ask("save_and_stop")
        assert manager.step(live) is None
        assert not manager.should_stop
        with pytest.raises(IncompleteWindow):
            manager.save(live)
        live.advance(samples=2)
        assert manager.step(live).status == "written"
        assert manager.should_stop


def test_a_signal_during_an_evaluation_is_answered_at_the_next_boundary():
    """P29: a real signal, in the middle of a long call."""
    job = Job()

    def evaluate(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    with SignalRequests() as requests:
        saved = job.run(MemoryStore(), requests=requests, at=evaluate)
    assert (job.live.progress.step, saved) == (2, [2])


def test_a_file_stops_a_run(tmp_path):
    job, run = Job(), tmp_path / "run"

    def put(step):
        if step == 4:
            (run / "STOP").touch()

    saved = job.run(run, requests=Combined(StopFile(run, every_secs=1e-9)), at=put)
    assert (job.live.progress.step, saved) == (4, [4])
    assert not (run / "STOP").exists()


def test_seconds_are_a_cadence_too(monkeypatch):
    """By a monotonic clock: the steps at which the time has passed are due."""
    now = [0.0]
    monkeypatch.setattr("trainfold.adapters.manager.triggers.time.monotonic", lambda: now[0])
    store = MemoryStore()
    with CheckpointManager(store, every_secs=10) as manager:
        for step in range(1, 8):
            now[0] += 4.0
            manager.step(TrainState(trainer=Progress(step=step)))
    assert [entry.head.step for entry in read_inventory(store).entries] == [3, 6]


def test_all_ranks_do_what_one_of_them_was_asked(mode):
    """R01: a signal on any rank, one decision: no rank saves or stops alone. They hear of it at the next boundary."""
    store = MemoryStore()

    def body(world):
        asked = Asked()
        told = []
        with CheckpointManager(store, mode=mode, requests=asked, collectives=world) as manager:
            for step in range(1, 5):
                if (world.rank, step) == (1, 1):
                    asked.ask("save")
                if (world.rank, step) == (2, 3):
                    asked.ask("save_and_stop")
                outcome = manager.step(TrainState(trainer=Progress(step=step)))
                told.append((outcome is not None, manager.should_stop))
            manager.finish(TrainState(trainer=Progress(step=4)))
        return told

    assert run_threads(3, body) == [[(False, False), (True, False), (False, False), (True, True)]] * 3
    assert [entry.head.step for entry in read_inventory(store).entries] == [2, 4]


def test_the_best_off_the_cadence_is_saved_and_on_it_once(mode):
    """E10."""
    store = MemoryStore()
    with CheckpointManager(store, mode=mode, every=4) as manager:
        saved = [
            step
            for step in range(1, 9)
            if manager.step(TrainState(trainer=Progress(step=step)), is_best=step in {3, 4}) is not None
        ]
    assert saved == [3, 4, 8]


def test_what_a_pointer_of_anybodys_leads_to_is_kept(tmp_path):
    """E02: a link made by a user protects its target too; the pointer `latest` follows, and protects no old checkpoint."""
    run = tmp_path / "run"
    with CheckpointManager(run, keep_last=1) as manager:
        for step in range(1, 6):
            manager.save(TrainState(trainer=Progress(step=step)))
            if step == 2:
                (run / "release").symlink_to("step-00000002")
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000002", "step-00000005"]
    assert (run / "latest").readlink().name == "step-00000005"


def test_what_a_kill_left_of_a_deletion_or_a_save_is_collected_and_nothing_else(tmp_path):
    """E01, C02: without manual help; newer steps, and directories with any file of a user, stay unchanged."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3, 9):
            manager.save(TrainState(trainer=Progress(step=step), extra={"w": torch.ones(2)}))
    for step in (1, 2, 9):
        (run / f"step-{step:08d}" / "manifest.json").unlink()
    (run / "step-00000002" / "notes.txt").write_text("mine")
    with CheckpointManager(run, keep_last=1) as manager:
        with pytest.warns(CheckpointPassedOver, match="step-00000009"):
            manager.load(TrainState(trainer=Progress(), extra={"w": torch.ones(2)}))
        manager.save(TrainState(trainer=Progress(step=4), extra={"w": torch.ones(2)}))
    left = sorted(path.name for path in run.glob("step-*"))
    assert left == ["step-00000002", "step-00000004", "step-00000009"]


def test_a_run_that_was_aborted_and_is_loaded_again_is_saved_at_its_end():
    """R02: the next attempt in the same manager is not aborted."""
    store, asked = MemoryStore(), Asked()
    with CheckpointManager(store, requests=asked) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        asked.ask("abort")
        manager.step(TrainState(trainer=Progress(step=2)))
        assert manager.should_stop
        assert manager.finish(TrainState(trainer=Progress(step=2))) is None
        manager.load(TrainState(trainer=Progress()))
        assert not manager.should_stop
        assert manager.finish(TrainState(trainer=Progress(step=3))).step == 3
