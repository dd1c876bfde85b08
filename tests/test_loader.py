"""Loaders: the next sample after a resume is the one that would have come next."""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainfold.adapters.live import attach
from trainfold.adapters.part import copied
from trainfold.core.errors import DataPositionMismatch, IncompleteWindow, InvalidArgument, InvalidState, RestoreRefused
from trainfold.core.state import Opaque
from trainfold.core.structure import describe

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
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
    "own class": Pages,
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


def check_resumes_everywhere(make, steps, at):
    whole = Reader(make, 1).read(steps)
    for k in at:
        first = Reader(make, 1)
        assert first.read(k) == whole[:k]
        state = copied(first.live.capture())
        resumed = Reader(make, 99 + k)
        resumed.live.restore(state)
        assert resumed.live.progress == first.live.progress
        again = resumed.live.capture()
        describe(again.dataset, "dataset")  # it can be saved
        assert resumed.read(steps) == whole[k:], k


@pytest.mark.parametrize("name", LOADERS)
def test_the_next_batch_is_the_one_that_would_have_come_next(name):
    """G01, G03, G04: in the middle of an epoch, at its end, and in later epochs; the random streams too."""
    check_resumes_everywhere(LOADERS[name], 11, range(11))


@pytest.mark.parametrize("name", WORKERS)
def test_it_comes_next_from_worker_processes_too(name):
    """G01: workers have prefetched what was not trained on."""
    check_resumes_everywhere(WORKERS[name], 8, (2, 5))


@pytest.mark.parametrize("name", ["shuffled", "batch sampler"])
def test_no_skipped_sample_is_read(name):
    """G04: seeking does not materialise what is skipped."""
    first = Reader(LOADERS[name], 1)
    first.read(3)
    state = copied(first.live.capture())
    resumed = Reader(LOADERS[name], 2)
    resumed.live.restore(state)
    resumed.read(4)
    assert resumed.loader.dataset.read == first_after(LOADERS[name], 3, 4)


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
        ({"version": 2}, "version"),
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
