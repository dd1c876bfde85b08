"""The random streams of loader workers are part of the data position, and attaching changes no draw."""

import itertools
import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.depth import IS_DEEP
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.adapters.streams.stream_reader import StreamReader, set_streams
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, RestoreRefused
from trainfold.core.format.structure.describe import describe
from trainfold.core.state.state import Opaque

N = 13
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]


class Augmented(Dataset):
    """Draws from python, numpy (with its hidden second normal) and torch, and returns which worker drew."""

    def __init__(self, *streams):
        self.streams = streams
        self.seen = None

    def __len__(self):
        return N

    def __getitem__(self, index):
        found = [float(index), -1.0 if (info := get_worker_info()) is None else info.id]
        if "python" in self.streams:
            found.append(random.gauss(0, 1))
        if "numpy" in self.streams:
            found.append(np.random.standard_normal())  # noqa: NPY002 (the global stream is the subject)
        if "torch" in self.streams:
            found.append(float(torch.rand(())))
        if "seed" in self.streams:
            found.append(float(get_worker_info().seed % 10**9 if get_worker_info() else 0))
        return torch.tensor(found, dtype=torch.float64)


class WholeBatches(Augmented):
    """Reads a batch at once, and would not survive an empty one."""

    def __getitems__(self, indices):
        assert len(indices) > 0
        return [self[index] for index in indices]


class Sometimes(Augmented):
    """Draws only for some samples, so that a worker's streams move in some batches only."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return found if index % 3 else found + random.random()


def noisy_collate(samples):
    return default_collate(samples) + random.random()


def seeded_init(worker):
    """What a tutorial recommends; it reads the worker's seed and the dataset."""
    info = get_worker_info()
    assert type(info.dataset).__name__ in ("Augmented", "WholeBatches", "Sometimes")
    np.random.seed((torch.initial_seed() + worker) % 2**32)  # noqa: NPY002
    random.random()


LOADERS: dict[str, Any] = {
    "all streams": partial(DataLoader, Augmented("python", "numpy", "torch"), batch_size=2, shuffle=True),
    "torch": partial(DataLoader, Augmented("torch"), batch_size=2),
    "the worker's seed, and nothing drawn": partial(DataLoader, Augmented("seed"), batch_size=2, shuffle=True),
    "init": partial(DataLoader, Augmented("numpy", "seed"), batch_size=3, shuffle=True, worker_init_fn=seeded_init),
    "collate": partial(DataLoader, Augmented(), batch_size=3, shuffle=True, collate_fn=noisy_collate),
    "no batches": partial(DataLoader, Augmented("numpy", "torch"), batch_size=None, shuffle=True),
    "whole batches": partial(DataLoader, WholeBatches("torch"), batch_size=2, shuffle=True, worker_init_fn=seeded_init),
    "drop_last": partial(DataLoader, Sometimes("python"), batch_size=2, shuffle=True, drop_last=True),
}
MADE: dict[str, Any] = {
    "batch sampler": lambda **kw: DataLoader(
        Augmented("numpy"), batch_sampler=BatchSampler(RandomSampler(range(N)), 3, drop_last=False), **kw
    ),
    "sampler": lambda **kw: DataLoader(Augmented("torch"), batch_size=2, sampler=SequentialSampler(range(N)), **kw),
    "generator": lambda **kw: DataLoader(
        Augmented("torch", "seed"), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7), **kw
    ),
}
LOADERS |= MADE


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def training():
    """What a step draws from the main process's streams."""
    return float(torch.rand(())), random.random(), np.random.standard_normal()  # noqa: NPY002


def plain_loop(make, epochs):
    seed_all(1)
    loader = make()
    return [(batch.tolist(), training()) for _ in range(epochs) for batch in loader]


class Run:
    def __init__(self, make, seed=1):
        model = torch.nn.Linear(1, 1)
        seed_all(seed)
        self.live = attach(model, loader=make())

    def read(self, until):
        seen = []
        for batch in self.live.batches(steps=until):
            seen.append((batch.tolist(), training()))
            self.live.advance()
        return seen

    def resumed(self, make, seed=99):
        state = copied(self.live.capture())
        describe(state.dataset, "dataset")  # it can be saved
        other = Run(make, seed)
        other.live.restore(state)
        return other


def check(make, *, epochs=2, chains):
    whole = plain_loop(make, epochs)
    assert Run(make).read(len(whole)) == whole, "attaching has changed a draw"
    for chain in chains:
        run, seen = Run(make), []
        for kill in chain:
            seen += run.read(min(kill, len(whole)))
            run = run.resumed(make)
        seen += run.read(len(whole))
        assert seen == whole, chain


SELDOM = {"torch", "the worker's seed, and nothing drawn", "no batches", "drop_last", "sampler"}


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(each, count, marks=[pytest.mark.long] * (count > 0 and each in SELDOM))
        for each in LOADERS
        for count in (0, 2)
    ],
)
def test_a_resume_at_every_batch_gives_the_samples_of_the_plain_loop(name, workers):
    """W01: with the same worker ids, inside an epoch, at its end, and in the next one; attaching changes no draw."""
    make = partial(LOADERS[name], num_workers=workers)
    length = len(make())
    if workers and not IS_DEEP:
        check(make, chains=[(1, length, length + 2)])
    else:
        check(make, chains=[(kill,) for kill in range(1, 2 * length)] + [(1, length + 2)])


SHAPES = st.fixed_dictionaries(
    {
        "num_workers": st.integers(1, 4),
        "prefetch_factor": st.integers(1, 4),
        "persistent_workers": st.booleans(),
    }
)


@settings(max_examples=6 if IS_DEEP else 2, deadline=None)
@example(
    shape={"num_workers": 3, "prefetch_factor": 2, "persistent_workers": True}, name="all streams", kills=(1, 7, 9)
)
@example(shape={"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True}, name="init", kills=(5, 6))
@given(
    shape=SHAPES,
    name=st.sampled_from(sorted(LOADERS)),
    kills=st.lists(st.integers(1, 12), min_size=1, max_size=2).map(lambda kills: tuple(sorted(kills))),
)
def test_workers_of_any_shape_are_resumed_exactly(shape, name, kills):
    """W01: 1 to 4 workers that prefetch 1 to 4 batches, persistent or not."""
    check(partial(LOADERS[name], **shape), epochs=2, chains=[kills])


@pytest.mark.slow(2)
def test_workers_that_are_spawned_are_resumed_exactly():
    """W01: everything sent to a worker can be pickled, and the bits are those of forked workers."""
    make = partial(LOADERS["whole batches"], num_workers=1, persistent_workers=True)
    whole, spawned = plain_loop(make, 1), partial(make, multiprocessing_context="spawn")
    run = Run(make)
    seen = run.read(2)
    run = run.resumed(spawned)
    seen += run.read(4)
    assert seen + run.resumed(make).read(len(whole)) == whole


def test_pinned_batches_keep_their_report():
    """W01: pinning turns a tuple into a list, and goes into mappings."""
    from torch.utils.data._utils.pin_memory import pin_memory

    from trainfold.adapters.batches.worker_trace import Report

    report = Report(1, {"torch": np.zeros(3, np.uint8)}, "xxh3:0")
    batch, kept = pin_memory(("text", report))
    assert (batch, kept) == ("text", report)
    assert kept is report


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (0, 2)])
def test_another_number_of_workers_is_refused_where_a_stream_has_moved(before, after):
    """W02: it is allowed if no stream has moved, and at the end of an epoch."""
    for name, kills in (("torch", (3, 7)), ("sampler", ())):
        make = LOADERS[name]
        for kill in kills:
            run = Run(partial(make, num_workers=before))
            run.read(kill)
            with pytest.raises(RestoreRefused, match=rf"num_workers.*{before} workers, whose random streams"):
                run.resumed(partial(make, num_workers=after))
            state = copied(run.live.capture())
            other = Run(partial(make, num_workers=after))
            other.live.restore(state, policy={"num_workers": "warn"})
            assert [batch[0][0] for batch, _ in other.read(8)] == [2.0 * (i % 7) for i in range(kill, 8)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 0), (0, 2)])
def test_another_number_of_workers_is_no_matter_where_nothing_is_drawn(before, after):
    """W02."""
    make = partial(DataLoader, Plain(), batch_size=2, shuffle=True)
    whole = plain_loop(partial(make, num_workers=before), 2)
    for kill in (3, 7, 9):
        run = Run(partial(make, num_workers=before))
        seen = run.read(kill)
        assert seen + run.resumed(partial(make, num_workers=after)).read(len(whole)) == whole


class Plain(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor(index)


def test_workers_that_live_on_are_another_loop_than_workers_that_do_not():
    """W02: a plain loop draws a seed for new workers in each epoch, and so other orders."""
    run = Run(partial(LOADERS["torch"], num_workers=1))
    run.read(3)
    with pytest.raises(RestoreRefused, match="1 worker, persistent"):
        run.resumed(partial(LOADERS["torch"], num_workers=1, persistent_workers=True))


def test_a_position_without_workers_streams_is_refused_inside_an_epoch_and_taken_at_its_end():
    """V09, G13: version 1 has no streams. At an epoch's end the workers are seeded again, so no streams are needed."""
    make = partial(LOADERS["torch"], num_workers=2)
    whole = plain_loop(make, 2)
    for kill, fits in ((3, False), (7, True)):
        run = Run(make)
        seen = run.read(kill)
        state = copied(run.live.capture())
        new = ("draws", "later", "later_born", "again")
        old = {name: value for name, value in state.dataset.value.items() if name not in new}
        state = state.evolve(dataset=Opaque({**old, "version": 1}))
        other = Run(make, 5)
        if fits:
            other.live.restore(state)
            assert seen + other.read(len(whole)) == whole
        else:
            with pytest.raises(RestoreRefused, match="random streams of 2 workers"):
                other.live.restore(state)
            other.live.restore(state, policy={"num_workers": "adapt"})


def test_batches_that_were_drawn_ahead_and_thrown_away_leave_no_trace():
    """W01: a loop that leaves an epoch and returns gets the batches that it would have got without the break."""
    make = partial(LOADERS["torch"], num_workers=2, prefetch_factor=3)
    whole = [batch for batch, _ in plain_loop(make, 1)]
    for persistent in (False, True):
        run = Run(partial(make, persistent_workers=persistent))
        seen = [batch for batch, _ in run.read(3)]
        next(run.live.batches())
        seen += [batch for batch, _ in run.read(7)]
        assert seen == whole


def test_a_worker_that_has_its_own_dataset_is_that_of_the_user():
    """W01: code in a worker sees the user's dataset, whatever wraps it."""
    make = partial(LOADERS["no batches"], num_workers=1, worker_init_fn=seeded_init)
    assert len(Run(make).read(3)) == 3


class Late(Sampler[int]):
    """Draws each index when the loader asks for it, with or without replacement."""

    def __init__(self, *, puts_back):
        self.puts_back = puts_back

    def __len__(self):
        return N

    def __iter__(self):
        pool = list(range(N))
        for _ in range(N):
            yield random.randrange(N) if self.puts_back else pool.pop(random.randrange(len(pool)))


class LateStateful(Late):
    """The same for a loader with a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("puts_back", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_from_a_global_stream_as_it_goes_is_refused_inside_an_epoch(puts_back, workers, caplog):
    """W01, G01: a warning appears once, at detection; at an epoch's end the resume is exact."""
    make = partial(DataLoader, Plain(), batch_size=2, num_workers=workers)
    make = partial(lambda make: make(sampler=Late(puts_back=puts_back)), make)
    whole = plain_loop(make, 2)
    run = Run(make)
    run.read(3)
    with pytest.raises(RestoreRefused, match=r"state\.dataset\.late.*global random streams of python"):
        run.resumed(make)
    assert caplog.text.count("Late draws from the global random streams of python") == 1
    run = Run(make)
    seen = run.read(7)
    assert seen + run.resumed(make).read(len(whole)) == whole


def test_a_sampler_that_draws_as_it_goes_is_exact_where_nothing_else_draws():
    """G01: without workers, and from a stream that neither the training nor the dataset moves."""

    def make():
        return DataLoader(Augmented("torch"), batch_size=2, sampler=Late(puts_back=False))

    def read(live, until):
        return [(batch.tolist(), float(torch.rand(()))) for batch in live.batches(steps=until) if live.advance()]

    whole = read(Run(make).live, 14)
    for chain in ((1, 2, 3), (4, 9), (7,)):
        run, seen = Run(make), []
        for kill in chain:
            seen += read(run.live, kill)
            run = run.resumed(make)
        assert seen + read(run.live, 14) == whole


def test_a_sampler_with_a_state_that_draws_as_it_goes_is_refused_with_workers():
    """W01: its draws for batches that were not trained on would be repeated with other values."""
    make = partial(StatefulDataLoader, Plain(), batch_size=2, num_workers=1, sampler=LateStateful(puts_back=True))
    run = Run(make)
    run.read(3)
    with pytest.raises(RestoreRefused, match=r"state\.dataset\.late"):
        run.resumed(make)


class Mapping(DataLoader):
    """Changes batches as they come from the workers."""

    def __iter__(self):
        return map(torch.neg, super().__iter__())


def test_a_loader_that_changes_what_its_workers_made_is_refused_by_name():
    """W01: trainfold cannot know whose report the change would affect."""
    with pytest.raises(InvalidArgument, match=r"Mapping.*num_workers=0"):
        Run(partial(Mapping, Plain(), num_workers=1)).read(1)
    assert len(Run(partial(Mapping, Plain())).read(2)) == 2


def hostile(name, value):
    run = Run(partial(LOADERS["torch"], num_workers=2))
    run.read(3)
    state = copied(run.live.capture())
    draws = {**state.dataset.value["draws"], name: value}
    return state.evolve(dataset=Opaque({**state.dataset.value, "draws": draws}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", -1),
        ("count", 3),
        ("next", 2),
        ("next", True),
        ("streams", [{}]),
        ("streams", [{"torch": torch.zeros(3)}, {}]),
        ("streams", [{"oboe": 1}, {}]),
        ("streams", [5, {}]),
        ("born", {"streams": {}}),
        ("lasts", [{"digest": 1, "samples": 2, "before": {}}]),
        ("lasts", [{"digest": "x", "samples": 2, "before": 5}]),
        ("lasts", [{"digest": "x", "samples": 2, "before": {}}] * 3),
        ("lasts", 5),
    ],
)
def test_a_record_of_workers_that_cannot_be_is_refused(name, value):
    """G02, W01: checked before anything changes."""
    with pytest.raises(RestoreRefused, match=r"state\.dataset\.draws"):
        Run(partial(LOADERS["torch"], num_workers=2)).live.restore(hostile(name, value))


DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(3),
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy's normal": np.random.standard_normal,
    "numpy, a whole block": lambda: np.random.random(312),  # noqa: NPY002
    "python, a whole block": lambda: [random.random() for _ in range(312)],
    "nothing": lambda: None,
}


@settings(deadline=None)
@given(draws=st.lists(st.sampled_from(sorted(DRAWS)), max_size=12), is_known=st.booleans())
def test_a_reader_finds_exactly_the_streams_that_moved(draws, is_known):
    """W01: including the second number of a pair of normal ones, which changes no bit of the generator.

    This holds also if the place of python's stream in the interpreter is not known.
    """
    reader = StreamReader()
    assert reader._place is not None or sys.implementation.name != "cpython"
    if not is_known:
        reader._place = None
        reader.moved()
    for name in draws:
        found = reader.moved()
        DRAWS[name]()
        found = reader.moved()
        assert list(found) == ([] if name == "nothing" else [name.split("'")[0].split(",")[0]])
    streams = reader.streams
    one = [DRAWS[name]() for name in ("torch", "python's normal", "numpy's normal", "numpy", "python")]
    set_streams(streams)
    again = [DRAWS[name]() for name in ("torch", "python's normal", "numpy's normal", "numpy", "python")]
    assert all(
        itertools.starmap(
            lambda x, y: torch.equal(torch.as_tensor(x), torch.as_tensor(y)), zip(one, again, strict=True)
        )
    )


class Stream(IterableDataset):
    """A stream of which each worker reads a part; it keeps its position, and draws."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        while self.at < N:
            self.at += 1
            yield torch.tensor([self.at, info.id, random.random(), float(torch.rand(()))], dtype=torch.float64)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OwnGenerator(Augmented):
    """As numpy's documentation recommends: each worker makes its own generator."""

    rng = None

    def __getitem__(self, index):
        return torch.tensor([float(index), float(self.rng.normal())], dtype=torch.float64)


def own_generator(worker):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_generator_that_each_worker_makes_for_itself_is_exact_or_refused(kind):
    """W03: the last batch of every worker is drawn again, not only that of one worker."""
    make = partial(kind, OwnGenerator(), batch_size=2, shuffle=True, num_workers=2, worker_init_fn=own_generator)
    whole, found = plain_loop(make, 1), []
    for cut in (1, 2, 3, 5):
        run = Run(make)
        seen = run.read(cut)
        other = run.resumed(make)
        try:
            if cut == 1:  # and once more, when each worker has drawn one batch
                seen += other.read(2)
                other = other.resumed(make)
            seen += other.read(len(whole))
        except DataPositionMismatch:
            found.append("refused")
        else:
            found.append("exact" if seen == whole else "another run")
    assert found == ["exact", "exact", "refused", "refused"]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_last_batch_of_each_worker_is_drawn_again(kind):
    """W03: other data are detected in every worker, and the probe's draws leave no trace in its streams."""
    seed_all(1)
    make = partial(kind, batch_size=2, shuffle=True, num_workers=2)
    run = Run(partial(make, Augmented()))
    run.read(3)
    state = copied(run.live.capture())
    assert len(state.dataset.value["draws"]["lasts"]) == 2
    rests = []
    for policy in ("warn", "adapt"):  # the new data draw random numbers, and the old data did not
        other = Run(partial(make, Augmented("torch", "python", "numpy")), 5)
        other.live.restore(state, policy={"data_probe": policy})
        rests.append(other.read(7))
    assert rests[0] == rests[1]


STATEFUL: dict[str, Any] = {
    "shuffled": partial(StatefulDataLoader, Augmented("python", "numpy", "torch"), batch_size=2, shuffle=True),
    "init": partial(StatefulDataLoader, Augmented("numpy", "seed"), batch_size=3, worker_init_fn=seeded_init),
    "collate": partial(StatefulDataLoader, Augmented(), batch_size=3, shuffle=True, collate_fn=noisy_collate),
    "stream": partial(StatefulDataLoader, Stream(), batch_size=3),
    "no batches": partial(StatefulDataLoader, Augmented("torch"), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize(
    ("name", "persistent"),
    [("shuffled", True), ("init", False), ("collate", True), ("stream", False), ("no batches", False)],
)
def test_a_loader_with_a_state_of_its_own_is_resumed_with_its_workers_streams(name, persistent):
    """W01: torchdata's state holds the position of the samples, but not the streams."""
    make = partial(STATEFUL[name], num_workers=2, persistent_workers=persistent)
    check(make, epochs=1 + persistent, chains=[(1, 9)] if persistent else [(2,)])


def test_a_loader_with_a_state_of_its_own_is_refused_with_another_number_of_workers():
    """W02: torchdata alone would fail with a bare assert."""
    run = Run(partial(STATEFUL["shuffled"], num_workers=2))
    run.read(3)
    with pytest.raises(RestoreRefused, match=r"draws\.num_workers"):
        run.resumed(partial(STATEFUL["shuffled"], num_workers=0))


def test_a_state_from_some_batches_before_is_refused_where_a_stream_has_moved():
    """W01: torchdata draws those batches again, with the current streams."""
    make = partial(STATEFUL["shuffled"], num_workers=2, snapshot_every_n_steps=3)
    run = Run(make)
    run.read(2)
    with pytest.raises(RestoreRefused, match="snapshot_every_n_steps=1"):
        run.resumed(make)
