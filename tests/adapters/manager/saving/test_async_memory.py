"""The objects that a background save keeps alive and frees, and the writes that it detects."""

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from kit.adapters.manager.async_save_cases import PausingStore, momentum_job
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.job import Job
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    SaveFailed,
)
from trainfold.core.state.state import Progress, TrainState


def test_a_failed_save_keeps_nothing_of_what_it_was_to_save():
    """No garbage collection is needed: releasing the exception releases the state."""
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
    """It is reported, the next save descends from it, and old checkpoints are deleted."""
    store, told = MemoryStore(), []
    with CheckpointManager(
        store, mode="async", keep_last=1, on_event=lambda event: told.append((event.kind, event.step))
    ) as manager:
        manager.save(TrainState(trainer=Progress(step=1)))
        manager.drain()
        manager._saves.wait_for_deletions()
        real = Job.start

        def begin(job):
            real(job)
            job.wait()
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Job, "start", begin)
            with pytest.raises(KeyboardInterrupt):
                manager.save(TrainState(trainer=Progress(step=2)))
        assert manager.drain().step == 2
        manager.save(TrainState(trainer=Progress(step=3)))
    assert ("committed", 2) in told
    assert [(entry.head.step, entry.head.timeline) for entry in read_inventory(store).entries] == [(3, 0)]


@pytest.mark.parametrize("kind", ["live", "components of a live run", "state"])
def test_the_call_frees_no_tensor_once_the_writer_waits(monkeypatch, kind):
    """Torch releases the interpreter to free a tensor, and the writer then holds it for milliseconds; so the writer frees it."""
    live, train = momentum_job()
    train()
    state = live.capture()
    begun, made = [], []

    def begin(job):
        begun.append(job)
        made.extend(weakref.ref(each) for each in gc.get_objects() if type(each) is torch.Tensor)

    components = ("model",) if kind == "components of a live run" else None
    manager = CheckpointManager(MemoryStore(), mode="async", components=components)
    with monkeypatch.context() as patched:
        patched.setattr(Job, "start", begin)
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
        model = nn.Linear(
            256, 256
        )  # so large that both ranks write a part: a rank is done with what others write once it has planned
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
    """Nothing reports a write to an array."""
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
    """Also if a buffer shares the memory of a parameter: a tie, which is written once."""
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
    """A user's object that replaces another object's tensors when it returns or takes a state."""

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
