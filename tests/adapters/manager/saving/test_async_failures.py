"""Failures of background saves: when they are raised, and what remains on disk."""

import gc
import logging
import threading
import time
import weakref
from contextlib import ExitStack

import pytest
import torch
from kit.adapters.manager.async_save_cases import Job, PausingStore

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    InvalidArgument,
    InvalidState,
    RankFailed,
    SaveFailed,
    UnsupportedLeaf,
)
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.save.retention import keep_every
from trainfold.core.state.state import Progress, TrainState


def test_a_second_save_waits_for_the_first():
    """D04: never two at a time."""
    store, job = PausingStore(3), Job()
    with CheckpointManager(store, mode="async") as manager:
        job.train()
        manager.save(job.live)
        job.train()
        second = threading.Thread(target=manager.save, args=[job.live])
        second.start()
        second.join(0.1)
        assert second.is_alive()
        assert store.inner.list() == [RUN_FILE]
        store.may_go_on.set()
        second.join(20)
    assert [name for name in store.inner.list() if name.startswith("step")] == ["step-00000001", "step-00000002"]


def test_a_second_save_can_be_skipped_and_says_so(caplog):
    """D04: by policy; the step stays due, and the last state of the run is never skipped."""
    store, job, events = PausingStore(3), Job(), []
    with CheckpointManager(store, mode="async", when_busy="skip", every=1, on_event=events.append) as manager:
        job.train()
        assert manager.step(job.live).status == "staged"
        job.train()
        assert manager.step(job.live).status == "skipped"
        store.may_go_on.set()
        job.train()
        manager.finish(job.live)
    kept = [name for name in store.inner.list() if name.startswith("step")]
    assert kept == ["step-00000001", "step-00000003"]
    assert [str(event.kind) for event in events if event.step == 2] == ["skipped"]
    assert "another save is under way" in caplog.text


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_save_is_told_at_the_next_boundary_and_the_pointer_stays():
    """D05, P11, C09: raised once, after the actions that are due; the earlier checkpoints are still there."""
    store, job = PausingStore(), Job()
    with CheckpointManager(store, mode="async", every=1) as manager:
        job.train()
        manager.step(job.live)
        manager.drain()
        store.inner._fault = ErrorAt(len(store.inner.effects) + 8)
        manager.save(job.live)
        manager._saves._under_way.job.wait()
        assert store.inner.point_target("latest") == "step-00000001"
        assert load(store.inner, like=job.live.capture()).trainer.step == 1
        job.train()
        with pytest.raises(SaveFailed):
            manager.step(job.live)
        assert manager.drain().step == 2
        assert manager.step(job.live) is None
    assert store.inner.point_target("latest") == "step-00000002"


def test_a_failed_save_that_nobody_polled_is_told_at_close():
    store, job = PausingStore(fault=ErrorAt(9, lasting=True)), Job()
    manager = CheckpointManager(store, mode="async")
    manager.save(job.live)
    with pytest.raises(SaveFailed):
        manager.close()
    manager.close()
    with store.inner.lock():
        pass


def in_a_with(manager, loop):
    with manager:
        loop()


def in_a_finally(manager, loop):
    try:
        loop()
    finally:
        manager.close()


def in_a_handler(manager, loop):
    try:
        loop()
    except KeyError:
        manager.close()
        raise


def in_an_exit_stack(manager, loop):
    with ExitStack() as stack:
        stack.callback(manager.close)
        loop()


@pytest.mark.parametrize("closed", [in_a_with, in_a_finally, in_a_handler, in_an_exit_stack])
def test_a_failed_save_does_not_mask_what_ended_the_loop(closed, caplog):
    """D07: however the manager is closed."""
    store, job = PausingStore(fault=ErrorAt(9, lasting=True)), Job()
    manager = CheckpointManager(store, mode="async")

    def loop():
        manager.save(job.live)
        raise KeyError("the loop's own")

    with pytest.raises(KeyError) as caught:
        closed(manager, loop)
    assert sum("a save failed" in note for note in caught.value.__notes__) == 1
    assert "the save under way failed" in caplog.text
    with store.inner.lock():
        pass


def test_a_run_that_is_tried_again_where_another_error_is_handled_hears_of_its_failed_save():
    """D05, D07: an exception already being handled at the manager's creation did not end its loop."""
    store, job = PausingStore(fault=ErrorAt(9, lasting=True)), Job()
    try:
        _ = {}["the first try"]
    except KeyError:
        manager = CheckpointManager(store, mode="async")
        manager.save(job.live)
        with pytest.raises(SaveFailed):
            manager.close()


def test_the_last_state_is_saved_although_the_save_before_it_failed():
    """A14, D05: and the failure is still raised."""
    store, job = PausingStore(), Job()
    with CheckpointManager(store, mode="async") as manager:
        job.train()
        store.inner._fault = ErrorAt(len(store.inner.effects) + 5)
        manager.save(job.live)
        job.train()
        with pytest.raises(SaveFailed):
            manager.finish(job.live)
    assert load(store.inner, like=job.live.capture()).trainer.step == 2


def test_a_write_past_the_gate_fails_the_save_and_says_what_to_call():
    """P10: parameters that are changed between a save and the next optimizer step."""
    store, job = PausingStore(2), Job()
    manager = CheckpointManager(store, mode="async")
    job.train()
    manager.save(job.live)
    assert store.has_paused.wait(20)
    with torch.no_grad():
        job.model[3].weight.add_(1.0)
    store.may_go_on.set()
    with pytest.raises(SaveFailed, match="wait_staging"):
        manager.close()


def test_wait_staging_lets_a_loop_write_to_anything():
    """D02: the explicit call, for loops that write by other means than an optimizer's step."""
    store, job, wanted = PausingStore(2), Job(), PausingStore()
    with CheckpointManager(store, mode="async") as manager, CheckpointManager(wanted) as other:
        job.train()
        other.save(job.live)
        manager.save(job.live)
        manager.wait_staging()
        for parameter in job.model.parameters():
            parameter.data.fill_(7.0)
        store.may_go_on.set()
    assert store.files() == wanted.files()


def test_a_state_that_cannot_be_saved_is_told_at_once():
    store = PausingStore()
    with CheckpointManager(store, mode="async") as manager:
        with pytest.raises(UnsupportedLeaf, match="x"):
            manager.save(TrainState(trainer=Progress(step=1), extra={"x": object()}))
        manager.save(TrainState(trainer=Progress(step=1), extra={"x": 1}))


# --- arguments, memory, hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "asynchronous"},
        {"max_extra_bytes": -1},
        {"max_extra_bytes": 1.5},
        {"when_busy": "drop"},
        {"keep": 3},
        {"every_secs": 0},
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_touched(wrong):
    store = MemoryStore()
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        CheckpointManager(store, **wrong)
    assert store.effects == ()


def test_a_manager_leaves_no_hook_and_keeps_nothing_alive():
    """D03: the manager holds no leaf when no save is under way."""
    job = Job()
    before = len(job.optimizer._optimizer_step_pre_hooks)
    with CheckpointManager(PausingStore(), mode="async") as manager:
        job.train()
        manager.save(job.live)
        manager.drain()
        assert len(job.optimizer._optimizer_step_pre_hooks) == before + 1
        gone = [weakref.ref(value) for value in job.optimizer.state.values() for value in value.values()]
        job.optimizer.state.clear()
        gc.collect()
        assert not [each for each in gone if each() is not None]
    assert len(job.optimizer._optimizer_step_pre_hooks) == before


def test_a_closed_manager_is_closed():
    manager = CheckpointManager(MemoryStore(), mode="async")
    manager.close()
    with pytest.raises(InvalidState):
        manager.poll()
    CheckpointManager.__new__(CheckpointManager).close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_events_come_in_order_with_the_step_that_was_scheduled(mode, caplog):
    """D06: payload, commit, then callbacks, then retention; each event has the step of the call."""
    caplog.set_level(logging.DEBUG, "trainfold")
    events, job, store = [], Job(), PausingStore()

    def listen(event):
        events.append((event.kind, event.step, event.checkpoint))
        if event.kind == "committed":
            assert store.inner.point_target("latest") == event.checkpoint
            assert len([name for name in store.inner.list() if name.startswith("step")]) == len(
                {name for kind, _, name in events if kind == "committed"}
                - {name for kind, _, name in events if kind == "pruned"}
            )

    with CheckpointManager(store, mode=mode, keep_last=1, on_event=listen) as manager:
        for _ in range(2):
            job.train()
            manager.save(job.live)
            job.train()
            manager.drain()
    told = [
        ("saved", 1, None),
        ("committed", 1, "step-00000001"),
        ("saved", 3, None),
        ("committed", 3, "step-00000003"),
        ("pruned", None, "step-00000001"),
    ]
    assert events == [each for each in told if mode == "async" or each[0] != "saved"]
    assert "committed memory:/step-00000003 at step 3" in caplog.text


def test_a_listener_that_fails_breaks_nothing(caplog):
    def listen(_):
        raise ValueError("listener")

    store = MemoryStore()
    with CheckpointManager(store, on_event=listen) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
    assert "on_event failed" in caplog.text


def test_rules_of_retention_add_up():
    """E07: the last one, and every second."""
    store = MemoryStore()
    with CheckpointManager(store, mode="async", keep_last=1, keep=keep_every(2)) as manager:
        for step in range(1, 6):
            manager.save(TrainState(trainer=Progress(step=step)))
    assert [name for name in store.list() if name.startswith("step")] == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_save_together(mode):
    """D08, D09: each rank has its own manager; they agree on what is due, and write one checkpoint."""
    store = MemoryStore()

    def run(collectives):
        with CheckpointManager(store, mode=mode, every=2, keep_last=1, collectives=collectives) as manager:
            told = []
            for step in range(1, 6):
                outcome = manager.step(TrainState(trainer=Progress(step=step), extra={"w": torch.arange(40.0)}))
                told.append(outcome and outcome.status)
            manager.drain()
        return told

    word = {"sync": "written", "async": "staged"}[mode]
    assert run_threads(3, run) == [[None, word, None, word, None]] * 3
    assert [name for name in store.list() if name.startswith("step")] == ["step-00000004"]
    found = load(store, like=TrainState(trainer=Progress(), extra={"w": torch.zeros(40)}))
    assert found.extra["w"].tolist() == list(range(40))


def test_a_rank_that_cannot_save_is_told_to_all_others_and_the_next_save_succeeds():
    """C07, D08: that rank raises its own error at once; the others, already staged, report a failed save; ranks stay in step."""
    store = MemoryStore()

    def run(collectives):
        told = []
        with CheckpointManager(store, mode="async", collectives=collectives) as manager:
            bad = object() if collectives.rank == 1 else 1
            for step, value in ((1, bad), (2, 1)):
                try:
                    manager.save(TrainState(trainer=Progress(step=step), extra={"x": value}))
                    manager.drain()
                except (UnsupportedLeaf, RankFailed) as error:
                    told.append(type(error).__name__)
            manager.drain()
        return told

    assert run_threads(3, run) == [["SaveFailedElsewhere"], ["UnsupportedLeaf"], ["SaveFailedElsewhere"]]
    assert [name for name in store.list() if name.startswith("step-")] == ["step-00000002"]


# --- what a review found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_saves_and_loads_are_events_with_their_durations(mode):
    """R05: what a loop stood still for can be left out of a throughput: for a save, whatever its mode, and for a load."""
    taken, stalled, job, store = {}, {}, Job(), MemoryStore()

    def listen(event):
        taken[event.kind], stalled[event.kind] = event.secs, event.stalled_secs

    began = time.monotonic()
    with CheckpointManager(store, mode=mode, on_event=listen) as manager:
        job.train()
        manager.save(job.live)
        manager.drain()
        manager.restore(job.live)
    whole = time.monotonic() - began
    timed = {"committed", "restored", *(["saved"] if mode == "async" else [])}
    assert {kind for kind, secs in taken.items() if secs is not None} == timed
    assert all(0 < taken[kind] < whole for kind in timed)
    assert {kind for kind, secs in stalled.items() if secs is not None} == {"committed"}
    assert taken.get("saved", 0) < stalled["committed"] < whole
