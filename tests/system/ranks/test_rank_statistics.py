"""Shares of the data, samples and drift over several ranks."""

import pytest
import torch
from kit.system.rank_refusals_cases import disagreements, refusal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    DataPositionMismatch,
    InvalidArgument,
    RankFailed,
    RanksDisagree,
    RestoreRefused,
    ResumeRefused,
)
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState


def uneven_shares(world, store, *, steps, sizes=(9, 8)):
    """Each rank reads its own dataset, in the same number of batches of 3; the last ones have 3 and 2 samples."""
    data = TensorDataset(torch.arange(float(sizes[world.rank])).unsqueeze(1))
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    live = attach(model, loader=DataLoader(data, batch_size=3))
    seen = []
    with CheckpointManager(store, collectives=world) as manager:
        manager.restore(live)
        for (x,) in live.batches(epochs=2):
            seen.append(x.flatten().tolist())
            live.advance(samples=sum(world.gather(len(x))))
            manager.save(live)
            if live.progress.step == steps:
                break
    return seen, live.progress.samples


def test_shares_of_different_sizes_are_saved_and_resumed_where_samples_are_summed(monkeypatch):
    """W24, G02: it used to be impossible to save separate datasets per rank: their lengths differ, and a sum over ranks fits no batch."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = MemoryStore()
    assert {samples for _, samples in run_threads(2, lambda world: uneven_shares(world, store, steps=5))} == {17 + 12}
    (one, samples), (other, _) = run_threads(2, lambda world: uneven_shares(world, store, steps=6))
    assert (one, other, samples) == ([[6.0, 7.0, 8.0]], [[6.0, 7.0]], 2 * 17)


def test_samples_that_each_rank_counts_for_itself_are_refused_with_the_sum_as_the_cure():
    """W24: shares of different sizes are not replicas; the error names the leaf, not the component."""
    store = MemoryStore()

    def work(world):
        live = attach(nn.Flatten())  # weights from the stream that the threads share would differ too
        live.advance(samples=3 - world.rank)
        save(live.capture(), store, collectives=world)

    text = disagreements(thread_outcomes(2, work))
    assert text.startswith("trainer.samples: expected what rank 0 has: 3, found on rank 1: 2")
    assert "summing it over them" in text


def test_samples_of_no_batch_are_refused_where_there_is_one_rank():
    """G02: a larger number can be a sum only with several ranks."""
    live = attach(nn.Linear(1, 1), loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2))
    next(iter(live.batches()))
    with pytest.raises(DataPositionMismatch, match=r"\[2\] are waiting, found 4"):
        live.advance(samples=4)


def test_another_length_of_the_dataset_of_any_rank_is_refused(monkeypatch):
    """G02: rank 0 compares the length in the contract, and each other rank in its position."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = MemoryStore()
    run_threads(2, lambda world: uneven_shares(world, store, steps=1))
    for rank, sizes, refused in ((0, (12, 8), ResumeRefused), (1, (9, 11), RestoreRefused)):
        outcomes = thread_outcomes(2, lambda world, sizes=sizes: uneven_shares(world, store, steps=2, sizes=sizes))
        own, others = outcomes[rank].error, outcomes[1 - rank].error
        assert isinstance(own, refused)
        assert isinstance(others, RankFailed)
        for error in (own, others):
            assert f"{sizes[rank]}" in str(error), "each rank says what is in the way"
            assert f"{(9, 8)[rank]}" in str(error)


def test_what_one_rank_alone_refuses_is_said_by_it_and_by_the_others():
    """V05: all ranks used to report that they see other files, including the rank with the reason."""
    store = MemoryStore()
    state = TrainState(trainer=Progress(step=1), contract={"environment.threads": 1})
    run_threads(2, lambda world: save(state, store, collectives=world))

    def resume(world):
        like = TrainState(trainer=Progress(), contract={"environment.threads": 2})
        load(store, like=like, collectives=world, policy={"environment": "refuse"})

    first, other = (outcome.error for outcome in thread_outcomes(2, resume))
    assert isinstance(first, ResumeRefused)
    assert isinstance(other, RankFailed)
    assert other.where == "rank 0"
    for error in (first, other):
        assert "environment.threads" in str(error)


# --- how much is compared ---------------------------------------------------------------------------------------------


def found_at(level, drifts, *, leaf=3, size=2**14):
    """The number of the save at which a drift after the first save is found; None if it never is."""
    store = MemoryStore()

    def work(world):
        with CheckpointManager(store, collectives=world, check_replicas=level) as manager:
            for step in range(1, 22):
                weights = {"small": torch.zeros(3), "large": torch.zeros(size), "queue": torch.zeros(size)}
                if step > 1 and world.rank == 1:
                    for name, index in drifts:
                        weights[name][index] = 1.0
                queue = weights.pop("queue")
                ema = ModelState(params=Leaves(weights), buffers=Leaves({}))
                try:
                    manager.save(TrainState(trainer=Progress(step=step), extra={"ema": ema, "queue": {"keys": queue}}))
                except RanksDisagree:
                    return step
        return None

    first, other = run_threads(2, work)
    assert first == other
    return first


def test_drift_after_the_first_save_is_found_in_time():
    """B06, W24: it is found at the next save; a drift of one element in a large parameter within sixteen saves.

    What no step keeps alike, such as a queue or a generator under ``extra``, is compared whole each time.
    """
    assert found_at("quick", [("small", 1)]) == 2
    assert found_at("quick", [("queue", 2**13)]) == found_at("quick", [("queue", 2**14 - 1)]) == 2
    assert found_at("quick", [("large", slice(None))]) == 2
    assert {found_at("quick", [("large", index)]) for index in (0, 2**13, 2**14 - 1)} == {2, 10, 17}
    assert found_at("tensor", [("large", 2**13)]) == found_at("full", [("large", 2**13)]) == 2
    assert found_at("none", [("small", 1), ("large", slice(None))]) is None


def test_a_level_that_is_none_is_refused():
    with pytest.raises(
        InvalidArgument, match=r"check_replicas.*'none' or 'quick' or 'tensor' or 'full', or an int >= 1, found 'ful'"
    ):
        CheckpointManager(MemoryStore(), check_replicas="ful")


def restored_otherwise(collectives, level, store):
    """An object that, on one rank, takes another state than the one it was given."""
    value = {"x": torch.zeros(3)}

    def take(tree):
        value["x"].copy_(tree["x"] + (collectives.rank if collectives.world_size > 1 else 0))

    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    live = attach(model, extra={"ema": (lambda: value, take)})
    with CheckpointManager(store, collectives=collectives, check_replicas=level) as manager:
        if manager.restore(live).is_fresh:
            live.advance(samples=1)
            manager.save(live)
    return "nothing"


def test_the_level_full_compares_what_a_restore_has_made():
    store = MemoryStore()
    run_threads(2, lambda ranks: restored_otherwise(ranks, "quick", store))
    assert run_threads(2, lambda ranks: refusal(lambda: restored_otherwise(ranks, "tensor", store))) == ["nothing"] * 2
    for text in run_threads(2, lambda ranks: refusal(lambda: restored_otherwise(ranks, "full", store))):
        assert text.startswith("RanksDisagree: ema.value['x']")


def restored_on_one(collectives, store):
    live = attach(
        nn.Linear(1, 1), extra={"ema": (lambda: {"x": torch.zeros(1)}, lambda tree: tree[f"x{collectives.rank or ''}"])}
    )
    with CheckpointManager(store, collectives=collectives, components=["model", "ema", "trainer"]) as manager:
        manager.restore(live)


def test_a_restore_that_fails_on_one_rank_fails_on_all():
    """B07: the other ranks used to continue into a forward that waits for it."""
    store = MemoryStore()
    live = attach(nn.Linear(1, 1), extra={"ema": (lambda: {"x": torch.zeros(1)}, print)})
    save(live.capture(), store)
    first, other = (outcome.error for outcome in thread_outcomes(2, lambda ranks: restored_on_one(ranks, store)))
    assert isinstance(other, RestoreRefused), other
    assert isinstance(first, RankFailed)
    assert "rank 1" in str(first)
    assert "KeyError" in str(first)
