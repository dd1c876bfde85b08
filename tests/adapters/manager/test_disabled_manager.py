"""A disabled manager saves nothing, and the loop around it runs and ends as with an enabled one."""

import inspect
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked, SignalRequests
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.save.requests import REQUESTS
from trainfold.core.state.state import Progress, TrainState

BOTH = ["CheckpointManager", "DisabledManager"]


def made(name, store, **extra):
    return create_checkpoint_manager(CheckpointConfig(run=store, manager=f"trainfold.{name}"), **extra)


def state_at(step):
    return TrainState(trainer=Progress(step=step))


def surface(cls):
    """Its public names with their signatures."""
    found = {}
    for name in dir(cls):
        if not name.startswith("_") or name in {"__enter__", "__exit__"}:
            value = inspect.getattr_static(cls, name)
            is_called = inspect.isfunction(value) or isinstance(value, classmethod)
            parameters = inspect.signature(getattr(cls, name)).parameters.values() if is_called else ()
            found[name] = (type(value), [(one.name, one.kind, one.default) for one in parameters])
    return found


def test_both_managers_have_the_same_public_names_and_are_called_alike():
    """O07: both have the same names, so that a config can choose either."""
    assert surface(DisabledManager) == surface(CheckpointManager)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_loop_makes_the_same_steps_with_both_managers(data):
    """O07, R01, R02: for any request, on any rank, and whenever the loop ends by itself."""
    last = data.draw(st.integers(1, 6))
    asked = data.draw(st.dictionaries(st.integers(1, 6), st.tuples(st.integers(0, 1), st.sampled_from(REQUESTS))))
    asks_first = data.draw(st.booleans())

    def ran(name):
        def run(world):
            source, seen, step = Asked(), [], 0
            with made(name, store, requests=source, collectives=world) as manager:
                while not manager.should_stop and step < 10:
                    step += 1
                    rank, request = asked.get(step, (None, "save"))
                    if rank == world.rank:
                        source.ask(request)
                    is_last, state = step == last, state_at(step)
                    if asks_first:
                        seen.append(manager.should_save(state, is_last=is_last).stop)
                    manager.step(state, is_last=is_last)
                    seen.append(manager.should_stop)
                seen.append(manager.finish(state) is None)
            return step, seen

        store = MemoryStore()
        return run_threads(2, run)

    assert ran("DisabledManager") == ran("CheckpointManager")


@pytest.mark.parametrize("name", BOTH)
def test_a_signal_ends_the_loop_and_its_handler_goes_with_the_manager(name):
    """O07, P29, D07: SIGTERM is neither swallowed nor caught for ever."""
    before = signal.getsignal(signal.SIGTERM)
    live, steps = trainfold.attach(torch.nn.Linear(1, 1)), 0
    manager = made(name, MemoryStore(), requests=SignalRequests())
    os.kill(os.getpid(), signal.SIGTERM)
    while not manager.should_stop and steps < 10:
        live.advance(samples=1)
        manager.step(live)
        steps += 1
    manager.close()
    manager.close()
    assert steps == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_by_hand_answers_what_was_asked_for_and_does_nothing_else():
    source = Asked()
    with DisabledManager(requests=source) as manager:
        source.ask("save")
        verdict = manager.should_save(state_at(3))
        assert (verdict.save, verdict.stop, verdict.reasons) == (False, False, ("save",))
        assert manager.save(state_at(3)) is None
        assert manager.should_save(state_at(4)).reasons == ()


@pytest.mark.parametrize("name", BOTH)
def test_requests_wait_for_the_boundary_that_closes_a_window(name):
    """A06: neither manager decides anything inside a window."""
    source, live = Asked(), trainfold.attach(torch.nn.Linear(1, 1))
    with made(name, MemoryStore(), requests=source) as manager:
        source.ask("stop")
        live.advance(samples=1, steps=0)
        manager.step(live)
        assert not manager.should_stop
        live.advance(samples=1)
        manager.step(live)
        assert manager.should_stop


def test_nothing_is_loaded_and_nothing_is_changed():
    """O07: by value the state is the same, and in place the run is unchanged."""
    live = trainfold.attach(torch.nn.Linear(1, 1))
    weight = live.capture().model.params["weight"].clone()
    state = state_at(3)
    with DisabledManager() as manager:
        assert not manager.should_load(live)
        assert manager.load(state) is manager.load_best(state) is state
        for restored in (manager.restore(live), manager.load(live), manager.load_best(live)):
            assert restored.is_fresh
        assert torch.equal(live.capture().model.params["weight"], weight)
        assert manager.poll() is manager.drain() is manager.wait_staging() is manager.finish(state) is None
