"""After a resume, a loader gives the sample that would have come next."""

import os
import random
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.adapters.live.positions_cases import (
    LOADERS,
    Bookmark,
    Counting,
    Forgetful,
    N,
    Numbers,
    Reader,
    Shards,
    Shuffling,
    generator,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.digest import digest_of
from trainfold.core.errors import IncompleteWindow, InvalidState
from trainfold.core.format.structure.describe import describe

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
    pytest.mark.filterwarnings("ignore:(?s)1 attribute changes.*loader.dataset.read"),  # the log of these tests
]


IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
BATCH_SAMPLERS: dict[str, Any] = {
    "shuffled": lambda: BatchSampler(RandomSampler(range(N)), 4, drop_last=False),
    "shuffled, drop_last": lambda: BatchSampler(RandomSampler(range(N)), 4, drop_last=True),
    "own generator": lambda: BatchSampler(RandomSampler(range(N), generator=generator()), 4, drop_last=False),
    "subset": lambda: BatchSampler(SubsetRandomSampler(range(N)), 4, drop_last=False),
    "in order": lambda: BatchSampler(SequentialSampler(range(N)), 4, drop_last=False),
    "in order, drop_last": lambda: BatchSampler(SequentialSampler(range(N)), 4, drop_last=True),
}


LOADERS |= {
    f"{kind.__name__}, BatchSampler {name}": lambda kind=kind, make=make: kind(Numbers(), batch_sampler=make())
    for kind in (DataLoader, StatefulDataLoader)
    for name, make in BATCH_SAMPLERS.items()
}


WORKERS: dict[str, Any] = {
    "workers": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stateful persistent workers": lambda: StatefulDataLoader(
        Numbers(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stateful workers": lambda: StatefulDataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=2),
    "stateful workers, BatchSampler": lambda: StatefulDataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(N)), 3, drop_last=False), num_workers=2
    ),
    "stateful workers, dataset with a state": lambda: StatefulDataLoader(
        Counting(), batch_size=3, shuffle=True, num_workers=2
    ),
    "stateful workers, sampler with a state": lambda: StatefulDataLoader(
        Numbers(), batch_size=3, sampler=Bookmark(), num_workers=2
    ),
    "stateful workers, stream": lambda: StatefulDataLoader(Shards(), batch_size=3, num_workers=2),
    "stateful workers, stream, no batches": lambda: StatefulDataLoader(Shards(5), batch_size=None, num_workers=2),
    "stateful persistent workers, sampler with a state": lambda: StatefulDataLoader(
        Numbers(), batch_size=3, sampler=Bookmark(), num_workers=1, persistent_workers=True
    ),
    "stateful persistent workers, dataset with a state": lambda: StatefulDataLoader(
        Counting(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stateful workers, stream without a state": lambda: StatefulDataLoader(Forgetful(), batch_size=3, num_workers=2),
    "stateful workers, stream without a state, shuffled": lambda: StatefulDataLoader(
        Shuffling(), batch_size=None, num_workers=2
    ),
    "stateful workers, stream without a state, seldom asked": lambda: StatefulDataLoader(
        Forgetful(), batch_size=2, num_workers=2, snapshot_every_n_steps=3
    ),
}


@cache
def read_whole(make, steps):
    """What a run that is never killed reads: the same for all examples of a loader."""
    return Reader(make, 1).read(steps)


def check_resumes_everywhere(make, steps, chains):
    """Killed at each step of a chain, in one epoch or in several, a run reads what it would have read."""
    whole = read_whole(make, steps)
    for chain_of_kills in chains:
        reader, seen = Reader(make, 1), []
        for number, k in enumerate(chain_of_kills):
            seen += reader.read(k)
            assert digests(seen) == digests(whole[:k]), (chain_of_kills, k)
            state = copied(reader.live.capture())
            describe(state.dataset, "dataset")  # it can be saved
            killed, reader = reader, Reader(make, 99 + 7 * k + number)
            reader.live.restore(state)
            assert reader.live.progress == killed.live.progress
            describe(reader.live.capture().dataset, "dataset")
        seen += reader.read(steps)
        assert digests(seen) == digests(whole), chain_of_kills


def digests(seen):
    """One for the order of the data, which a failure shows, and one for the random streams."""
    return [batch for batch, *_ in seen], digest_of(repr(seen).encode())


@pytest.mark.parametrize("name", LOADERS)
def test_the_next_batch_is_the_one_that_would_have_come_next(name):
    """G01, G03, G04: in the middle of an epoch, at its end, and in later epochs; the random streams too."""
    kills = range(11) if IS_DEEP else (0, 1, 3, 4, 5, 9)  # epochs have three to five batches
    check_resumes_everywhere(LOADERS[name], 11, [(k,) for k in kills])


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=4 if IS_DEEP else 1, deadline=None)
@example(kills=(1, 1, 2))
@example(kills=(3, 4, 8))
@given(kills=st.lists(st.integers(0, 10), min_size=2, max_size=3).map(lambda kills: tuple(sorted(kills))))
def test_it_comes_next_however_often_the_run_is_killed_in_an_epoch_and_over_epochs(name, kills):
    """G01, G03: the position that a resumed run saves is equivalent to the one that it resumed from."""
    check_resumes_everywhere(LOADERS[name], 11, [kills])


SELDOM = {
    "persistent workers", "stateful workers, BatchSampler", "stateful persistent workers, sampler with a state",
    "stateful persistent workers, dataset with a state", "stateful workers, stream, no batches", "stateful workers, stream without a state, shuffled",
}  # fmt: skip


@pytest.mark.slow(0.5)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each in SELDOM else each for each in WORKERS]
)
def test_it_comes_next_from_worker_processes_too(name):
    """G01: workers have prefetched batches that were not trained on."""
    chains = [(2, 5, 7), *([(1, 2, 3), (2,), (4, 6)] if IS_DEEP else [])]
    check_resumes_everywhere(WORKERS[name], 8, chains)


@pytest.mark.parametrize("name", ["shuffled", "batch sampler"])
def test_no_skipped_sample_is_read(name):
    """G04: a seek does not read the skipped samples."""
    first = Reader(LOADERS[name], 1)
    first.read(3)
    state = copied(first.live.capture())
    resumed = Reader(LOADERS[name], 2)
    resumed.live.restore(state)
    resumed.read(4)
    last = first_after(LOADERS[name], 2, 3)  # the probe draws this batch again
    assert resumed.loader.dataset.read == last + first_after(LOADERS[name], 3, 4)


def first_after(make, start, stop):
    reader = Reader(make, 1)
    reader.read(start)
    done = len(reader.loader.dataset.read)
    reader.read(stop)
    return reader.loader.dataset.read[done:]


def test_set_epoch_comes_before_the_seek():
    """G04, P01: the order is that of the resumed epoch, not of epoch 0."""
    first = Reader(LOADERS["distributed"], 1)
    first.read(6)
    state = copied(first.live.capture())
    resumed = Reader(LOADERS["distributed"], 2)
    resumed.live.restore(state)
    resumed.read(7)
    assert resumed.loader.sampler.epoch == 1


def test_every_sample_of_every_epoch_is_read_once_however_often_the_run_is_interrupted():
    """G01, G03."""
    state, seen = None, []
    for k in (1, 2, 3, 4, 6, 7, 9, 12):
        reader = Reader(LOADERS["shuffled"], k)
        if state is not None:
            reader.live.restore(state)
        seen += [index for batch, *_ in reader.read(k) for index in batch]
        state = copied(reader.live.capture())
    assert [sorted(seen[i : i + N]) for i in (0, N, 2 * N)] == [list(range(N))] * 3


def test_leaving_the_loop_and_coming_back_goes_on_where_it_stopped():
    """G01: a break for an evaluation loses nothing, and repeats only batches that were not trained on."""
    whole = [batch for batch, *_ in Reader(LOADERS["shuffled"], 1).read(8)]
    reader = Reader(LOADERS["shuffled"], 1)
    seen = []
    while len(seen) < 8:
        for number, batch in enumerate(reader.live.batches(steps=8)):
            if number == 2:
                break  # this one was drawn and not trained on
            seen.append(batch.tolist())
            torch.rand(())
            random.random()
            reader.live.advance(samples=len(batch))
    assert seen[:4] == whole[:4]
    assert sorted(chain(*seen[:4])) == list(range(N))


def test_an_iteration_left_when_it_had_run_into_the_next_epoch_comes_back_to_the_epoch_that_is_open():
    """G01: a prefetcher, or a window over the end of an epoch, has drawn batches of two epochs, and an error stops it."""
    for ahead in (1, 2, 3, 6):
        torch.manual_seed(1)
        live = attach(torch.nn.Linear(1, 1), loader=DataLoader(Numbers(), batch_size=4, shuffle=True))
        batches, seen = live.batches(), []
        for _ in range(3):
            seen += next(batches).tolist()
            live.advance()
        expected, *_ = [next(batches).tolist() for _ in range(ahead)]
        again = live.batches()
        assert next(again).tolist() == expected
        live.advance()
        assert sorted(seen + expected) == list(range(N))
        following = [next(again).tolist() for _ in range(4)]
        assert sorted(chain(*following)) == list(range(N))


@pytest.mark.parametrize("taken", [0, 2, 4, 5])
@pytest.mark.parametrize("ahead", [1, 3, 5, 9])
def test_a_position_taken_after_an_abandoned_iteration_is_resumed_as_the_run_itself_goes_on(taken, ahead):
    """G01: what an abandoned iteration drew of later epochs is known to neither."""
    reader = Reader(LOADERS["shuffled"], 1)
    reader.read(2)
    abandoned = reader.live.batches()
    for _ in range(ahead):
        next(abandoned)
    reader.read(2 + taken)
    assert list(reader.live.batches(steps=0)) == []  # this forgets what was handed out
    state = copied(reader.live.capture())
    went_on = reader.read(12)
    resumed = Reader(LOADERS["shuffled"], 99)
    resumed.live.restore(state)
    assert resumed.read(12) == went_on


def test_a_loader_with_its_own_state_cannot_hand_out_a_batch_twice():
    reader = Reader(LOADERS["stateful"], 1)
    next(reader.live.batches())
    with pytest.raises(IncompleteWindow, match="advance"):
        next(reader.live.batches())
    reader.live.drop_window()
    assert len(reader.read(2)) == 2


def test_an_iteration_that_was_replaced_says_so():
    reader = Reader(LOADERS["shuffled"], 1)
    old = reader.live.batches()
    next(old)
    reader.live.advance()
    state = reader.live.capture()
    reader.live.restore(state)
    with pytest.raises(InvalidState, match="one iteration at a time"):
        next(old)


def test_the_loader_itself_is_left_as_it_is():
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    own = loader.batch_sampler
    live = attach(torch.nn.Linear(1, 1), loader=loader)
    next(live.batches())
    assert loader.batch_sampler is own
    assert len(list(loader)) == 4
