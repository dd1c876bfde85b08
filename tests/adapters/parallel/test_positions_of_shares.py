"""Loaders with a state of their own are kept for each share of the data, and every rank that reads the share takes it."""

import logging
from contextlib import nullcontext

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused
from trainfold.core.layout.parallelism import Coordinates
from trainfold.core.layout.world import World

LENGTH = 6


@attrs.frozen
class Grid:
    """Ranks of a grid: ``copies`` neighbours read the same share. Nothing of it trains."""

    ranks: object
    copies: int

    @property
    def coordinates(self):
        rank, size = self.ranks.rank, self.ranks.world_size
        return Coordinates(World(rank, size), World(rank // self.copies, size // self.copies))

    gradient_divisor = 1.0

    def gradient_sync(self, *, enabled):
        return nullcontext()

    def all_sum(self, tensors):
        return tensors

    def norm(self, gradients):
        return torch.zeros(())

    def local(self, leaf):
        return leaf

    def fail(self, error):
        pass


class Stream:
    """A user's loader: it reads one share, and knows how far it is."""

    def __init__(self, share):
        self.share, self.at, self.epoch = share, 0, 0

    def __iter__(self):
        while self.at < LENGTH:
            self.at += 1
            yield self.epoch * 1000 + self.share * 100 + self.at - 1
        self.at, self.epoch = 0, self.epoch + 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def read(store, ranks, *, copies, upto, **options):
    """What a rank reads up to a step, and the epoch it is in; it saves there."""
    grid = Grid(ranks, copies)
    live = attach(torch.nn.Flatten(), loader=Stream(grid.coordinates.data.rank), parallelism=grid)
    with CheckpointManager(store, collectives=ranks, **options) as manager:
        manager.restore(live)
        found = []
        for batch in live.batches(steps=upto):
            found.append(int(batch))
            live.advance(samples=1)
        manager.save(live)
    return found, live.progress.epoch


worlds = st.tuples(st.integers(1, 3), st.integers(1, 2))


@settings(max_examples=25, deadline=None)
@given(before=worlds, after=worlds, steps=st.integers(1, LENGTH - 2))
def test_a_share_continues_on_each_of_its_ranks_and_another_number_of_shares_is_refused_or_declared(
    before, after, steps
):
    """G05, G06, N06: keyed by the data-parallel coordinate; shares that leave take their place along, and those that join begin."""
    (shares, copies), (wanted, others) = before, after
    store = MemoryStore()
    run_threads(shares * copies, lambda ranks: read(store, ranks, copies=copies, upto=steps))

    def resume(ranks, **options):
        return read(store, ranks, copies=others, upto=steps + 2, **options)

    if shares != wanted:
        outcomes = thread_outcomes(wanted * others, resume)
        assert all(isinstance(each.error, ResumeRefused) for each in outcomes)
        text = str(outcomes[0].error)
        assert "data_ranks" in text
        # such a loader may have no indexes that a sampler could give to ranks
        assert "as many shares continue, or any number from the end of an epoch" in text
        assert "of a dataset with indexes trainfold.data.GlobalBatchSampler" in text
    options = {} if shares == wanted else {"policy": {"data_ranks": "adapt"}}
    for rank, (seen, _) in enumerate(run_threads(wanted * others, lambda ranks: resume(ranks, **options))):
        share = rank // others
        first = steps if share < shares else 0
        assert seen == [share * 100 + first, share * 100 + first + 1]


def test_a_share_that_joins_begins_the_epoch_in_which_the_others_are():
    """N06: else the ranks would count other epochs, and no save would succeed."""
    store = MemoryStore()
    run_threads(1, lambda ranks: read(store, ranks, copies=1, upto=LENGTH + 2))
    options = {"policy": {"data_ranks": "adapt"}}
    first, second = run_threads(2, lambda ranks: read(store, ranks, copies=1, upto=LENGTH + 4, **options))
    assert [first[1], second[1]] == [1, 1]
    assert [each % 1000 for each in first[0] + second[0]] == [2, 3, 100, 101]
    again = run_threads(2, lambda ranks: read(store, ranks, copies=1, upto=LENGTH + 5))
    assert [seen[0] % 1000 for seen, _ in again] == [4, 102]


def test_as_many_ranks_that_share_data_otherwise_are_refused():
    """G05: a rank never takes the place of another share, although there are as many ranks."""
    store = MemoryStore()
    run_threads(4, lambda ranks: read(store, ranks, copies=2, upto=2))
    outcomes = thread_outcomes(4, lambda ranks: read(store, ranks, copies=1, upto=3))
    assert all(isinstance(each.error, ResumeRefused) for each in outcomes)


def test_between_epochs_any_number_of_ranks_continues_with_a_distributed_sampler():
    """G06: every share has been read there, also where the position says whose it is."""
    store = MemoryStore()

    def epoch(ranks, upto):
        sampler = DistributedSampler(range(12), num_replicas=ranks.world_size, rank=ranks.rank, shuffle=False)
        loader = DataLoader(range(12), batch_size=2, sampler=sampler)
        live = attach(torch.nn.Flatten(), loader=loader, parallelism=Grid(ranks, 1))
        with CheckpointManager(store, collectives=ranks) as manager:
            manager.restore(live)
            seen = []
            for batch in live.batches(epochs=upto):
                seen += batch.tolist()
                live.advance()
            manager.save(live)
        return seen

    for upto, size in enumerate((2, 3), start=1):
        found = run_threads(size, lambda ranks, upto=upto: epoch(ranks, upto))
        assert sorted(sample for seen in found for sample in seen) == list(range(12))


def test_what_leaving_shares_had_not_read_is_warned_of_once_by_name(caplog):
    """G06: a declared policy may lose samples, and says which."""
    store, declared = MemoryStore(), {"policy": {"data_ranks": "adapt"}}
    run_threads(4, lambda ranks: read(store, ranks, copies=1, upto=2))
    with caplog.at_level(logging.WARNING, logger="trainfold"):
        run_threads(2, lambda ranks: read(store, ranks, copies=1, upto=3, **declared))
    said = [each.getMessage() for each in caplog.records if "shares 2, 3 have left" in each.getMessage()]
    assert len(said) == 1
    assert "what they had not read of epoch 0, after 2 batches, is not read" in said[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainfold"):
        run_threads(3, lambda ranks: read(store, ranks, copies=1, upto=4, **declared))
    assert not [each for each in caplog.records if "not read" in each.getMessage()], "no share has left"


def test_a_loader_that_cannot_continue_by_share_and_begins_again_is_warned_of(caplog):
    """G06: with the declaration it is at its start, which a reader of the log has to know."""
    store = MemoryStore()

    def epoch(ranks, upto, **options):
        sampler = DistributedSampler(range(12), num_replicas=ranks.world_size, rank=ranks.rank, shuffle=False)
        live = attach(torch.nn.Flatten(), loader=DataLoader(range(12), sampler=sampler), parallelism=Grid(ranks, 1))
        with CheckpointManager(store, collectives=ranks, **options) as manager:
            manager.restore(live)
            for _ in live.batches(steps=upto):
                live.advance()
            manager.save(live)

    run_threads(2, lambda ranks: epoch(ranks, 2))
    with caplog.at_level(logging.WARNING, logger="trainfold"):
        run_threads(3, lambda ranks: epoch(ranks, 3, policy={"data_ranks": "adapt"}))
    (said,) = [each.getMessage() for each in caplog.records if "dataset:" in each.getMessage()]
    assert "its loader begins where the script has it" in said


@settings(max_examples=15, deadline=None)
@given(shares=st.integers(1, 3), wanted=st.integers(1, 3), steps=st.integers(1, 3))
def test_several_loaders_continue_by_share_each_in_its_way(shares, wanted, steps):
    """G06, N06: a stream with a state by its share, and a dataset over all ranks without a loss."""
    store, size = MemoryStore(), 36

    def resume(ranks, upto, **options):
        sampler = GlobalBatchSampler(range(size), 6, shuffle=False, rank=ranks.rank, replicas=ranks.world_size)
        loaders = {"stream": Stream(ranks.rank), "data": DataLoader(range(size), batch_sampler=sampler)}
        live = attach(torch.nn.Flatten(), loader=loaders, parallelism=Grid(ranks, 1))
        with CheckpointManager(store, collectives=ranks, **options) as manager:
            manager.restore(live)
            found = [], []
            for one, batch in zip(live.batches("stream", steps=upto), live.batches("data", steps=upto), strict=True):
                found[0].append(int(one))
                found[1].extend(batch.tolist())
                live.advance()
            manager.save(live)
        return found

    before = run_threads(shares, lambda ranks: resume(ranks, steps))
    declared = {} if shares == wanted else {"policy": {"data_ranks": "adapt"}}
    after = run_threads(wanted, lambda ranks: resume(ranks, steps + 2, **declared))
    for share, (streamed, _) in enumerate(after):
        first = steps if share < shares else 0
        assert streamed == [share * 100 + first, share * 100 + first + 1]
    read_all = sorted(sample for _, data in (*before, *after) for sample in data)
    assert read_all == list(range(6 * (steps + 2)))


def said_of_batches(caplog, copies, data_of):
    """The warnings of a run of two ranks that saves at each end of an epoch."""
    caplog.clear()
    store = MemoryStore()

    def work(ranks):
        loader = DataLoader(data_of(ranks.rank), batch_size=2)
        live = attach(torch.nn.Flatten(), loader=loader, parallelism=Grid(ranks, copies))
        with CheckpointManager(store, collectives=ranks, every=2) as manager:
            manager.restore(live)
            for _ in live.batches(epochs=3):
                live.advance()
                manager.step(live)

    with caplog.at_level(logging.WARNING, "trainfold"):
        run_threads(2, work)
    return [each.getMessage() for each in caplog.records if "have trained on" in each.getMessage()]


def test_batches_that_are_not_those_of_the_share_are_warned_of_once(caplog):
    """G05, P08: without a DistributedSampler every rank reads all the data, and parts of one model may read other data; nothing else shows it."""
    (text,) = said_of_batches(caplog, 1, lambda _: range(4))
    assert "loader: ranks 0 and 1 have trained on the same batch" in text
    assert "trainfold.data.GlobalBatchSampler" in text
    (text,) = said_of_batches(caplog, 2, lambda rank: range(4 * rank, 4 * rank + 4))
    assert "loader: ranks 0 and 1 have trained on other batches, although they hold parts of one model" in text
    assert not said_of_batches(caplog, 1, lambda rank: range(4 * rank, 4 * rank + 4))
    assert not said_of_batches(caplog, 2, lambda _: range(4))
