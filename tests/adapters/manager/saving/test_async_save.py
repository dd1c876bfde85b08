"""Async saves write the bytes of a sync save whatever the loop does meanwhile, run one at a time, and report failures."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.manager.async_save_cases import OPTIMIZERS, Job, PausingStore
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.components import select
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.step.loss import Loss


def trained(mode, kind, store, *, steps=5, taken=lambda live: live, **options):
    """Train with a save after each step but the last; return the content of the store."""
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
    """D01, B01: the components left out are listed in the same order, too."""
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
    """D01: once they have been read, the save owns them."""
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
    """The save holds the leaves of a state; the step that consumes it copies unwritten ones, and trains to the same bits."""
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
