"""Async saves: the bytes of a sync save whatever the loop does meanwhile, one at a time, and failures that are told."""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import random
import signal
import threading
import weakref
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold.adapters.live.live import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load
from trainfold.backends.runs.scan import read_inventory, run_document
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.backends.worker_thread import WorkerThread
from trainfold.core.errors import (
    IncompleteWindow,
    InvalidArgument,
    InvalidState,
    RankFailed,
    RunLocked,
    SaveFailed,
    UnsupportedLeaf,
)
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.save.retention import Retention, keep_every
from trainfold.core.state.components import select
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.step.loss import Loss

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach adam": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


class PausingStore:
    """A store whose writes wait where they are told to: before part number ``at`` of the run."""

    def __init__(self, at=None, fault=None):
        self.inner = MemoryStore(fault=fault)
        self.inner.commit(RUN_FILE, run_document("a" * 32))  # so that manifests can be compared byte by byte
        self.at = at
        self.count = 0
        self.has_paused = threading.Event()
        self.may_go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        def paused():
            iterator = iter(parts)
            while True:
                if self.at is not None and self.count == self.at:
                    self.has_paused.set()
                    assert self.may_go_on.wait(20)
                self.count += 1
                part = next(iterator, None)  # asked for when there is room for it, as a store on a disk does
                if part is None:
                    return
                yield part

        self.inner.write(name, paused(), size_bytes=size_bytes)

    def files(self):
        return {
            f"{directory}/{name}": self.inner.read(f"{directory}/{name}")
            for directory in self.inner.list()
            if directory.startswith("step-")
            for name in self.inner.list(directory)
        }


class Job:
    """A small mutable run with everything that changes at another moment than the parameters do."""

    def __init__(self, kind="adamw"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = OPTIMIZERS[kind]([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = None if kind == "lbfgs" else torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.notes = {"seen": [], "scale": torch.ones(3)}
        self.live = attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra={"ema": self.ema, "notes": (lambda: self.notes, self._take)},
        )

    def _take(self, notes):
        self.notes = notes

    def train(self):
        x = torch.randn(8, 4)

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)
        if self.scheduler is not None:
            self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.notes["seen"].append(float(x.sum()))
        self.notes["scale"].mul_(0.5)
        self.live.advance(samples=8)


def trained(mode, kind, store, *, steps=5, taken=lambda live: live, **options):
    """Train with a save after each step but the last; return what lies in the store."""
    job = Job(kind)
    with CheckpointManager(store, mode=mode, **options) as manager:
        for _ in range(steps):
            job.train()
            manager.save(taken(job.live))
        job.train()
    return store.files()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sync_and_async_write_the_same_bytes(kind):
    """D01: parameters, slots, buffers, averages, Python values and random states are all of the step that was saved."""
    sync, background = (trained(mode, kind, PausingStore()) for mode in ("sync", "async"))
    assert len(sync) > 20
    assert background == sync


@pytest.mark.parametrize(
    "components", [["model", "trainer", "ema"], ["rng", "trainer"], ["trainer", "notes", "rng"], ["ema"]]
)
def test_sync_and_async_write_the_same_bytes_of_some_components(components):
    """D01, B01: those that are left out are listed in the same order, too."""
    sync, background = (trained(mode, "adamw", PausingStore(), components=components) for mode in ("sync", "async"))
    assert len(sync) > 3
    assert background == sync


@pytest.mark.parametrize("components", [None, ["model", "trainer"], ["trainer", "rng"]])
def test_a_live_run_with_all_kinds_of_components_and_its_capture_are_the_same_bytes(components):
    """D01, B01: the random streams of a live run come to the others later, in the same place or among what is left out."""
    of_live, of_captured = (
        trained("sync", "adamw", PausingStore(), components=components, taken=taken, steps=2)
        for taken in (lambda live: live, lambda live: live.capture())
    )
    assert of_live == of_captured


def test_random_streams_are_those_of_the_call_and_no_byte_of_them_is_copied():
    """D01: they are the save's own once they have been read."""
    said, store = [], PausingStore()
    model = nn.Linear(4, 4)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    live.advance(samples=1)
    before = live.capture()
    with CheckpointManager(store, mode="async", on_event=lambda event: said.append(str(event))) as manager:
        manager.save(live)
        _ = np.random.rand(1000), torch.rand(1000), random.random()  # noqa: NPY002  # the global streams
    assert any("0 bytes copied" in each for each in said)
    assert fingerprint(select(load(store.inner, like=before), ["rng"])) == fingerprint(select(before, ["rng"]))


@settings(deadline=None, max_examples=25)
@given(
    at=st.integers(0, 60),
    kind=st.sampled_from(["adamw", "fused adamw", "sgd"]),
    room=st.sampled_from([None, 1 << 25, (1 << 25) + 3000]),
)
def test_training_may_overtake_a_save_at_any_byte(at, kind, room):
    """D02: the loop updates everything while the writer stands still at any point; the bytes are those of the call."""
    wanted = PausingStore()
    job = Job(kind)
    with CheckpointManager(wanted) as manager:
        job.train()
        manager.save(job.live)
    store, job = PausingStore(at), Job(kind)
    with CheckpointManager(store, mode="async", max_extra_bytes=room) as manager:
        job.train()
        assert manager.save(job.live).status == "staged"
        store.has_paused.wait(0.2)
        trainer = threading.Thread(target=lambda: [job.train() for _ in range(3)])
        trainer.start()
        if room is None:
            trainer.join(20)  # nothing has to be waited for
            assert not trainer.is_alive()
        else:
            trainer.join(0.02)
        store.may_go_on.set()
        trainer.join(20)
        assert not trainer.is_alive()
    assert store.files() == wanted.files()


def test_without_extra_memory_the_optimizer_waits_for_the_writer():
    """max_extra_bytes=0: wait, never copy."""
    store, job = PausingStore(3), Job()
    with CheckpointManager(store, mode="async", max_extra_bytes=0) as manager:
        job.train()
        manager.save(job.live)
        assert store.has_paused.wait(20)
        trainer = threading.Thread(target=job.train)
        trainer.start()
        trainer.join(0.2)
        assert trainer.is_alive()
        store.may_go_on.set()
        trainer.join(20)
        assert not trainer.is_alive()


def test_the_call_returns_while_the_writer_stands_still():
    store, job = PausingStore(0), Job()
    with CheckpointManager(store, mode="async") as manager:
        job.train()
        outcome = manager.save(job.live)
        assert (outcome.status, outcome.step, outcome.result) == ("staged", 1, None)
        assert manager.poll() is None
        store.may_go_on.set()
        assert manager.drain().checkpoint == "step-00000001"
        assert manager.drain() is None


# --- states ----------------------------------------------------------------------------------------------------------


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def fold(store, mode, *, donate=True, at_steps=(2, 3), steps=5):
    """A functional run that is saved in the middle and goes on; the final state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.1, fused=True)
    state = trainfold.init_state(model, adamw, seed=0)
    state = state.evolve(extra={"mean": torch.zeros(3)})
    step = trainfold.make_step(model, loss_fn, adamw, donate=donate)
    with CheckpointManager(store, mode=mode) as manager:
        for number in range(steps):
            if number in at_steps:
                manager.save(state)
            state, _ = step(state, torch.full((8, 4), float(number)))
            state.extra["mean"].add_(1.0)
        if isinstance(store, PausingStore):
            store.may_go_on.set()
    return state


@pytest.mark.parametrize("at", [None, 0, 5, 11])
@pytest.mark.parametrize("donate", [True, False])
def test_a_donating_step_may_overtake_the_save_of_its_input(donate, at):
    """The leaves of a state are held; the step that consumes it copies what is not written, and trains to the same bits."""
    sync, background = PausingStore(), PausingStore(at)
    wanted = fold(sync, "sync", donate=donate, at_steps=(2,))
    found = fold(background, "async", donate=donate, at_steps=(2,))
    assert background.files() == sync.files()
    assert fingerprint(found) == fingerprint(wanted)


def test_two_managers_may_hold_one_state():
    stores = [PausingStore(at=4), PausingStore(at=2)]
    state = TrainState(trainer=Progress(step=1), extra={"w": torch.arange(4.0)})
    managers = [CheckpointManager(store, mode="async") for store in stores]
    for manager in managers:
        manager.save(state)
    for store, manager in zip(stores, managers, strict=True):
        store.may_go_on.set()
        manager.close()
    assert stores[0].files() == stores[1].files()


# --- one at a time ---------------------------------------------------------------------------------------------------


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
    """D04: by policy; the step stays due, and what the run ends with is never skipped."""
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
    """D05, P11, C09: told once, after what is due was done; what was there before is still there."""
    store, job = PausingStore(), Job()
    with CheckpointManager(store, mode="async", every=1) as manager:
        job.train()
        manager.step(job.live)
        manager.drain()
        store.inner._fault = ErrorAt(len(store.inner.effects) + 8)
        manager.save(job.live)
        manager._saves._saver.wait_for_save()
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
    """D05, D07: what was being handled when the manager was made did not end its loop."""
    store, job = PausingStore(fault=ErrorAt(9, lasting=True)), Job()
    try:
        _ = {}["the first try"]
    except KeyError:
        manager = CheckpointManager(store, mode="async")
        manager.save(job.live)
        with pytest.raises(SaveFailed):
            manager.close()


def test_the_last_state_is_saved_although_the_save_before_it_failed():
    """A14, D05: and the failure is told all the same."""
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
    """D03: nothing is held when nothing is under way."""
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
    """D08, D09: each rank has its manager; they agree on what is due, and write one checkpoint."""
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
    """C07, D08: its own error there, at once; a failed save for the others, who have staged already; and the ranks stay in step."""
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


def momentum_job():
    """Fused SGD moves no version counter: whatever is written past the gate would be torn in silence."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    live = attach(model, optimizer)

    def train():
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        live.advance(samples=4)

    train()
    return live, train


def test_a_manager_that_nobody_keeps_stands_before_updates_until_its_save_has_ended():
    store, (live, train) = PausingStore(3), momentum_job()
    wanted = fingerprint(live.capture())
    gone = weakref.ref(manager := CheckpointManager(store, mode="async"))
    manager.save(live)
    under_way = manager._saves._saver._under_way
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
    """Ctrl-C in drain or close: the save goes on, is still held, and is told of later."""
    store, (live, train) = PausingStore(3), momentum_job()
    wanted = fingerprint(live.capture())["model"]
    manager = CheckpointManager(store, mode="async")
    manager.save(live)
    assert store.has_paused.wait(20)
    job = manager._saves._saver._under_way
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
    """The hold is released under the copy: the step goes on, and the failure is told where failures are."""
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
    """A save or a close in the middle of another one's telling would get in its way."""
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
        manager._saves._saver.wait_for_save()
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
    """max_extra_bytes=0: wait, never copy; an average of the weights, say, which changes whenever it likes."""
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
    """D02: the hook is called as it is and not traced."""
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
    """The lock that is held over a deletion is its parent's, as is the thread that would give it back."""
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
    """E02: nothing that a pointer names is deleted, though the plan to delete it was made before."""
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
    """P11: a program that ends without `close` hears of it nowhere else."""
    store = PausingStore(fault=ErrorAt(9, lasting=True))
    manager = CheckpointManager(store, mode="async")
    manager.save(TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)}))
    manager._saves._saver.wait_for_save()
    assert "a save in the background failed" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_retention_that_fails_is_a_warning_whatever_it_raises(mode, caplog):
    """E04: the checkpoint is committed all the same."""

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
    """P29: also where the clock says that nothing is due."""
    store, asked = PausingStore(fault=ErrorAt(9)), Asked()
    with CheckpointManager(store, mode="async", requests=asked) as manager:
        asked.ask("save")
        manager.step(TrainState(trainer=Progress(step=1), extra={"w": torch.ones(4)}))
        manager._saves._saver.wait_for_save()
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
    """The readers of a lease are let go when they have protected, and not before."""
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
    """D08, D09: over gloo, with a group of its own for the saves."""
    wanted = ["staged", "staged", "staged", "step-00000003", 3, 3000.0]
    assert processes.run(2, train_as_a_rank, str(tmp_path / "run"), collectives={"timeout_secs": 60.0}) == [wanted] * 2


def test_a_failed_save_keeps_nothing_of_what_it_was_to_save():
    """Without the collector of cycles: whoever lets go of the exception lets go of the state."""
    store = PausingStore(fault=ErrorAt(9))
    weight = torch.ones(1000)
    gone = weakref.ref(weight)
    gc.disable()
    try:
        with CheckpointManager(store, mode="async") as manager:
            manager.save(TrainState(trainer=Progress(step=1), extra={"w": weight}))
            del weight
            with contextlib.suppress(SaveFailed):
                manager.drain()
            assert gone() is None
    finally:
        gc.enable()


def test_managers_that_nobody_closed_leave_no_hooks_behind():
    live, train = momentum_job()
    (optimizer,) = live.optimizers.values()
    before = len(optimizer._optimizer_step_pre_hooks)
    for step in range(3):
        manager = CheckpointManager(MemoryStore(), mode="async")
        manager.save(live)
        manager.drain()
        assert len(optimizer._optimizer_step_pre_hooks) == before + 1, step
        del manager
        gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == before
    train()


def test_an_interrupt_after_a_save_has_ended_does_not_undo_it(monkeypatch):
    """It is told of, it is what the next one descends from, and what is old goes."""
    store, told = MemoryStore(), []
    with CheckpointManager(
        store, mode="async", keep_last=1, on_event=lambda event: told.append((event.kind, event.step))
    ) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        manager.drain()
        manager._saves.wait_for_deletions()
        real = WorkerThread.begin

        def begin(worker, job):
            real(worker, job)
            job.wait()
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(WorkerThread, "begin", begin)
            with pytest.raises(KeyboardInterrupt):
                manager.save(TrainState(trainer=Progress(step=2)))
        assert manager.drain().step == 2
        manager.save(TrainState(trainer=Progress(step=3)))
    assert ("committed", 2) in told
    assert [(entry.head.step, entry.head.timeline) for entry in read_inventory(store).entries] == [(3, 0)]


@pytest.mark.parametrize("kind", ["live", "components of a live run", "state"])
def test_the_call_frees_no_tensor_once_the_writer_waits(monkeypatch, kind):
    """Torch lets go of the interpreter to free one, and the writer then has it for milliseconds: it frees what the call has made."""
    live, train = momentum_job()
    train()
    state = live.capture()
    begun, made = [], []

    def begin(_, job):
        begun.append(job)
        made.extend(weakref.ref(each) for each in gc.get_objects() if type(each) is torch.Tensor)

    components = ("model",) if kind == "components of a live run" else None
    manager = CheckpointManager(MemoryStore(), mode="async", components=components)
    with monkeypatch.context() as patched:
        patched.setattr(WorkerThread, "begin", begin)
        manager.save(state if kind == "state" else live)
        freed = sum(each() is None for each in made)
        (job,) = begun
        job.carry_out()
    manager.close()
    assert freed == 0, f"{freed} of {len(made)}"
    assert job.failure is None, "saved all the same"


def test_a_rank_that_knows_of_a_write_before_the_others_keeps_in_step_with_them():
    """D08: its save fails where all ranks fail together, and the next one succeeds."""
    store, may_go_on = PausingStore(), threading.Event()
    real = store.inner.reserve
    store.reserve = lambda size_bytes: (may_go_on.wait(20), real(size_bytes))

    def run(collectives):
        told = []
        model = nn.Linear(4, 4)
        for parameter in model.parameters():
            nn.init.ones_(parameter)  # ranks are replicas
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with CheckpointManager(store, mode="async", collectives=collectives) as manager:
            for number in range(2):
                live.advance(samples=1)
                manager.save(live)
                if (collectives.rank, number) == (1, 0):
                    with torch.no_grad():
                        model.weight.add_(1.0)
                    manager.wait_staging()
                    may_go_on.set()
                try:
                    told.append(manager.drain().step)
                except SaveFailed as error:
                    told.append(type(error).__name__)
                if (collectives.rank, number) == (0, 0):
                    with torch.no_grad():
                        model.weight.add_(1.0)
        return told

    assert run_threads(2, run) == [["SaveFailedElsewhere", 2], ["SaveFailed", 2]]


@pytest.mark.parametrize("was_written_to", [False, True], ids=["as new", "written to before"])
@pytest.mark.parametrize("is_written_to", [False, True], ids=["left alone", "written to after"])
def test_a_parameter_that_is_swapped_with_another_tensor_is_saved_as_it_was(was_written_to, is_written_to):
    """As `load_state_dict` does with `set_swap_module_params_on_conversion`, and who swaps averaged weights in."""
    store, model = PausingStore(0), nn.Linear(4, 4)
    model.teacher = nn.Parameter(torch.ones(8))
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Parameter(torch.full((8,), 5.0))
    if was_written_to:
        with torch.no_grad():
            other.add_(0.0)
    manager = CheckpointManager(store, mode="async")
    live.advance(samples=1)
    manager.save(live)
    assert store.has_paused.wait(20)
    torch.utils.swap_tensors(model.teacher, other)
    if is_written_to:
        with torch.no_grad():
            other.mul_(7.0)  # what is being saved
    store.may_go_on.set()
    with pytest.raises(SaveFailed, match="teacher") if is_written_to else contextlib.nullcontext():
        manager.close()
    if not is_written_to:
        assert load(store.inner, like=live.capture()).model.params["teacher"].tolist() == [1.0] * 8


def test_an_array_among_the_slots_of_an_optimizer_is_copied_in_the_call():
    """Nothing tells of a write to an array."""
    store, model = PausingStore(0), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["history"] = history = np.zeros(100)
    live = attach(model, optimizer)
    live.advance(samples=1)
    with CheckpointManager(store, mode="async") as manager:
        manager.save(live)
        assert store.has_paused.wait(20)
        history[:] = 7.0
        store.may_go_on.set()
    assert load(store.inner, like=live.capture()).optimizer.slots["weight"]["history"].tolist() == [0.0] * 100


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_live_run_and_its_capture_are_the_same_bytes(mode):
    """Also where a buffer lies in the memory of a parameter: a tie, which is written once."""
    model = nn.Linear(4, 4)
    model.register_buffer("alias", model.weight.data)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    live.advance(samples=1)
    stores = PausingStore(), PausingStore()
    for store, run in zip(stores, (live, live.capture()), strict=True):
        with CheckpointManager(store, mode=mode) as manager:
            manager.save(run)
    assert stores[0].files() == stores[1].files()
    found = load(stores[0].inner, like=live.capture()).model
    assert found.params["weight"].data_ptr() == found.buffers["alias"].data_ptr()


class Remaking:
    """An object of the user's that makes another's tensors anew, when it is asked for its state and when it gets one."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        self.module.shift = torch.full((2,), 7.0)
        return {"n": 1}

    def load_state_dict(self, _):
        self.module.weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("where", ["model", "extra"])
def test_a_module_whose_tensors_another_component_replaces_is_saved_and_restored_as_it_is_then(mode, where):
    def job(value):
        module, other = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.constant_(module.weight, value)
        module.register_buffer("shift", torch.zeros(2))
        model, extra = (module, other) if where == "model" else (other, module)
        return module, attach(model, extra={"a": Remaking(module), "b": extra})

    store = MemoryStore()
    _, live = job(3.0)
    with CheckpointManager(store, mode=mode) as manager:
        manager.save(live)
    module, live = job(1.0)
    with CheckpointManager(store) as manager:
        manager.restore(live)
    assert module.weight.tolist() == [[3.0, 3.0]] * 2
    assert module.shift.tolist() == [7.0, 7.0]
