"""Background saves under interrupts, listeners, forks, retention and missing threads."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import threading
import weakref

import pytest
import torch
from kit.adapters.manager.async_save_cases import PausingStore, momentum_job
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.hold.hold import Hold
from trainfold.backends.runs.api import load
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    IncompleteWindow,
    RunLocked,
    SaveFailed,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.save.retention import Retention
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Progress, TrainState


def test_a_manager_that_nobody_keeps_stands_before_updates_until_its_save_has_ended():
    store, (live, train) = PausingStore(3), momentum_job()
    wanted = fingerprint(live.capture())
    gone = weakref.ref(manager := CheckpointManager(store, mode="async"))
    manager.save(live)
    under_way = manager._saves._under_way.job
    assert store.has_paused.wait(20)
    del manager
    gc.collect()
    assert gone() is None
    with pytest.raises(RunLocked), store.lock():
        pass
    train()
    store.may_go_on.set()
    under_way.wait()
    found = load(store.inner, like=live.capture())
    assert {name: digest for name, digest in fingerprint(found).items() if name != "rng"} == {
        name: digest for name, digest in wanted.items() if name != "rng"
    }


def test_an_interrupted_wait_is_no_end_of_the_save(monkeypatch):
    """Ctrl-C in drain or close: the save continues, stays held, and is reported later."""
    store, (live, train) = PausingStore(3), momentum_job()
    wanted = fingerprint(live.capture())["model"]
    manager = CheckpointManager(store, mode="async")
    manager.save(live)
    assert store.has_paused.wait(20)
    job = manager._saves._under_way.job
    for call in (manager.drain, manager.close):
        with monkeypatch.context() as patched:
            patched.setattr(type(job), "wait", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
    train()
    store.may_go_on.set()
    assert manager.drain().step == 1
    assert fingerprint(load(store.inner, like=live.capture(), step=1))["model"] == wanted
    manager.close()


def _interrupted(*_):
    raise KeyboardInterrupt


def test_a_save_that_fails_while_an_update_copies_does_not_end_the_loop(monkeypatch):
    """The hold is released during the copy: the step continues, and the failure is raised where failures of saves are."""
    leaf = torch.zeros(1 << 20)
    hold = Hold({("model", "w"): leaf, ("model", "v"): torch.zeros(10)})
    real = Arena.take

    def taken(arena, size_bytes):
        hold.release()
        return real(arena, size_bytes)

    monkeypatch.setattr(Arena, "take", taken)
    hold.protect()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_listener_cannot_call_the_manager_back(mode, caplog):
    """A save or a close would interfere with the report of the other save."""
    store, calls = MemoryStore(), []
    with CheckpointManager(
        store, mode=mode, on_event=lambda event: calls.append(event) or manager.save(state)
    ) as manager:
        state = TrainState(trainer=Progress(step=1))
        manager.save(state)
        manager.drain()
    assert "one from on_event" in caplog.text
    assert [name for name in store.list() if name.startswith("step-")] == ["step-00000001"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_ends_inside_a_window_is_told_and_not_lost_in_silence(mode):
    """A06, A14."""
    live = attach(nn.Linear(2, 1))
    live.advance(samples=2, steps=0)
    with CheckpointManager(MemoryStore(), mode=mode) as manager:
        with pytest.raises(IncompleteWindow, match="drop_window"):
            manager.finish(live)
        live.drop_window()
        assert manager.finish(live).step == 0


def test_the_last_step_is_saved_although_the_save_before_it_failed():
    """A14, D05: in the same call, and then the failure is raised."""
    store = PausingStore(fault=ErrorAt(9))
    with CheckpointManager(store, mode="async", every=5) as manager:
        manager.step(TrainState(trainer=Progress(step=5), extra={"w": torch.ones(4)}))
        manager._saves._under_way.job.wait()
        with pytest.raises(SaveFailed):
            manager.step(TrainState(trainer=Progress(step=7), extra={"w": torch.ones(4)}), is_last=True)
    assert [name for name in store.inner.list() if name.startswith("step-")] == ["step-00000007"]


@pytest.mark.parametrize("fails", [False, True])
def test_where_no_thread_can_be_started_the_call_saves(monkeypatch, fails):
    store, (live, train) = MemoryStore(), momentum_job()
    manager = CheckpointManager(store, mode="async", max_extra_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", _no_thread)
        if fails:
            store._fault = ErrorAt(store._attempts + 1)
        manager.save(live)
        train()
        if fails:
            with pytest.raises(SaveFailed):
                manager.drain()
        else:
            assert manager.drain().step == 1
    assert [entry.head.step for entry in read_inventory(store).entries] == [1] * (not fails)
    assert manager.finish(live).step == 2
    manager.close()


def test_what_has_no_room_and_is_not_announced_is_written_when_the_call_ends():
    """max_extra_bytes=0: wait, never copy; for example an average of the weights, which may change at any time."""
    average = torch.arange(1 << 20, dtype=torch.float32)
    wanted = average.clone()
    live = attach(nn.Linear(2, 1), extra={"average": (lambda: {"w": average}, None.__class__)})
    live.advance(samples=1)
    store = MemoryStore()
    with CheckpointManager(store, mode="async", max_extra_bytes=0) as manager:
        manager.save(live)
        average.fill_(-1.0)
        manager.drain()
    found = load(store, like=live.capture())
    assert torch.equal(found.extra["average"].value["w"], wanted)


def test_an_interrupt_while_it_is_waited_for_fails_the_save_and_tears_nothing(monkeypatch):
    average = torch.zeros(1 << 20)
    live = attach(nn.Linear(2, 1), extra={"average": (lambda: {"w": average}, None.__class__)})
    live.advance(samples=1)
    store = PausingStore(0)
    with CheckpointManager(store, mode="async", max_extra_bytes=0) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(Hold, "_wait_for", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.save(live)
        average.fill_(-1.0)
        store.may_go_on.set()
        with pytest.raises(SaveFailed, match="released"):
            manager.drain()
        assert manager.finish(live).step == 1
    found = load(store.inner, like=live.capture())
    assert torch.equal(found.extra["average"].value["w"], average)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, where it is imported in being traced
def test_a_compiled_update_is_stood_before_as_any_other():
    """D02: the hook is called directly, not traced."""
    store, model = PausingStore(3), nn.Linear(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    update = torch.compile(optimizer.step, backend="eager")

    def train():
        model(torch.ones(2, 4)).square().sum().backward()
        update()
        optimizer.zero_grad()
        live.advance(samples=2)

    with CheckpointManager(store, mode="async") as manager:
        train()
        wanted = fingerprint(live.capture())["model"]
        manager.save(live)
        assert store.has_paused.wait(20)
        train()
        store.may_go_on.set()
        manager.drain()
        train()
        manager.finish(live)
    assert fingerprint(load(store.inner, like=live.capture(), step=1))["model"] == wanted


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of other tests' threads, on Python 3.12
def test_a_child_forked_while_old_checkpoints_are_deleted_saves_and_deletes(monkeypatch):
    """The lock held during a deletion is its parent's, as is the thread that would release it."""
    store, inside, may_go_on = MemoryStore(), threading.Event(), threading.Event()
    real = store.delete

    def slow(name):
        inside.set()
        assert may_go_on.wait(20)
        real(name)

    state = [TrainState(trainer=Progress(step=step)) for step in range(4)]
    with CheckpointManager(store, mode="async", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(state[step])
            manager.drain()
            monkeypatch.setattr(store, "delete", slow)
        assert inside.wait(20)
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                other = MemoryStore()
                with CheckpointManager(other, keep_last=1) as mine:
                    for each in state:
                        mine.save(each)
                os._exit([name for name in other.list() if name.startswith("step-")] != ["step-00000003"])
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        may_go_on.set()


def test_what_is_pointed_to_while_old_checkpoints_are_deleted_is_kept(monkeypatch):
    """E02: a checkpoint named by a pointer is not deleted, even if the plan to delete it is older."""
    store = MemoryStore()
    real, inside, may_go_on = store.delete, threading.Event(), threading.Event()

    def slow(name):
        inside.set()
        assert may_go_on.wait(20)
        real(name)

    with CheckpointManager(store, keep_last=3) as manager:
        for step in (1, 2, 3):
            manager.save(TrainState(trainer=Progress(step=step)))
    state = load(store, like=TrainState(trainer=Progress()))
    monkeypatch.setattr(store, "delete", slow)
    with CheckpointManager(store, mode="async", keep_last=1) as manager:
        manager.save(state.evolve(trainer=Progress(step=4)))
        manager.drain()
        assert inside.wait(20)  # of the first
        store.point("milestone", "step-00000002")
        may_go_on.set()
    assert [name for name in store.list() if name.startswith("step-")] == ["step-00000002", "step-00000004"]


def _no_thread(_):
    raise RuntimeError("can't start new thread")


def test_a_failure_that_is_no_exception_is_due_again():
    """Such as the CancelledError of an asynchronous client of a store."""
    store = PausingStore(fault=lambda index, _: asyncio.CancelledError() if index == 9 else None)
    manager = CheckpointManager(store, mode="async")
    state = TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)})
    manager.save(state)
    with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
        manager.drain()
    assert manager.finish(state).step == 1
    manager.close()


def test_a_save_that_fails_unheard_is_in_the_log(caplog):
    """P11: for a program that ends without `close`, the log is the only report."""
    store = PausingStore(fault=ErrorAt(9, lasting=True))
    manager = CheckpointManager(store, mode="async")
    manager.save(TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)}))
    manager._saves._under_way.job.wait()
    assert "a save in the background failed" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_retention_that_fails_is_a_warning_whatever_it_raises(mode, caplog):
    """E04: the checkpoint is still committed."""

    class Broken:
        def kept(self, checkpoints):
            raise TypeError("a rule of one's own")

    store = MemoryStore()
    with CheckpointManager(store, mode=mode, keep=Retention((Broken(),))) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        manager.drain()
    assert "could not be deleted" in caplog.text
    assert "step-00000001" in store.list()


def test_a_request_whose_save_failed_is_answered_by_the_next_one():
    """P29: also if nothing is due by the clock."""
    store, asked = PausingStore(fault=ErrorAt(9)), Asked()
    with CheckpointManager(store, mode="async", requests=asked) as manager:
        asked.ask("save")
        manager.step(TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)}))
        manager._saves._under_way.job.wait()
        with pytest.raises(SaveFailed):
            manager.step(TrainState(trainer=Progress(step=2), extra={"w": torch.ones(4)}))
    assert "step-00000002" in store.inner.list()


def test_a_forked_child_closes_nothing_of_its_parents():
    store = PausingStore(3)
    manager = CheckpointManager(store, mode="async")
    state = TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)})
    manager.save(state)
    pid = os.fork()
    if not pid:
        try:
            manager.close()
            try:
                manager.save(state)
            except RunLocked:
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.may_go_on.set()
    assert manager.drain().step == 1
    manager.close()


def test_an_interrupted_donating_step_waits_again():
    """The readers of a lease are released once they have protected, not before."""
    store = PausingStore(3)
    state = TrainState(trainer=Progress(step=1), extra={"w": Leaves({"w": torch.ones(4)})})
    manager = CheckpointManager(store, mode="async", max_extra_bytes=0)
    manager.save(state)
    lease = state.extra["w"].lease
    (reader,) = lease.readers
    reader.protect = _interrupted
    with pytest.raises(KeyboardInterrupt):
        lease.protect()
    assert lease.readers == (reader,)
    store.may_go_on.set()
    manager.close()


def train_as_a_rank(collectives, folder):
    """Three steps of a functional run, each saved while the next one is under way; what became durable."""
    told = []
    with CheckpointManager(folder, mode="async", every=1, keep_last=2, collectives=collectives) as manager:
        state = TrainState(trainer=Progress(), extra={"w": torch.zeros(1000)})
        for step in range(1, 4):
            state = TrainState(trainer=Progress(step=step), extra={"w": state.extra["w"] + 1})
            told.append(manager.step(state).status)
            collectives.gather(step)  # the loop's own calls and those of the save do not meet
        told.append(manager.drain().checkpoint)
        found = manager.load(TrainState(trainer=Progress(), extra={"w": torch.zeros(1000)}))
    return [*told, found.trainer.step, float(found.extra["w"].sum())]


def test_ranks_that_are_processes_save_beside_their_own_collectives(processes, tmp_path):
    """D08, D09: over gloo, with a separate group for the saves."""
    wanted = ["staged", "staged", "staged", "step-00000003", 3, 3000.0]
    assert processes.run(2, train_as_a_rank, str(tmp_path / "run"), collectives={"timeout_secs": 60.0}) == [wanted] * 2
