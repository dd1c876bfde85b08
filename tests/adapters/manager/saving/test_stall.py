"""For how long a loop stands still for a save: in its call, and in the updates that come while it is written (R05). The clock is that of the test."""

import threading
import types

import pytest
import torch
from kit.adapters.manager.async_save_cases import Job
from torch import nn

import trainfold
from trainfold.adapters.manager import saving
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.journals import read_journal
from trainfold.backends.hold import hold as hold_module
from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import SaveFailed
from trainfold.core.page.save_times import saves_of
from trainfold.core.step.loss import Loss

TICK = 2.0**-10  # seconds that each reading of the clock takes
GATED_SECS = 0.5


class Gate:
    """A writer that stands still before its first piece, until an update waits for it; and a clock by which that update comes so much too early."""

    def __init__(self, monkeypatch):
        self.now, self.fails = 1000.0, False
        self.has_paused, self.may_go_on = threading.Event(), threading.Event()
        self._pieces = HeldLeaf.pieces
        gate = self

        def pieces(leaf, *args, **options):
            gate.has_paused.set()
            assert gate.may_go_on.wait(20)
            if gate.fails:
                raise OSError(5, "as of a broken disk")
            yield from gate._pieces(leaf, *args, **options)

        monkeypatch.setattr(HeldLeaf, "pieces", pieces)
        monkeypatch.setattr(saving, "time", types.SimpleNamespace(monotonic=self.time))
        monkeypatch.setattr(hold_module, "time", types.SimpleNamespace(monotonic=self.time_in_update))

    def time(self):
        self.now += TICK
        return self.now

    def time_in_update(self):
        began = self.time()
        if not self.may_go_on.is_set():
            self.now += GATED_SECS
            self.may_go_on.set()
        return began


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def live_run(_):
    job = Job()
    job.train()
    return lambda: job.live, job.train


def donated_run(manager):
    model = nn.Linear(64, 8)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.1)
    step = trainfold.make_step(model, lambda model, x: Loss(sum=model(x).square().sum(), weight=len(x)), adamw, donate=True)  # fmt: skip
    step = manager.recorded(step)
    states = [trainfold.init_state(model, adamw, seed=0)]

    def train():
        states.append(step(states.pop(), torch.ones(4, 64))[0])

    train()
    return lambda: states[0], train


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("made", [live_run, donated_run])
def test_a_save_counts_its_call_and_the_update_that_waits_for_its_writer(tmp_path, gate, made, fails):
    """R05: at least the time for which the writer was gated, at most what the loop has lost; in the event, the journal and on the page."""
    events, gate.fails = [], fails
    with CheckpointManager(
        tmp_path, mode="async", max_extra_bytes=0, every=None, record=0, on_event=events.append
    ) as manager:
        now, train = made(manager)
        manager.should_load(now())
        manager.step(now())
        began = gate.time()
        manager.save(now())
        call_secs = gate.time() - began
        assert gate.has_paused.wait(20)
        began = gate.time()
        train()
        update_secs = gate.time() - began
        if fails:
            with pytest.raises(SaveFailed):
                manager.drain()
        else:
            manager.drain()
    saved, end = (event for event in events if event.kind in ("saved", "committed", "failed"))
    assert end.kind == ("failed" if fails else "committed")
    assert saved.stalled_secs is None
    assert saved.secs + GATED_SECS <= end.stalled_secs <= call_secs + update_secs
    (save,) = saves_of(read_journal(LocalStore(tmp_path)).lines)
    assert save.outcome == ("failed" if fails else "written")
    assert save.stall_secs == end.stalled_secs


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_delays_nothing_after_its_call_has_stalled_for_its_call(tmp_path, gate, mode):
    """R05: an update that comes when the save is over adds nothing; of a sync save, the call is all that there is."""
    events = []
    gate.may_go_on.set()
    with CheckpointManager(tmp_path, mode=mode, every=None, record=0, on_event=events.append) as manager:
        now, train = live_run(manager)
        manager.should_load(now())
        manager.step(now())
        began = gate.time()
        manager.save(now())
        call_secs = gate.time() - began
        manager.drain()
        train()
    (end,) = (event for event in events if event.kind == "committed")
    (save,) = saves_of(read_journal(LocalStore(tmp_path)).lines)
    assert TICK <= end.stalled_secs <= save.stall_secs + 1e-6 <= call_secs + 2e-6
