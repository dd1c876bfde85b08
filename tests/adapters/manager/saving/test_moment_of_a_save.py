"""An async save writes the state at the moment of the call, whatever changes later; a sync save writes the same bytes."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.errors import SaveFailed, UnsupportedLeaf
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.step.loss import Loss


class PausedStore:
    """While paused, it reads and writes nothing for the saver."""

    def __init__(self):
        self.inner, self.may_go_on = MemoryStore(), threading.Event()
        self.may_go_on.set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def list(self, prefix=""):
        assert self.may_go_on.wait(20)
        return self.inner.list(prefix)


def files(store):
    """The data files, which must be equal byte for byte; the manifest is left out because it contains the run's id."""
    disk = store.inner._disk.files if isinstance(store, PausedStore) else store._disk.files
    return {name: data for name, data in disk.items() if name.startswith("step-") and not name.endswith(MANIFEST)}


def varied(step, scale):
    """Ties within a component and between two, arrays, a scalar tensor, an empty one, a transposed one, nested containers."""
    shared = torch.arange(6.0) * scale
    return TrainState(
        trainer=Progress(step=step),
        extra={
            "a": {"z": Leaves({"w": shared, "tied": shared}), "b": [np.arange(3) + step, (torch.tensor(scale), "text", step)]},
            "c": Leaves({"w": shared, "empty": torch.empty(0), "t": (torch.arange(12.0) * scale).view(3, 4).t()}),
        },
    )  # fmt: skip


def test_an_async_save_has_the_bytes_of_a_sync_one_whatever_leaves_there_are():
    """D01: for any leaves, and any number of earlier saves."""
    stores = {mode: MemoryStore() for mode in ("sync", "async")}
    for mode, store in stores.items():
        with CheckpointManager(store, mode=mode) as manager:
            for step in (1, 2, 3):
                manager.save(varied(step, step / 2))
    assert files(stores["sync"]) == files(stores["async"])
    for step in (1, 2, 3):
        found = load(stores["async"], like=varied(0, 1.0), step=step)
        assert torch.equal(found.extra["a"]["z"]["tied"], varied(step, step / 2).extra["c"]["w"])


def test_containers_that_change_after_the_call_are_saved_as_they_were():
    """D02, P10: dicts, lists and arrays of the user's own."""
    store = PausedStore()
    with CheckpointManager(store, mode="async") as manager:
        for step in (1, 2):
            state = varied(step, float(step))
            wanted = varied(step, float(step))
            store.may_go_on.clear()
            manager.save(state)
            state.extra["a"]["b"][0][:] = -1
            state.extra["a"]["b"][1] = "gone"
            state.extra["a"]["z"] = None
            store.may_go_on.set()
            manager.drain()
            found = load(store, like=wanted, step=step)
            assert np.array_equal(found.extra["a"]["b"][0], wanted.extra["a"]["b"][0])
            assert found.extra["a"]["b"][1][1:] == ("text", step)
            assert torch.equal(found.extra["a"]["z"]["w"], wanted.extra["a"]["z"]["w"])


def test_a_state_that_a_step_consumes_before_anything_is_written_is_saved_as_it_was():
    """D02: the lease of a donated state ends with the step; the step asks the hold first."""
    store = PausedStore()
    sgd = trainfold.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = nn.Linear(3, 2)
    state = trainfold.init_state(model, sgd)
    step = trainfold.make_step(
        model, lambda m, batch: Loss(sum=m(batch).square().sum(), weight=len(batch)), sgd, donate=True
    )
    with CheckpointManager(store, mode="async") as manager:
        state, _ = step(state, torch.ones(2, 3))
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 3))
            wanted = state.model.params["weight"].clone()
            number = state.trainer.step
            store.may_go_on.clear()
            manager.save(state)
            state, _ = step(state, torch.ones(2, 3))
            store.may_go_on.set()
            manager.drain()
            assert torch.equal(load(store, like=state, step=number).model.params["weight"], wanted)


def test_what_cannot_be_saved_is_said_in_the_call():
    """D05: the call raises if a new component cannot be saved."""
    store = MemoryStore()
    with CheckpointManager(store, mode="async") as manager:
        manager.save(TrainState(trainer=Progress(step=1), extra={"x": 1}))
        manager.save(TrainState(trainer=Progress(step=2), extra={"x": 2}))
        manager.save(TrainState(trainer=Progress(step=3), extra={"x": "text"}))
        with pytest.raises(UnsupportedLeaf, match="x"):
            manager.save(TrainState(trainer=Progress(step=4), extra={"x": object()}))
        with pytest.raises(UnsupportedLeaf, match="x"):
            manager.save(TrainState(trainer=Progress(step=5), extra={"x": torch.zeros(2).to_sparse()}))
        manager.save(TrainState(trainer=Progress(step=6), extra={"x": torch.zeros(2)}))
        manager.drain()
        for bad in (
            torch.zeros(2).to_sparse(),
            torch.zeros(2, device="meta"),
        ):
            with pytest.raises(UnsupportedLeaf, match="x"):
                manager.save(TrainState(trainer=Progress(step=7), extra={"x": bad}))


def test_a_live_run_whose_optimizer_gets_slots_has_the_same_bytes():
    """D01: the slots come with the first step."""
    stores = {mode: MemoryStore() for mode in ("sync", "async")}
    for mode, store in stores.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        live = attach(model, optimizer)
        with CheckpointManager(store, mode=mode) as manager:
            manager.save(live)
            for _ in range(3):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                live.advance(samples=4)
                manager.save(live)
    rng = {name for name in files(stores["sync"]) if "/rng" in name}
    assert {n: d for n, d in files(stores["sync"]).items() if n not in rng} == {
        n: d for n, d in files(stores["async"]).items() if n not in rng
    }


def test_a_leaf_that_was_written_to_once_and_is_gone_is_missed_by_no_later_save():
    """D02: a leaf with an unannounced write is copied from then on, as long as it exists."""
    store = PausedStore()
    with CheckpointManager(store, mode="async") as manager:
        state = TrainState(
            trainer=Progress(step=1), extra={"a": Leaves({"x": torch.zeros(3)}), "b": Leaves({"y": torch.zeros(3)})}
        )
        store.may_go_on.clear()
        manager.save(state)
        state.extra["a"]["x"].add_(1.0)
        store.may_go_on.set()
        with pytest.raises(SaveFailed, match="x"):
            manager.drain()
        manager.save(TrainState(trainer=Progress(step=2), extra={"b": Leaves({"y": torch.ones(3)})}))
        assert manager.drain().step == 2


def test_a_load_waits_until_nothing_is_being_deleted(monkeypatch):
    """V12: a checkpoint is not deleted while it is read."""
    store, real, order = MemoryStore(), Pruner.retain, []

    def slow(self, result):
        time.sleep(0.05)
        order.append("deleted")
        return real(self, result)

    with CheckpointManager(store, mode="async", keep_last=1) as manager:
        manager.save(varied(1, 1.0))
        manager.drain()
        monkeypatch.setattr(Pruner, "retain", slow)
        manager.save(varied(2, 2.0))
        manager.load(varied(0, 0.0))
        order.append("loaded")
    assert order in (["deleted", "loaded"], ["deleted", "deleted", "loaded"])
