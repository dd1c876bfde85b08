"""Positions and loaders that are refused, and objects that attaching leaves unchanged."""

from itertools import chain

import pytest
import torch
from kit.adapters.live.positions_cases import (
    LOADERS,
    Bookmark,
    Counting,
    Forgetful,
    N,
    Numbers,
    PythonShuffle,
    Reader,
    Shards,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, RestoreRefused
from trainfold.core.state.state import Opaque

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
    pytest.mark.filterwarnings("ignore:(?s)1 attribute changes.*loader.dataset.read"),  # the log of these tests
]


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
    """A sampler with fewer samples than before."""

    def __iter__(self):
        return iter(range(6))


def test_a_sampler_that_ends_before_the_position_is_an_error_when_it_is_sought():
    """G04: fewer samples than expected raise an error; the loop does not continue with another epoch."""
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
    """P03: a position that is not advanced is an error; it is never ignored silently."""
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
    """G01: a number of samples does not define a position in it."""
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
    """G01: the samples in one of its batches are not known."""
    live = attach(torch.nn.Linear(1, 1), loader=kind(Numbers(), batch_size=4))
    with pytest.raises(InvalidArgument, match=kind.__name__):
        list(live.batches(epochs=1))


def test_persistent_workers_that_were_started_before_are_refused_with_what_to_do():
    """G01: they keep the order that they started with."""
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
    """G01: no state contains the batches that they have prefetched."""
    loader = StatefulDataLoader(stream(), batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(InvalidArgument, match="persistent_workers=False"):
        attach(torch.nn.Linear(1, 1), loader=loader)


def test_workers_that_go_on_with_a_dataset_and_a_sampler_with_a_state_are_refused():
    """G01: at the end of an epoch, the sampler's new iterator reads from the dataset."""
    loader = StatefulDataLoader(Counting(), batch_size=3, sampler=Bookmark(), num_workers=1, persistent_workers=True)
    with pytest.raises(InvalidArgument, match=r"a Bookmark and a Counting.*persistent_workers=False"):
        attach(torch.nn.Linear(1, 1), loader=loader)


class Moody(Forgetful):
    """Iterates over other samples than before."""

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
    """G01: torchdata would skip samples, and count the skipped ones twice."""
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
    """G01, H05: only then can it be drawn again without training again."""
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
    """G01: torchdata keeps an earlier state if it is given None later."""
    start = copied(Reader(LOADERS[name], 1).live.capture())
    whole = Reader(LOADERS[name], 1).read(3)
    moved = Reader(LOADERS[name], 1)
    moved.read(2)
    resumed = Reader(LOADERS[name], 5)
    resumed.live.restore(copied(moved.live.capture()))
    resumed.live.restore(start)
    assert resumed.read(3) == whole
