"""Where ranks have other numbers of batches, their epochs end together, and nothing is left out without a declaration."""

import logging

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainfold.adapters.batches.close_workers import close_workers
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.parallel.end_together import TakeTogether
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree, ResumeRefused
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.layout.parallelism import Coordinates
from trainfold.core.layout.world import World

pytestmark = [
    pytest.mark.slow(1),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]


class Stream:
    """A user's loader: it reads one share, knows how far it is, and not how long it is."""

    def __init__(self, samples):
        self.samples, self.at = samples, 0

    def __iter__(self):
        while self.at < len(self.samples):
            self.at += 1
            yield torch.tensor([self.samples[self.at - 1]])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Part(IterableDataset):
    """One share of a stream for torchdata's loader; with `says`, it has a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class PartWithLength(Part):
    def __len__(self):
        return len(self.samples)


class OneByOne:
    """A user's batch sampler; its length is what it says."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([[index] for index in range(self.count)])

    def __len__(self):
        return self.count


class Cut(OneByOne):
    """Batches of a size."""

    def __init__(self, length, size):
        super().__init__(-(-length // size))
        self.rows = [list(range(length))[at : at + size] for at in range(0, length, size)]

    def __iter__(self):
        return iter(self.rows)


LOADERS = {
    "map": lambda samples: DataLoader(samples, batch_size=1),
    "batch_sampler": lambda samples: DataLoader(samples, batch_sampler=OneByOne(len(samples))),
    "stream": Stream,
    "torchdata": lambda samples: StatefulDataLoader(Part(samples), batch_size=1),
    "torchdata_with_length": lambda samples: StatefulDataLoader(PartWithLength(samples), batch_size=1),
    "torchdata_map": lambda samples: StatefulDataLoader(samples, batch_size=1),
}


@attrs.frozen
class Read:
    """What a rank read: the samples of each epoch, and where it ended."""

    samples: list
    epoch: int
    step: int


BEGINNINGS = (
    "restore",
    "should_load",
    "step",
)  # the first call of the manager, in which the ranks compare their loaders


def begin(manager, live, beginning):
    if beginning == "restore":
        manager.restore(live)
    elif beginning == "should_load":
        assert not manager.should_load(live)


def read(store, ranks, make, lengths, *, epochs, upto=None, beginning="restore", **options):
    """Read with a manager on each rank, and save at the end."""
    loader = make([ranks.rank * 100 + index for index in range(lengths[ranks.rank])])
    live = attach(torch.nn.Flatten(), loader=loader, **options)
    with CheckpointManager(store, collectives=ranks, every=None) as manager:
        begin(manager, live, beginning)
        found = []
        for batch in live.batches(epochs=epochs, steps=upto):
            found.append(int(batch))
            live.advance(samples=1)
            manager.step(live)
        manager.save(live)
    return Read(found, live.progress.epoch, live.progress.step)


shares = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(
    lengths=shares,
    kind=st.sampled_from(sorted(LOADERS)),
    epochs=st.integers(1, 2),
    beginning=st.sampled_from(BEGINNINGS),
)
def test_epochs_end_on_all_ranks_together_or_every_rank_refuses(lengths, kind, epochs, beginning):
    """G08: whatever the lengths and the loader, also without a restore, no rank hangs, and no batch is left out without a declaration."""
    make, world, options = LOADERS[kind], len(lengths), {"epochs": epochs, "beginning": beginning}
    if len(set(lengths)) > 1:
        store = MemoryStore()
        outcomes = thread_outcomes(world, lambda ranks: read(store, ranks, make, lengths, **options))
        assert {type(each.error) for each in outcomes} == {RanksDisagree}
        assert len({str(each.error) for each in outcomes}) == 1
        assert {each.error.step for each in outcomes} <= {0, *range(min(lengths) + 1)}
        options["uneven"] = "drop"
        if beginning == "step" and min(lengths) == 1:
            return  # an epoch may have ended on one rank before the first boundary, which is refused too
    other = MemoryStore()
    for rank, each in enumerate(run_threads(world, lambda ranks: read(other, ranks, make, lengths, **options))):
        one = [rank * 100 + index for index in range(min(lengths))]
        assert each == Read(one * epochs, epochs, min(lengths) * epochs)


@settings(max_examples=30, deadline=None)
@given(lengths=shares, kind=st.sampled_from(sorted(LOADERS)), cut=st.integers(1, 7))
def test_a_run_that_drops_resumes_at_each_step_and_reads_what_it_would_have_read(lengths, kind, cut):
    """G01, G08: the position after the last common batch is the start of the next epoch, also where the loop never asked for the next batch."""
    make, world, epochs = LOADERS[kind], len(lengths), 2
    store, cut = MemoryStore(), min(cut, epochs * min(lengths))
    first = run_threads(world, lambda ranks: read(store, ranks, make, lengths, epochs=epochs, upto=cut, uneven="drop"))
    rest = run_threads(world, lambda ranks: read(store, ranks, make, lengths, epochs=epochs, uneven="drop"))
    for rank in range(world):
        one = [rank * 100 + index for index in range(min(lengths))]
        assert first[rank].samples + rest[rank].samples == one * epochs
        assert (rest[rank].epoch, rest[rank].step) == (epochs, epochs * min(lengths))


def test_what_is_left_out_is_counted_and_warned_of_once_a_run(caplog):
    """G08: "MIN-stop loses a batch" is a warning with the numbers of each rank."""
    store = MemoryStore()
    with caplog.at_level(logging.WARNING, logger="trainfold"):
        run_threads(3, lambda ranks: read(store, ranks, LOADERS["batch_sampler"], [3, 1, 3], epochs=3, uneven="drop"))
    (said,) = [each.getMessage() for each in caplog.records if "shortest share" in each.getMessage()]
    assert "2 batches (2 samples) on ranks 0, 2; nothing on rank 1" in said


def test_known_lengths_are_refused_before_the_first_batch_and_name_the_ranks():
    """G08: not after hours, at the end of the epoch."""
    store = MemoryStore()

    def work(ranks):
        live = attach(torch.nn.Flatten(), loader=DataLoader(range(8 + ranks.rank // 2), batch_size=1))
        with CheckpointManager(store, collectives=ranks, every=None) as manager:
            manager.restore(live)

    (text,) = {str(each.error) for each in thread_outcomes(3, work)}
    assert "found 8 on ranks 0, 1; 9 on rank 2;" in text
    assert "GlobalBatchSampler" in text
    assert 'uneven="drop"' in text


@attrs.frozen
class InPairs:
    ranks: Replicas

    @property
    def coordinates(self):
        here = self.ranks.coordinates.world
        return Coordinates(here, World(here.rank // 2, here.size // 2))

    def __getattr__(self, name):
        return getattr(self.ranks, name)


def own_samplers(share, shares, seed, **options):
    """Loaders of a share, with our sampler and with torch's."""
    data = range(8)
    ours = GlobalBatchSampler(data, 4, seed=seed, rank=share, replicas=shares, **options)
    torchs = DistributedSampler(data, num_replicas=shares, rank=share, seed=seed, **options)
    torchdatas = StatefulDistributedSampler(data, num_replicas=shares, rank=share, seed=seed, **options)
    return [
        DataLoader(data, batch_sampler=ours),
        DataLoader(data, sampler=torchs),
        StatefulDataLoader(data, sampler=torchdatas),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_shares_of_other_orders_are_refused_before_the_first_batch(kind):
    """G08, P08: a seed of each rank makes samples be read twice and others never, and nothing else would show it."""

    def told(make):
        store = MemoryStore()

        def work(ranks):
            live = attach(torch.nn.Flatten(), loader=make(ranks.rank)[kind])
            with CheckpointManager(store, collectives=ranks, every=None, at_end=False) as manager:
                manager.restore(live)

        found = {str(each.error) for each in thread_outcomes(4, work)}
        assert len(found) == 1
        return found.pop()

    assert told(lambda rank: own_samplers(rank, 4, seed=7)) == "None"
    assert told(lambda rank: own_samplers(rank // 2, 2, seed=7)) == "None", "pairs read the same share"
    assert told(lambda rank: own_samplers(0, 1, seed=rank)) == "None", "each rank has data of its own"
    assert told(lambda rank: own_samplers(rank, 4, seed=rank, shuffle=False)) == "None", "the seed means nothing"
    other = told(lambda rank: own_samplers(rank, 4, seed=rank // 3))
    assert "loader: expected one order of the samples" in other
    assert "seed=0, 4 shares on ranks 0, 1, 2; " in other
    assert "seed=1, 4 shares on rank 3; make the sampler with the same arguments on every rank" in other
    lost = told(lambda rank: own_samplers(min(rank, 2), 4, seed=7))
    assert "share 0 on rank 0; share 1 on rank 1; share 2 on ranks 2, 3; share 3 on none" in lost


@pytest.mark.parametrize("kind", range(3))
def test_ranks_that_hold_parts_of_one_model_must_read_the_same_share(kind):
    """G05: a sampler made without rank= takes the rank in the world; the parts of a tensor-parallel layer then train on sums of different samples."""

    def told(make):
        def work(ranks):
            pairs = InPairs(Replicas(ranks))
            live = attach(torch.nn.Flatten(), loader=make(ranks.rank)[kind], parallelism=pairs)
            with CheckpointManager(store, collectives=ranks, every=None, at_end=False) as manager:
                manager.restore(live)

        store = MemoryStore()
        ended = thread_outcomes(4, work)
        assert not any(isinstance(getattr(each.error, "__context__", None), ResumeRefused) for each in ended)
        (text,) = {str(each.error) for each in ended}
        return text

    assert told(lambda rank: own_samplers(rank // 2, 2, seed=7)) == "None"
    assert told(lambda rank: own_samplers(0, 1, seed=7)) == "None", "both replicas read everything, on purpose"
    text = told(lambda rank: own_samplers(rank, 4, seed=7))
    assert "loader: expected the same samples on all ranks that hold parts of one model" in text
    assert "found share 0 of 4 on rank 0; share 1 of 4 on rank 1;" in text
    assert "rank=mesh['dp'].get_local_rank()" in text


def test_equal_lengths_that_are_known_exchange_nothing_while_they_are_read():
    """G08: the lengths are compared once, at the restore."""
    store = MemoryStore()

    def work(ranks):
        loader = {
            "a": DataLoader(range(6), batch_size=2),
            "b": StatefulDataLoader(range(6), batch_size=2, shuffle=True),
        }
        live = attach(torch.nn.Flatten(), loader=loader)
        with CheckpointManager(store, collectives=ranks, every=None) as manager:
            manager.restore(live)
            before = len(ranks.schedule)
            for _ in zip(live.batches("a", epochs=2), live.batches("b", epochs=2), strict=True):
                live.advance()
            return len(ranks.schedule) - before, "duplicate" in {each.kind for each in ranks.schedule[:before]}

    assert run_threads(2, work) == [(0, False)] * 2


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(5, 8), min_size=2, max_size=3), kind=st.sampled_from(["map", "torchdata", "batch_sampler"]),
       size=st.integers(2, 4), how=st.sampled_from(["none", "own", "all"]), beginning=st.sampled_from(BEGINNINGS))  # fmt: skip
def test_samples_are_counted_over_all_shares_also_where_the_last_batches_differ(lengths, kind, size, how, beginning):
    """G02, P08, X07: a save refuses counts that differ between ranks, so the count is that of all of them."""
    store, batches = MemoryStore(), min(-(-length // size) for length in lengths)
    how = (
        "own" if beginning == "step" and how == "all" else how
    )  # before the first boundary only a process knows of others
    totals = [sum(min(size, length - index * size) for length in lengths) for index in range(batches)]

    def work(ranks):
        length = lengths[ranks.rank]
        loader = {
            "map": lambda: DataLoader(range(length), batch_size=size),
            "torchdata": lambda: StatefulDataLoader(Part(range(length)), batch_size=size),
            "batch_sampler": lambda: DataLoader(range(length), batch_sampler=Cut(length, size)),
        }[kind]()
        live = attach(torch.nn.Flatten(), loader=loader, uneven="drop", parallelism=Replicas(ranks))
        with CheckpointManager(store, collectives=ranks, every=1) as manager:
            begin(manager, live, beginning)
            for index, batch in enumerate(live.batches(epochs=1)):
                live.advance(samples={"none": None, "own": len(batch), "all": totals[index]}[how])
                manager.step(live)
        return live.progress.samples

    found = run_threads(len(lengths), work)
    assert found == [sum(totals)] * len(lengths)


def test_ranks_that_read_the_same_share_count_it_once():
    """G05: four ranks of which two share data have two shares."""
    store = MemoryStore()

    def work(ranks):
        pairs = InPairs(Replicas(ranks))
        loader = StatefulDataLoader(Part(range(5 - pairs.coordinates.data.rank)), batch_size=2)
        live = attach(torch.nn.Flatten(), loader=loader, parallelism=pairs, uneven="drop")
        with CheckpointManager(store, collectives=ranks, every=None) as manager:
            manager.restore(live)
            for _ in live.batches(epochs=1):
                live.advance()
            manager.save(live)
        return live.progress.samples

    assert run_threads(4, work) == [8] * 4


def test_two_loaders_take_their_batches_together_each_for_itself():
    """G08: the one that ends first ends the loop on every rank."""
    store = MemoryStore()

    def work(ranks):
        loader = {"a": Stream(range(5 - ranks.rank)), "b": Stream(range(3))}
        live = attach(torch.nn.Flatten(), loader=loader, uneven="drop")
        with CheckpointManager(store, collectives=ranks, every=None) as manager:
            manager.restore(live)
            seen = 0
            for _ in live.epochs(2):
                for _, _ in zip(live.batches("b"), live.batches("a"), strict=False):
                    seen += 1
                    live.advance(samples=1)
                for _ in live.batches("a"):
                    seen += 100
                    live.advance(samples=1)
            return seen

    assert run_threads(2, work) == [206, 206]


def test_a_rank_that_fails_to_draw_fails_all_of_them_at_once():
    """R09: the others do not wait for its batch until a deadline."""

    def failing(samples):
        yield from samples[:1]
        raise OSError("the disk is gone")

    class Failing(Stream):
        def __iter__(self):
            return failing([torch.tensor([0])]) if self.samples[0] >= 100 else super().__iter__()

    store = MemoryStore()
    outcomes = thread_outcomes(2, lambda ranks: read(store, ranks, Failing, [4, 4], epochs=1))
    assert isinstance(outcomes[1].error, OSError)
    assert isinstance(outcomes[0].error, RankFailed)
    assert "the disk is gone" in str(outcomes[0].error)
    assert (outcomes[0].error.step, outcomes[0].error.rank) == (1, 1)


def test_an_epoch_that_has_ended_on_one_rank_before_the_first_boundary_is_refused_with_a_restore_as_the_fix():
    """G08: without a restore the loaders are compared at the first boundary, when a rank may have begun its next epoch."""
    store = MemoryStore()
    outcomes = thread_outcomes(
        2, lambda ranks: read(store, ranks, LOADERS["map"], [1, 3], epochs=2, beginning="step", uneven="drop")
    )
    (text,) = {str(each.error) for each in outcomes}
    assert "found epoch 1 on rank 0; epoch 0 on rank 1; call manager.restore(live) before the loop" in text
    assert {each.error.step for each in outcomes} == {1}


def test_a_rank_without_a_batch_is_an_error_on_every_rank_also_where_a_rest_is_dropped():
    """G08: else each epoch would drop everything, for ever."""
    store = MemoryStore()
    outcomes = thread_outcomes(2, lambda ranks: read(store, ranks, Stream, [3, 0], epochs=2, uneven="drop"))
    assert isinstance(outcomes[1].error, InvalidArgument)
    assert isinstance(outcomes[0].error, RankFailed)


def test_ranks_that_declare_it_otherwise_or_do_not_read_are_told_apart():
    """G08: a declaration is of the run; a stage of a pipeline without a loader takes part in nothing."""
    store = MemoryStore()

    def work(ranks, make, **options):
        live = attach(torch.nn.Flatten(), loader=make(ranks), **options)
        with CheckpointManager(store, collectives=ranks, every=None, components=["model"]) as manager:
            manager.restore(live)
            return [int(each) for each in live.batches(epochs=1)] if make(ranks) is not None else None

    def declared(ranks):
        return work(ranks, lambda _: Stream([1]), uneven="drop" if ranks.rank else "refuse")

    assert {type(each.error) for each in thread_outcomes(2, declared)} == {RanksDisagree}
    one = run_threads(2, lambda ranks: work(ranks, lambda ranks: None if ranks.rank else Stream([1, 2])))
    assert one == [[1, 2], None]
    with pytest.raises(InvalidArgument, match=r"attach\.uneven"):
        attach(torch.nn.Flatten(), uneven="join")


class Noise(Dataset):
    """Draws in its worker."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.rand(())


class BesideShorter:
    """The other rank is one whose epochs have 3 batches."""

    rank, world_size, asked = 0, 2, 0

    def start_gather(self, numbers, *, doing):
        self.asked += 1
        theirs = 1 if self.asked % 3 == 0 else 2
        return Rows([tuple(numbers), (theirs, 2)])

    def gather(self, value, *, doing):
        return [value, [0, 0]]


@attrs.frozen
class Rows:
    rows: list

    def wait(self):
        return self.rows


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_persistent_workers_continue_after_what_was_left_out(loader):
    """G01, G08: a worker that lives on has drawn the rest too, and its streams are after it at a resume."""
    loaders = []

    def made():
        torch.manual_seed(0)
        loaders.append(loader(Noise(), batch_size=1, num_workers=1, persistent_workers=True))
        live = attach(torch.nn.Flatten(), loader=loaders[-1])
        live._data.feed.take = TakeTogether(BesideShorter(), "", [0, 1], live._counters, drops=True)
        return live

    def numbers(live, steps):
        found = []
        for batch in live.batches(epochs=3, steps=steps):
            found.append(float(batch))
            live.advance()
        close_workers(loaders[-1]._iterator)  # a collection that ends them waits 5 s for each
        return found

    whole = numbers(made(), None)
    assert len(whole) == len(set(whole)) == 9
    for cut in (3, 4):
        live = made()
        first = numbers(live, cut)
        state, live = live.capture(), made()
        live._data.feed.take._ranks.asked = cut
        live.restore(state)
        assert first + numbers(live, None) == whole


def train(collectives, folder, lengths, uneven):
    """A loop with DistributedDataParallel, which waits in its backward for every rank."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = Stream([float(index) for index in range(lengths[collectives.rank])])
    live = attach(model, optimizer, loader=stream, uneven=uneven)
    with CheckpointManager(folder, collectives=collectives, every=2) as manager:
        manager.restore(live)
        for batch in live.batches(epochs=2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=1)
            manager.step(live)
        manager.finish(live)
    return live.progress.epoch, live.progress.step


def both(collectives, folder):
    dropped = train(collectives, f"{folder}/drop", [5, 3], "drop")
    try:
        train(collectives, f"{folder}/refuse", [5, 3], "refuse")
    except RanksDisagree as error:
        return dropped, str(error)
    return dropped, None


def test_ddp_over_streams_of_unequal_length_does_not_hang(processes, tmp_path):
    """G08: two real ranks; before, the longer one waited in its all-reduce for the other until the timeout of the process group."""
    ended = processes.run(2, both, str(tmp_path), collectives=PATIENT)
    assert [each[0] for each in ended] == [(2, 6)] * 2
    (text,) = {each[1] for each in ended}
    assert "more batches on rank 0; none left on rank 1" in text
