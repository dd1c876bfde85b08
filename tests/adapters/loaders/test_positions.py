"""Loaders: the next sample after a resume is the one that would have come next."""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.live import attach
from trainfold.core.digest import digest_of
from trainfold.core.errors import DataPositionMismatch, IncompleteWindow, InvalidArgument, InvalidState, RestoreRefused
from trainfold.core.format.describe import describe
from trainfold.core.state.state import Opaque

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
    pytest.mark.filterwarnings("ignore:(?s)1 attribute changes.*loader.dataset.read"),  # the log of these tests
]
N = 14


class Numbers(Dataset):
    """The sample is its index; it remembers what was read."""

    def __init__(self, n=N):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(int(index))
        return torch.tensor(index)


class Noisy(Numbers):
    """Augmentation from the global streams, in the main process."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class PythonShuffle(Sampler[int]):
    """Draws its order from python's stream, when the epoch begins."""

    def __iter__(self):
        order = list(range(N))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return N


class Buckets:
    """A batch sampler with batches of different lengths, an epoch of its own, and no batch_size."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(N).tolist()
        yield from (order[:3], order[3:4], order[4:9], order[9:13], order[13:])

    def __len__(self):
        return 5


class Stream(IterableDataset):
    """An iterable dataset that knows its position and not its length."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Forgetful(IterableDataset):
    """An iterable dataset without a state; with workers, each has its part."""

    def __iter__(self):
        worker = get_worker_info()
        yield from map(torch.tensor, range(N) if worker is None else range(worker.id, N, worker.num_workers))


class Measured(Forgetful):
    """One that knows its length."""

    def __len__(self):
        return N


class Shuffling(Forgetful):
    """One with a shuffle buffer, and augmentation: it draws from the global streams at every sample."""

    def __iter__(self):
        held = []
        for number in super().__iter__():
            held.append(torch.tensor([number, random.random(), float(torch.rand(()))]))
            if len(held) == 4:
                yield held.pop(random.randrange(4))
        random.shuffle(held)
        yield from held


class Remembered:
    """The iterator of the next."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Remembering(IterableDataset):
    """One whose iterator has the state, and not the dataset."""

    def __iter__(self):
        return Remembered()


class Shards(Forgetful):
    """One with a state, in workers."""

    def __init__(self, n=N):
        self.n = n
        self.at = 0

    def __iter__(self):
        for number in [i for i in super().__iter__() if i < self.n][self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Counting(Numbers):
    """A map-style dataset with a state: every sample says how many were read before it."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.tensor([index, len(self.read)])

    def state_dict(self):
        return {"read": list(self.read)}

    def load_state_dict(self, state):
        self.read = list(state["read"])


class Bookmark(Sampler[int]):
    """A sampler with a state."""

    def __init__(self):
        self.order, self.at = [], 0

    def __iter__(self):
        if not self.order:
            self.order = torch.randperm(N).tolist()
        while self.at < N:
            self.at += 1
            yield self.order[self.at - 1]
        self.order, self.at = [], 0

    def __len__(self):
        return N

    def state_dict(self):
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = list(state["order"]), state["at"]


class Pages:
    """Somebody's own loader: no DataLoader at all."""

    def __init__(self):
        self.page = 0

    def __iter__(self):
        while self.page < 5:
            self.page += 1
            yield [self.page, random.random()]
        self.page = 0

    def state_dict(self):
        return {"page": self.page}

    def load_state_dict(self, state):
        self.page = state["page"]


def generator():
    return torch.Generator().manual_seed(int(torch.initial_seed()) % 1000)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled, augmented": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "shuffled, drop_last": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=generator()),
    ),
    "replacement": lambda: DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True)),
    "python's stream": lambda: DataLoader(Numbers(), batch_size=4, sampler=PythonShuffle()),
    "distributed": lambda: DataLoader(
        Numbers(2 * N), batch_size=4, sampler=DistributedSampler(Numbers(2 * N), num_replicas=2, rank=1, seed=5)
    ),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
    "stateful, augmented": lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
    "stateful, own generator": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "stateful, in order": lambda: StatefulDataLoader(Numbers(), batch_size=4),
    "stateful stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "stateful, replacement": lambda: StatefulDataLoader(
        Numbers(),
        batch_size=4,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=generator()),
    ),
    "stateful, python's stream": lambda: StatefulDataLoader(Numbers(), batch_size=4, sampler=PythonShuffle()),
    "stateful, batch sampler": lambda: StatefulDataLoader(Numbers(), batch_sampler=Buckets()),
    "stateful, distributed": lambda: StatefulDataLoader(
        Numbers(2 * N), batch_size=4, sampler=StatefulDistributedSampler(Numbers(2 * N), num_replicas=2, rank=1, seed=5)
    ),
    "stateful, sampler with a state": lambda: StatefulDataLoader(Numbers(), batch_size=4, sampler=Bookmark()),
    "stateful, sampler with a state in torch's batches": lambda: StatefulDataLoader(
        Numbers(), batch_sampler=BatchSampler(Bookmark(), 4, drop_last=False)
    ),
    "stateful, dataset with a state": lambda: StatefulDataLoader(Counting(), batch_size=4, shuffle=True),
    "stateful, dataset and torch's sampler": lambda: StatefulDataLoader(
        Counting(), batch_size=4, sampler=SubsetRandomSampler(range(N))
    ),
    "stateful, dataset and batches in order": lambda: StatefulDataLoader(
        Counting(), batch_sampler=BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)
    ),
    "stateful, no batches": lambda: StatefulDataLoader(Numbers(), batch_size=None, shuffle=True),
    "stateful stream, no batches": lambda: StatefulDataLoader(Stream(), batch_size=None),
    "stateful stream, iterator with a state": lambda: StatefulDataLoader(Remembering(), batch_size=4),
    "stream without a state": lambda: StatefulDataLoader(Forgetful(), batch_size=4),
    "stream without a state, drop_last": lambda: StatefulDataLoader(Forgetful(), batch_size=4, drop_last=True),
    "stream without a state, no batches": lambda: StatefulDataLoader(Forgetful(), batch_size=None),
    "stream without a state, with a length": lambda: StatefulDataLoader(Measured(), batch_size=4),
    "stream without a state, shuffled": lambda: StatefulDataLoader(Shuffling(), batch_size=4),
    "stream without a state, own generator": lambda: StatefulDataLoader(
        Shuffling(), batch_size=4, generator=generator()
    ),
    "own class": Pages,
}
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


class Reader:
    """A live run that only reads; each batch also draws from the global streams, as a training step would."""

    def __init__(self, make, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global stream is the subject)
        self.loader = make()
        self.live = attach(torch.nn.Linear(1, 1), loader=self.loader)

    def read(self, until):
        seen = []
        for batch in self.live.batches(steps=until):
            seen.append((np.asarray(batch).tolist(), float(torch.rand(())), random.random()))
            self.live.advance(samples=None if isinstance(batch, list) or batch.dim() == 0 else len(batch))
        return seen


def check_resumes_everywhere(make, steps, chains):
    """Killed at each step of a chain, in one epoch or in several, a run reads what it would have read."""
    whole = Reader(make, 1).read(steps)
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
    check_resumes_everywhere(LOADERS[name], 11, [(k,) for k in range(11)])


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=8, deadline=None)
@example(kills=(1, 2, 3))
@example(kills=(1, 1, 2))
@example(kills=(2, 5, 9))
@example(kills=(3, 4, 8))
@given(kills=st.lists(st.integers(0, 10), min_size=2, max_size=3).map(lambda kills: tuple(sorted(kills))))
def test_it_comes_next_however_often_the_run_is_killed_in_an_epoch_and_over_epochs(name, kills):
    """G01, G03: a resumed run saves a position as good as the one that it was resumed from."""
    check_resumes_everywhere(LOADERS[name], 11, [kills])


@pytest.mark.parametrize("name", WORKERS)
def test_it_comes_next_from_worker_processes_too(name):
    """G01: workers have prefetched what was not trained on."""
    check_resumes_everywhere(WORKERS[name], 8, [(2,), (1, 2, 3), (2, 5, 7), (4, 6)])


@pytest.mark.parametrize("name", ["shuffled", "batch sampler"])
def test_no_skipped_sample_is_read(name):
    """G04: seeking does not materialise what is skipped."""
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
    """G04, P01: the order of the epoch that is resumed, not of epoch 0."""
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
    """G01: a break, for an evaluation, loses nothing and repeats only what was not trained on."""
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


def position(**changes):
    reader = Reader(LOADERS["shuffled"], 1)
    reader.read(2)
    state = reader.live.capture()
    return state.evolve(dataset=Opaque({**state.dataset.value, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 7, "batches": 2}, "7"),
        ({"samples": -4, "batches": -1}, ">= 0"),
        ({"samples": 12, "batches": 2}, "8 samples"),
        ({"samples": 16, "batches": 4}, "before the epoch's end"),
        ({"samples": 4.0}, "int"),
        ({"epoch": -1}, ">= 0"),
        ({"length": 15}, "length"),
        ({"order": None}, "order"),
        ({"generators": {"loader": 1}}, "generators"),
        ({"version": 3}, "version"),
        ({"kind": "stateful"}, "kind|'map'"),
    ],
)
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(changes, words):
    """G02, G13: non-multiple, negative, past the end, batches against samples, another dataset, another version."""
    state = position(**changes)
    reader = Reader(LOADERS["shuffled"], 3)
    reader.read(1)
    before = reader.live.progress
    with pytest.raises(RestoreRefused, match=words) as caught:
        reader.live.restore(state)
    assert all(isinstance(reason, DataPositionMismatch) for reason in caught.value.reasons)
    assert reader.live.progress == before


def test_another_batch_size_is_fine_where_the_position_divides_and_refused_where_not():
    """G12: the samples come in the same order, in other batches."""
    whole = list(chain(*(batch for batch, *_ in Reader(LOADERS["shuffled"], 1).read(4))))
    state = position()
    resumed = Reader(lambda: DataLoader(Numbers(), batch_size=2, shuffle=True), 5)
    resumed.live.restore(state)
    assert list(chain(*(batch for batch, *_ in resumed.read(2 + 3)))) == whole[8:]
    with pytest.raises(RestoreRefused, match="multiple of the batch size 3"):
        Reader(lambda: DataLoader(Numbers(), batch_size=3, shuffle=True), 5).live.restore(state)


class Shrunk(PythonShuffle):
    """A sampler that has fewer samples than it had."""

    def __iter__(self):
        return iter(range(6))


def test_a_sampler_that_ends_before_the_position_is_an_error_when_it_is_sought():
    """G04: fewer than expected raises, and does not go on with another epoch."""
    first = Reader(LOADERS["python's stream"], 1)
    first.read(2)
    state = copied(first.live.capture())
    resumed = Reader(lambda: DataLoader(Numbers(), batch_size=4, sampler=Shrunk()), 1)
    resumed.live.restore(state)
    with pytest.raises(DataPositionMismatch, match="between two batches"):
        next(resumed.live.batches())


@pytest.mark.parametrize("samples", [3, 5, 100])
def test_samples_that_are_not_those_of_the_batches_are_an_error(samples):
    """G02: batch and sample counts disagree."""
    reader = Reader(LOADERS["in order"], 1)
    next(reader.live.batches())
    with pytest.raises(DataPositionMismatch, match="whole batches"):
        reader.live.advance(samples=samples)
    reader.live.advance(samples=4)


def test_a_loop_over_the_loader_itself_is_noticed():
    """P03: a position that nobody follows is an error, not a silence."""
    loader = DataLoader(Numbers(), batch_size=4)
    live = attach(torch.nn.Linear(1, 1), loader=loader)
    next(iter(loader))
    with pytest.raises(DataPositionMismatch, match=r"live\.batches"):
        live.advance(samples=4)


@pytest.mark.parametrize("name", ["shuffled", "stateful"])
@pytest.mark.parametrize("samples", [None, 4])
def test_a_step_on_batches_that_did_not_come_from_the_run_is_noticed(name, samples):
    """P03: without samples too, and for a loader with a state of its own; nothing is counted."""
    reader = Reader(LOADERS[name], 1)
    next(iter(reader.loader))
    with pytest.raises(DataPositionMismatch, match=r"live\.batches"):
        reader.live.advance(samples=samples)
    assert reader.live.progress.step == 0


@pytest.mark.parametrize("name", ["shuffled", "stateful"])
def test_a_step_may_close_a_window_that_is_counted_already_or_take_no_sample_on_purpose(name):
    """A06: the batches of a window are those since the last step, not since the last call."""
    live = Reader(LOADERS[name], 1).live
    batches = live.batches()
    for _ in range(2):
        live.advance(samples=len(next(batches)), steps=0)
    assert live.advance().step == 1
    assert live.advance(samples=0).step == 2
    with pytest.raises(DataPositionMismatch, match=r"live\.batches"):
        live.advance()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_that_hands_out_batches_in_any_order_is_refused(kind):
    """G01: a number of samples is no position in it."""
    with pytest.raises(InvalidArgument, match="in_order=True"):
        attach(torch.nn.Linear(1, 1), loader=kind(Numbers(), batch_size=2, num_workers=1, in_order=False))
    attach(torch.nn.Linear(1, 1), loader=kind(Numbers(), batch_size=2, in_order=False))  # no worker, no other order


class Generating(DataLoader):
    """Starts its sampler when the first batch is asked for, not when the iterator is made."""

    def __iter__(self):
        yield from super().__iter__()


class Halving(DataLoader):
    """Makes two batches of one."""

    def __iter__(self):
        return (half for batch in list(super().__iter__()) for half in batch.chunk(2))


@pytest.mark.parametrize("kind", [Generating, Halving])
def test_a_loader_whose_iterator_is_not_that_of_a_dataloader_is_refused_by_name(kind):
    """G01: nobody could say which samples a batch of it has."""
    live = attach(torch.nn.Linear(1, 1), loader=kind(Numbers(), batch_size=4))
    with pytest.raises(InvalidArgument, match=kind.__name__):
        list(live.batches(epochs=1))


def test_persistent_workers_that_were_started_before_are_refused_with_what_to_do():
    """G01: they hold on to the order that they were started with."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
    live = attach(torch.nn.Linear(1, 1), loader=loader)
    next(iter(loader))
    with pytest.raises(InvalidArgument, match="persistent_workers"):
        next(live.batches())


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("loader", [DataLoader(Endless()), [1, 2, 3], 5])
def test_a_loader_whose_position_nobody_knows_is_refused(loader):
    with pytest.raises(InvalidArgument, match="position cannot be known"):
        attach(torch.nn.Linear(1, 1), loader=loader)


def test_batches_without_a_loader_are_refused():
    with pytest.raises(InvalidArgument, match="attached loader"):
        attach(torch.nn.Linear(1, 1)).batches()


@pytest.mark.parametrize("name", ["map", "stateful"])
def test_a_loader_without_batches_is_an_error_and_not_an_endless_loop(name):
    kind = DataLoader if name == "map" else StatefulDataLoader
    live = attach(torch.nn.Linear(1, 1), loader=kind(Numbers(3), batch_size=4, drop_last=True))
    with pytest.raises(InvalidArgument, match="at least one batch"):
        next(live.batches())


def test_capturing_before_the_first_batch_starts_no_worker_and_draws_nothing():
    """C14: a StatefulDataLoader makes its iterator when it is asked for its state."""
    reader = Reader(LOADERS["stateful"], 1)
    before = torch.get_rng_state()
    assert reader.live.capture().dataset.value["state"] is None
    assert torch.equal(before, torch.get_rng_state())
    assert reader.loader._iterator is None


class Untouchable(Sampler[int]):
    """A sampler that must not be started."""

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        return N


def test_attaching_starts_no_sampler():
    """C14: it may draw from a stream when it is started."""
    for batches in (Untouchable(), BatchSampler(Untouchable(), 4, drop_last=False)):
        attach(torch.nn.Linear(1, 1), loader=StatefulDataLoader(Numbers(), batch_sampler=batches))


@pytest.mark.parametrize("order", [RandomSampler(range(N)), PythonShuffle()])
def test_a_dataset_with_a_state_under_batches_of_a_sampler_without_one_is_refused(order):
    """G01: torchdata would draw another order at a resume, and a resume by index would lose the state."""
    loader = StatefulDataLoader(Counting(), batch_sampler=BatchSampler(order, 4, drop_last=False))
    with pytest.raises(InvalidArgument, match=rf"{type(order).__name__} without state_dict.*Counting"):
        attach(torch.nn.Linear(1, 1), loader=loader)


@pytest.mark.parametrize("stream", [Forgetful, Shards])
def test_workers_that_go_on_over_a_stream_are_refused(stream):
    """G01: what they have read ahead is in no state."""
    loader = StatefulDataLoader(stream(), batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(InvalidArgument, match="persistent_workers=False"):
        attach(torch.nn.Linear(1, 1), loader=loader)


def test_workers_that_go_on_with_a_dataset_and_a_sampler_with_a_state_are_refused():
    """G01: at the end of an epoch, what the sampler starts reads from the dataset."""
    loader = StatefulDataLoader(Counting(), batch_size=3, sampler=Bookmark(), num_workers=1, persistent_workers=True)
    with pytest.raises(InvalidArgument, match=r"a Bookmark and a Counting.*persistent_workers=False"):
        attach(torch.nn.Linear(1, 1), loader=loader)


class Moody(Forgetful):
    """Iterates over something else than it did."""

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        return iter(range(self.start, N))


@pytest.mark.parametrize(("start", "found"), [(1, "others"), (8, "2 batches")])
def test_a_stream_without_a_state_that_gives_other_samples_is_an_error_as_often_as_it_is_asked(start, found):
    """G01: no sample is lost or repeated in silence."""
    first = Reader(lambda: StatefulDataLoader(Moody(0), batch_size=4), 1)
    first.read(3)
    state = copied(first.live.capture())
    resumed = Reader(lambda: StatefulDataLoader(Moody(start), batch_size=4), 1)
    resumed.live.restore(state)
    for _ in range(2):
        with pytest.raises(DataPositionMismatch, match=found):
            next(resumed.live.batches())


def test_a_stream_that_lost_its_state_is_an_error():
    """G01: torchdata would skip, and count what it skipped twice."""
    first = Reader(LOADERS["stateful stream"], 1)
    first.read(2)
    state = copied(first.live.capture())
    resumed = Reader(LOADERS["stream without a state"], 1)
    resumed.live.restore(state)
    with pytest.raises(DataPositionMismatch, match="with a state"):
        next(resumed.live.batches())


@pytest.mark.parametrize("changes", [{"digest": 5}, {"order": None}, {"digest": None}])
def test_a_position_in_a_stream_without_a_state_that_is_not_whole_is_refused(changes):
    """G02."""
    reader = Reader(LOADERS["stream without a state"], 1)
    reader.read(2)
    state = reader.live.capture()
    with pytest.raises(RestoreRefused, match=r"state\.dataset"):
        reader.live.restore(state.evolve(dataset=Opaque({**state.dataset.value, **changes})))


def test_a_stream_without_a_state_draws_from_streams_of_its_own():
    """G01, H05: only so can it be drawn again without training again."""
    plain, shuffled = (
        [tail for _, *tail in Reader(LOADERS[name], 1).read(11)]
        for name in ("stream without a state", "stream without a state, shuffled")
    )
    assert plain == shuffled
    orders = [[batch for batch, *_ in Reader(LOADERS["stream without a state, shuffled"], k).read(8)] for k in (1, 2)]
    assert orders[0] != orders[1]
    assert orders[0][:4] != orders[0][4:]


@pytest.mark.parametrize("name", ["stateful", "stateful stream", "stream without a state"])
def test_a_restore_that_is_followed_by_another_leaves_nothing(name):
    """G01: torchdata keeps a state that it was given, when it is given none."""
    start = copied(Reader(LOADERS[name], 1).live.capture())
    whole = Reader(LOADERS[name], 1).read(3)
    moved = Reader(LOADERS[name], 1)
    moved.read(2)
    resumed = Reader(LOADERS[name], 5)
    resumed.live.restore(copied(moved.live.capture()))
    resumed.live.restore(start)
    assert resumed.read(3) == whole
