"""A loop that goes back in memory: what it trains again is saved, and what it left behind is not in the lineage."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.adapters.manager.manager_cases import state_at, value_in

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.manager.triggers import SaveTriggers
from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.runs.api import load
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.history.inventory import lineage
from trainfold.core.save.triggers import make_triggers


@given(
    moves=st.lists(st.integers(-6, 8).filter(bool), min_size=1, max_size=8),
    every=st.sampled_from([None, 1, 3, 4]),
    mode=st.sampled_from(["sync", "async"]),
)
@settings(max_examples=60, deadline=None)
@example(moves=[1, -1, 1], every=1, mode="sync")
@example(moves=[3, -1, 1], every=3, mode="async")
def test_whatever_a_loop_goes_back_to_its_last_state_is_saved_and_none_twice(moves, every, mode):
    """A14: a state is a value, so a loop may continue from one that it kept; a manager's resume is not the only way back."""
    store, step, salt, saved = MemoryStore(), 0, 0, []
    with CheckpointManager(store, every=every, mode=mode) as manager:
        for move in moves:
            if move < 0:
                step = max(0, step + move)
                continue
            for _ in range(move):
                step, salt = step + 1, salt + 1
                state = state_at(step, salt)
                if manager.step(state) is not None:
                    saved.append(salt)
        if salt:
            final = salt if moves[-1] > 0 else salt + 1
            if manager.finish(state if moves[-1] > 0 else state_at(step, final)) is not None:
                saved.append(final)
            assert value_in(load(store, like=state_at(0), step=step)) == final
            assert value_in(load(store, like=state_at(0))) == final
    assert len(saved) == len(set(saved))


def test_what_was_left_behind_in_memory_is_no_ancestor():
    """E16: after a loop goes back, by a load or in memory, its next save descends from a step before that point."""
    store = MemoryStore()
    with CheckpointManager(store, every=100) as manager:
        for step in (100, 200, 300):
            manager.step(state_at(step))
        manager.step(state_at(150))
        manager.step(state_at(400))
        assert chain(store) == [400, 100]
        manager.load(state_at(0), manager.should_load(state_at(0), step=300))
        manager.step(state_at(500))
        assert chain(store) == [500, 300, 200, 100]


def chain(store):
    return [entry.head.step for entry in lineage(read_inventory(store))]


def test_a_live_run_that_was_put_back_in_memory_is_saved_when_it_is_there_again():
    """A14: `live.restore` of a state captured before the run diverged."""
    store, model = MemoryStore(), torch.nn.Linear(1, 1, bias=False)
    live = attach(model)
    with CheckpointManager(store, every=5) as manager:
        kept = None
        for step in range(1, 11):
            live.advance(samples=1)
            manager.step(live)
            if step == 6:
                kept = live.capture()
        live.restore(kept)
        for _ in range(4):
            torch.nn.init.constant_(model.weight, 7.0)
            live.advance(samples=1)
            manager.step(live)
        manager.finish(live)
    found = load(store, like=live.capture(), step=10)
    assert found.model.params["weight"].item() == 7.0


def test_a_live_run_that_was_put_back_by_one_step_is_saved_when_it_is_there_again():
    """A14: the manager sees the same step twice, of two runs."""
    store, model = MemoryStore(), torch.nn.Linear(1, 1, bias=False)
    live = attach(model)
    with CheckpointManager(store, every=2) as manager:
        live.advance(samples=1)
        manager.step(live)
        kept = live.capture()
        for value in (3.0, 7.0):
            live.restore(kept)
            torch.nn.init.constant_(model.weight, value)
            live.advance(samples=1)
            manager.step(live)
            assert manager.finish(live) is None  # the same run at the same step is not saved twice
    assert load(store, like=live.capture(), step=2).model.params["weight"].item() == 7.0


def test_a_save_that_fails_after_the_loop_went_back_leaves_nothing_saved_that_is_not():
    """D05, A14: the saves before the failed one may belong to the abandoned path."""
    due = SaveTriggers(make_triggers(every=5), None, SingleProcess())
    for step in (5, 10):
        due.see(step)
        before = due.before(step)
        due.begun(step)
    due.see(5)  # back, to before the older one
    due.undone(before)
    assert due.last_saved == 4
    due.see(12)
    before = due.before(12)
    due.begun(12)
    due.undone(before)
    assert due.last_saved == 4
