"""R09: an error contains the path, the step, the rank and the fix."""

import pickle

import pytest
import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CheckpointDamaged,
    NonFinite,
    RankFailed,
    RanksDisagree,
    RestoreRefused,
    ResumeRefused,
    SaveFailedElsewhere,
    UnsupportedLeaf,
    place,
)
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.state.state import Progress, TrainState


def state_at(step, **extra):
    return TrainState(trainer=Progress(step=step), extra={"ema": {"w": torch.arange(4.0), **extra}})


def test_a_failed_save_says_its_step_and_the_rank_that_failed():
    def work(world):
        save(state_at(7, **({"odd": object()} if world.rank == 1 else {})), MemoryStore(), collectives=world)

    first, other = (outcome.error for outcome in thread_outcomes(2, work))
    assert (type(other), other.rank) == (UnsupportedLeaf, 1)
    assert "on rank 1" in other.__notes__
    assert (type(first), first.rank) == (SaveFailedElsewhere, 1)
    assert "rank 1" in str(first)


def test_a_save_that_fails_after_its_state_was_read_says_the_step(tmp_path):
    """A world of one has no rank to name."""
    run = tmp_path / "run"
    save(state_at(1), run)
    with LocalStore(run).lock(), pytest.raises(Exception, match="run") as raised:
        save(state_at(2), run)
    assert (raised.value.step, raised.value.rank) == (2, None)
    assert raised.value.where
    assert raised.value.fix
    assert raised.value.__notes__ == ["at step 2"]


def test_a_damaged_checkpoint_says_its_step_and_its_path(tmp_path):
    run = tmp_path / "run"
    save(state_at(120), run)
    (file,) = (run / "step-00000120").glob("ema-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged) as raised:
        load(run, like=state_at(0), step=120)
    assert (raised.value.step, raised.value.rank) == (120, None)
    assert file.name in raised.value.where
    for error in (
        outcome.error
        for outcome in thread_outcomes(2, lambda ranks: load(run, like=state_at(0), step=120, collectives=ranks))
    ):
        assert error.step == 120
        assert type(error) is not CheckpointDamaged or error.rank in (0, 1)


def test_what_an_error_knows_stays_and_travels():
    error = RankFailed("rank 1", expected="success", found="none", fix="look there")
    place(error, rank=1)
    place(error, step=3, rank=0)
    assert (error.step, error.rank, error.__notes__) == (3, 1, ["on rank 1", "at step 3"])
    again = pickle.loads(pickle.dumps(error))
    assert (again.step, again.rank, str(again)) == (3, 1, str(error))
    foreign = ValueError("theirs")
    place(foreign, rank=1)
    place(foreign, rank=1)
    assert foreign.__notes__ == ["on rank 1"]
    assert run_threads(1, lambda world: world.rank) == [0]


class Meter:
    """A component of the user's; it can fail on one rank."""

    def __init__(self):
        self.value, self.fails = torch.zeros(1), False

    def state_dict(self):
        return {"value": object() if self.fails else self.value}

    def load_state_dict(self, state):
        if self.fails:
            raise OSError("no room")
        self.value = state["value"]


class Source:
    """A source of requests that cannot be asked."""

    def take(self):
        raise OSError("the queue is gone")

    def close(self):
        """There is nothing to close."""


class Stream:
    """A loader that does not know its length."""

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield torch.ones(1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def trained(ranks, *, width=1, weight=0.0, loader=None):
    model, meter = torch.nn.Linear(1, width), Meter()
    torch.nn.init.constant_(model.weight, weight)
    torch.nn.init.zeros_(model.bias)
    live = attach(model, loader=loader, extra={"meter": meter}, unsaved=["meter.fails"], parallelism=Replicas(ranks))
    return live, meter


def step_of_each(live, manager, *, until=3, **flags):
    while live.progress.step < until:
        live.advance(samples=1)
        manager.step(live, **flags if live.progress.step == until else {})


def fails_to_save(ranks, store, mode="sync"):
    live, meter = trained(ranks)
    with CheckpointManager(store, collectives=ranks, every=None, mode=mode) as manager:
        step_of_each(live, manager)
        meter.fails = ranks.rank == 1
        manager.save(live)
        manager.drain()


def drifts(ranks, store):
    live, _ = trained(ranks, weight=float(ranks.rank))
    with CheckpointManager(store, collectives=ranks, every=3) as manager:
        step_of_each(live, manager)


def ends_alone(ranks, store):
    live, _ = trained(ranks)
    with CheckpointManager(store, collectives=ranks, every_secs=1000.0) as manager:
        step_of_each(live, manager, is_last=ranks.rank == 1)
        step_of_each(live, manager, until=4)


def cannot_be_asked(ranks, store):
    live, _ = trained(ranks)
    with CheckpointManager(store, collectives=ranks, requests=Source() if ranks.rank else None) as manager:
        live.advance(samples=1, steps=2)
        step_of_each(live, manager)
        step_of_each(live, manager, until=4)


def ends_its_epoch(ranks, store):
    live, _ = trained(ranks, loader=Stream(5 - 2 * ranks.rank))
    with CheckpointManager(store, collectives=ranks, every=None) as manager:
        manager.restore(live)
        for _ in live.batches(epochs=1):
            live.advance(samples=1)


def has_more_data(ranks, store):
    loader = torch.utils.data.DataLoader(range(4 + ranks.rank), batch_size=1)
    live, _ = trained(ranks, loader=loader)
    with CheckpointManager(store, collectives=ranks, every=None) as manager:
        live.advance(samples=0, steps=3)
        manager.step(live)


def is_not_finite(ranks, store):
    live, _ = trained(ranks)
    live.advance(samples=1, steps=3)
    (next(live.modules[0].parameters()).sum() * 1.0).backward()
    live.check(float("nan") if ranks.rank == 1 else 1.0, parameters=list(live.modules[0].parameters())[:1])


def saved_run():
    store = MemoryStore()

    def work(ranks):
        live, _ = trained(ranks)
        with CheckpointManager(store, collectives=ranks, every=3) as manager:
            step_of_each(live, manager)

    run_threads(2, work)
    return store


def is_built_otherwise(ranks, store):
    live, _ = trained(ranks, width=1 + ranks.rank)
    with CheckpointManager(store, collectives=ranks) as manager:
        manager.restore(live)


def does_not_take_it(ranks, store):
    live, meter = trained(ranks)
    meter.fails = ranks.rank == 1
    meter.state_dict = lambda: {"value": meter.value}
    with CheckpointManager(store, collectives=ranks) as manager:
        manager.restore(live)


# what happens -> the error of rank 0, that of rank 1, and the rank that failed
HAPPENS = {
    fails_to_save: (SaveFailedElsewhere, UnsupportedLeaf, 1),
    drifts: (RanksDisagree, RanksDisagree, None),
    ends_alone: (RanksDisagree, RanksDisagree, None),
    cannot_be_asked: (RankFailed, OSError, 1),
    ends_its_epoch: (RanksDisagree, RanksDisagree, None),
    has_more_data: (RanksDisagree, RanksDisagree, None),
    is_not_finite: (NonFinite, NonFinite, 1),
    is_built_otherwise: (RankFailed, ResumeRefused, 1),
    does_not_take_it: (RankFailed, RestoreRefused, 1),
}


@pytest.mark.parametrize("happens", HAPPENS, ids=lambda work: work.__name__)
def test_what_is_raised_on_ranks_says_the_step_and_the_rank_that_failed(happens):
    """R09: each error of a run on ranks has both in its fields, on every rank; no rank where all failed alike."""
    is_resume = happens in (is_built_otherwise, does_not_take_it)
    store = saved_run() if is_resume else MemoryStore()
    outcomes = thread_outcomes(2, lambda ranks: happens(ranks, store))
    *kinds, failed = HAPPENS[happens]
    assert [type(each.error) for each in outcomes] == kinds, [str(each.error) for each in outcomes]
    for each in outcomes:
        notes = getattr(each.error, "__notes__", ())
        step, rank = getattr(each.error, "step", None), getattr(each.error, "rank", None)
        assert step in (3, 4) or "at step 3" in notes or "at step 4" in notes, (each.error, notes)
        assert rank == failed or f"on rank {failed}" in notes, (each.error, notes)


def test_a_save_in_the_background_says_its_step_and_the_rank_that_failed():
    store = MemoryStore()
    errors = [each.error for each in thread_outcomes(2, lambda ranks: fails_to_save(ranks, store, mode="async"))]
    assert [(type(each), each.step, each.rank) for each in errors] == [
        (SaveFailedElsewhere, 3, 1),
        (UnsupportedLeaf, 3, 1),
    ]
