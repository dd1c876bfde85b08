"""``every="auto"``: a loop that sets no cadence is still saved, at the cadence with the lowest cost (W12)."""

import logging
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager import saving, triggers
from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.manager.triggers import AutoCadence
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument
from trainfold.core.save.cadence import (
    ASSUMED_MTBF_SECS,
    FIRST_SAVE_SECS,
    advise_cadence,
    choose_cadence,
    lost_fraction,
)
from trainfold.core.state.state import Progress, TrainState


class Clock:
    """Seconds that pass on command."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, secs):
        self.now += secs


@pytest.fixture
def clock(monkeypatch):
    """The clock of the manager, and of nothing else."""
    made = Clock()
    time = types.SimpleNamespace(monotonic=made)
    for module in (triggers, saving):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(AutoCadence.__init__, "__kwdefaults__", {"clock": made})
    return made


class Slow(MemoryStore):
    """A store in which a commit of a checkpoint takes some seconds."""

    def __init__(self, clock, secs):
        super().__init__()
        self.clock, self.secs = clock, secs

    def commit(self, name, data, *, replaces=None):
        if name.endswith("manifest.json"):
            self.clock.sleep(self.secs)
        super().commit(name, data, replaces=replaces)


def steps_of(store):
    return [entry.head.step for entry in read_inventory(store).entries]


def loop(store, clock, steps, *, step_secs=0.5, begin=0, **options):
    with CheckpointManager(store, at_end=False, **options) as manager:
        for step in range(begin + 1, begin + steps + 1):
            clock.sleep(step_secs)
            manager.step(TrainState(trainer=Progress(step=step)))


def test_without_a_cadence_the_first_save_comes_after_a_minute_and_the_others_as_often_as_is_best(clock, caplog):
    """W12: otherwise nothing is saved. With a save of 0.2 s and a step of 0.5 s, every 200 steps loses least; it is logged."""
    store = Slow(clock, 0.2)
    with caplog.at_level(logging.WARNING):
        loop(store, clock, 1000)
    assert steps_of(store) == [120, 200, 400, 600, 800, 1000]
    said = [record.getMessage() for record in caplog.records if "saves every" in record.getMessage()]
    assert len(said) == 1
    assert 'every="auto" saves every 200 steps (100 s): a save costs 0.2 s, a step takes 0.5 s' in said[0]


def test_another_cost_changes_the_cadence_seldom_and_says_so(clock, caplog):
    """W12: ten times the cost changes the cadence; slightly more does not."""
    store = Slow(clock, 0.2)
    with caplog.at_level(logging.WARNING), CheckpointManager(store, at_end=False) as manager:
        for step in range(1, 3001):
            clock.sleep(0.5)
            store.secs = 0.2 if step < 500 else 0.3 if step < 1000 else 2.0
            manager.step(TrainState(trainer=Progress(step=step)))
    said = [record.getMessage() for record in caplog.records if "saves every" in record.getMessage()]
    assert ["every 200 steps" in said[0], "every 1000 steps" in said[1]] == [True, True]
    assert len(said) == 2


@pytest.mark.parametrize(
    ("options", "saved"),
    [({"every": None}, []), ({"every": 300}, [300, 600]), ({"every_secs": 200.0}, [400, 800]), ({"every": None, "every_secs": 200.0}, [400, 800])],
)  # fmt: skip
def test_a_cadence_that_is_given_is_the_only_one(options, saved, clock):
    """``every=None`` saves by hand, and ``every_secs`` alone is that cadence."""
    store = MemoryStore()
    loop(store, clock, 899, **options)
    assert steps_of(store) == saved


def test_an_async_save_costs_what_the_steps_beside_it_are_longer(clock):
    """W12: its call costs nearly nothing; its cost is the slowdown of steps during the write."""
    said, meter = [], None
    meter = AutoCadence(said.append, clock=clock)
    for step in range(1, 11):
        clock.sleep(0.5)
        meter.arrive(step)
        meter.leave(step)
    meter.begun(0.0, is_durable=False)
    for step in range(11, 15):
        clock.sleep(0.55)
        meter.arrive(step)
        if step == 14:
            meter.ended()
        meter.leave(step)
    clock.sleep(0.5)
    meter.arrive(15)
    assert meter.every == choose_cadence(None, save_secs=0.2, step_secs=0.5, write_secs=2.2)
    assert "a save costs 0.2 s" in said[0]


def test_the_ranks_save_at_the_same_steps_though_their_clocks_differ(monkeypatch):
    """R01: rank 0 measures and decides; the other ranks would choose other cadences."""
    clocks = {}

    def rank(world):
        made = clocks.setdefault(world.rank, Clock())
        store_of[world.rank] = made
        with CheckpointManager(store, at_end=False, collectives=world) as manager:
            manager._due.auto._clock = made
            for step in range(1, 41):
                made.sleep(1.0 if world.rank == 0 else 7.0)
                manager._due._saved_at -= 10.0
                manager.step(TrainState(trainer=Progress(step=step)))
        return manager._due.auto.every

    store, store_of = MemoryStore(), {}
    monkeypatch.setattr(
        triggers, "choose_cadence", lambda _current, *, save_secs, step_secs, write_secs: 5 if step_secs < 2 else 3
    )
    assert run_threads(2, rank) == [5, 3]
    assert steps_of(store) == [7, 10, 15, 20, 25, 30, 35, 40]


def test_auto_is_the_default_of_the_manager_and_of_the_config():
    model = torch.nn.Linear(1, 1)
    for manager in (CheckpointManager(MemoryStore()), create_checkpoint_manager(CheckpointConfig(run=MemoryStore()))):
        with manager:
            assert manager._due.auto is not None
            assert not manager.should_save(attach(model)).save  # nothing is due in the first minute
    for wrong in ("often", "None", 0, -1, 2.5, True):
        with pytest.raises(InvalidArgument):
            CheckpointManager(MemoryStore(), every=wrong)


@given(save=st.floats(0, 600), step=st.floats(1e-4, 600), noise=st.floats(0.8, 1.25))
def test_the_choice_is_round_nearly_the_best_and_stays_where_it_is_measured_again(save, step, noise):
    """W12: it loses at most a sixth more than the best; noise of a quarter changes it by at most one round number."""
    every = choose_cadence(None, save_secs=save, step_secs=step)
    assert str(every).rstrip("0") in {"1", "2", "5"}
    best = advise_cadence(save_secs=save, step_secs=step, mtbf_secs=ASSUMED_MTBF_SECS).lost_fraction
    assert lost_fraction(every, save_secs=save, step_secs=step, mtbf_secs=ASSUMED_MTBF_SECS) <= best * 1.2 + 1e-9
    again = choose_cadence(every, save_secs=save * noise, step_secs=step * noise)
    assert again == every
    assert FIRST_SAVE_SECS < ASSUMED_MTBF_SECS
