"""B07: an optional component that fails on some ranks is left out on all of them, at every point, and rank 0 says on which it failed."""

import logging
import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.depth import IS_DEEP

from trainfold.adapters.components.component import ObjectPart
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, run_threads, thread_outcomes
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    HalfRestored,
    InvalidState,
    OptionalLeftOut,
    RankFailed,
    SaveFailedElsewhere,
    TrainfoldError,
)

POINTS = ("cannot be captured", "fits no more", "is refused by a check", "does not take it")
# who fails as well, beside a component that is left out on rank 1, or beside none
FAILING = [(None, 0), (None, 1), *((point, index % 2) for index, point in enumerate(POINTS))]
if IS_DEEP:
    FAILING = [(point, victim) for point in (None, *POINTS) for victim in (0, 1)]


class Log:
    """An object beside the training, which fails at one point of a restore or of a save."""

    def __init__(self, value):
        self.value, self.fails = torch.full((2,), float(value)), None

    def state_dict(self):
        if self.fails == "cannot be captured":
            raise ConnectionError("no route to the log")
        return {"value": self.value.clone()}

    def load_state_dict(self, state):
        if self.fails == "does not take it" and state["value"].sum() != self.value.sum():
            raise ConnectionError("no route to the log")
        self.value = state["value"].clone()


@pytest.fixture(autouse=True)
def _checks(monkeypatch):
    """A check that refuses the value of one object."""
    problems = ObjectPart.problems

    def refused(part, value):
        if getattr(part.target, "fails", None) == "is refused by a check":
            return [InvalidState("log", expected="another", found="this", fix="none")]
        return problems(part, value)

    monkeypatch.setattr(ObjectPart, "problems", refused)


def make(value, fails=None):
    """A run with three optional components, one of which fails."""
    model = torch.nn.Linear(1, 1, bias=False)
    table = torch.nn.Linear(1, 2 if fails == "fits no more" else 1, bias=False)
    for module in (model, table):
        torch.nn.init.constant_(module.weight, value)
    extra = {"other": Log(value), "log": Log(value), "table": table}
    live = attach(model, extra=extra, optional=list(extra))
    extra["log"].fails = fails  # after the attach, so that it does not count as a changed setting
    return live, lambda: (
        live.progress.step,
        *(each.weight.mean().item() for each in (model, table)),
        *(extra[name].value.mean().item() for name in ("other", "log")),
    )


def saved():
    store = MemoryStore()
    live, _ = make(3)
    live.advance(samples=1)
    with CheckpointManager(store) as manager:
        manager.save(live)
    return store


def heard(work):
    """What it returns, and the texts of the warnings of optional components."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = work()
    return found, [str(each.message) for each in caught if issubclass(each.category, OptionalLeftOut)]


def restore(world, store, fails, victims, *, in_place=False):
    live, look = make(0, fails if world.rank in victims else None)
    with CheckpointManager(store, collectives=world, policy={"streams": "adapt"}) as manager:
        manager.restore(live, in_place=in_place)
    return look()


worlds = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))


@settings(max_examples=30)
@given(where=worlds, point=st.sampled_from(POINTS), in_place=st.booleans())
@example(where=(2, {1}), point="does not take it", in_place=False)
@example(where=(2, {0}), point="fits no more", in_place=True)
@example(where=(3, {1, 2}), point="cannot be captured", in_place=False)
def test_one_that_some_rank_cannot_restore_keeps_its_state_on_all_ranks(where, point, in_place):
    world_size, victims = where
    store = saved()
    found, texts = heard(
        lambda: run_threads(world_size, lambda world: restore(world, store, point, victims, in_place=in_place))
    )
    name, left = ("table", (1, 3.0, 0.0, 3.0, 3.0)) if point == "fits no more" else ("log", (1, 3.0, 3.0, 3.0, 0.0))
    assert found == [left] * world_size
    assert texts[0].startswith(f"the optional component {name} is left out")
    if world_size > 1:
        ranks = ", ".join(map(str, sorted(victims)))
        assert f"left out on every rank: on rank {ranks} it cannot be " in texts[0]
    assert len(texts) == 1, texts


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victims", [{0}, {1}, {0, 1}])
def test_should_load_decides_as_load_does_and_leaves_the_warning_to_it(point, victims):
    """It said no, so that `if manager.should_load(live): manager.load(live)` began the run again from scratch."""
    store = saved()

    def decide_and_load(world):
        live, look = make(0, point if world.rank in victims else None)
        with CheckpointManager(store, collectives=world, policy={"streams": "adapt"}) as manager:
            decision = manager.should_load(live)
            manager.load(live, decision)
        return bool(decision), look()

    found, texts = heard(lambda: run_threads(2, decide_and_load))
    left = (1, 3.0, 0.0, 3.0, 3.0) if point == "fits no more" else (1, 3.0, 3.0, 3.0, 0.0)
    assert found == [(True, left)] * 2
    assert len(texts) == 1, texts


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victims", [{0}, {1}, {0, 2}])
def test_one_that_some_rank_cannot_save_is_absent_and_is_warned_of_once(victims, mode):
    store = MemoryStore()

    def save(world):
        live, _ = make(3, "cannot be captured" if world.rank in victims else None)
        live.advance(samples=1)
        with CheckpointManager(store, mode=mode, collectives=world) as manager:
            manager.save(live)
            manager.drain()

    _, texts = heard(lambda: run_threads(3, save))
    ranks = ", ".join(map(str, sorted(victims)))
    assert len(texts) == 1
    assert f"log is left out on every rank: on rank {ranks} it cannot be saved: ConnectionError" in texts[0]
    names = {name.partition("-")[0] for name in store.list("step-00000001")}
    assert "log" not in names
    assert "other" in names


def test_its_next_save_has_the_state_that_its_object_has():
    """It was saved as it had been in the checkpoint from which it was not restored."""
    store = saved()
    live, _ = make(0, "is refused by a check")
    with CheckpointManager(store) as manager, pytest.warns(OptionalLeftOut):
        manager.restore(live)
    assert live.pending == ()
    assert live.capture().extra["log"].value["value"].sum() == 0


@pytest.mark.parametrize(("point", "victim"), FAILING)
def test_a_rank_that_fails_at_any_call_of_such_a_restore_leaves_no_rank_waiting(point, victim, caplog):
    """C07: the schedules are equal, whichever component is left out, with one rank failing at each call."""
    caplog.set_level(logging.CRITICAL)
    store = saved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = thread_outcomes(2, lambda world: restore(world, store, point, {1}))
        assert whole[0].schedule == whole[1].schedule
        for index in range(len(whole[0].schedule)):
            fault = RankFault(victim, index)
            outcomes = thread_outcomes(2, lambda world: restore(world, store, point, {1}), fail_at=fault)
            failed, survivor = outcomes[victim], outcomes[1 - victim]
            assert isinstance(failed.error, InjectedFailure | TrainfoldError), index
            assert isinstance(survivor.error, RankFailed | SaveFailedElsewhere | HalfRestored), (index, survivor.error)
            assert f"rank {victim}" in str(survivor.error)
