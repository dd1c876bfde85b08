"""Loops whose loaders run ahead: prefetchers, several loaders, positions of other loaders."""

import gc
import itertools
import random
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kit.adapters.live.loops_cases import N, Noisy, Run, check, die, event, loader, seed_all
from kit.depth import IS_DEEP
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import (
    CaptureRefused,
    DataPositionMismatch,
    IncompleteWindow,
    InvalidArgument,
    RestoreRefused,
)

pytestmark = [
    pytest.mark.slow(0.15),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]


class Shards(IterableDataset):
    """A stream with a state, a part of it in each worker."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        share, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < N:
            self.at += 1
            if self.at % workers == share:
                yield torch.tensor([self.at, random.random()], dtype=torch.float64)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Forgetful(IterableDataset):
    """A stream without a state."""

    def __iter__(self):
        return (torch.tensor([float(index)]) for index in range(N))


PREFETCHED = {
    "map": loader,
    "map, workers": partial(loader, num_workers=2),
    "sampler": lambda: loader(sampler=RandomSampler(range(N)), shuffle=False, batch_size=4),
    "stateful": lambda: StatefulDataLoader(Noisy(), batch_size=3, shuffle=True),
    "stateful, generator": lambda: StatefulDataLoader(
        Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "stateful, workers": lambda: StatefulDataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2),
    "stream": lambda: StatefulDataLoader(Shards(), batch_size=3),
    "stream, workers": lambda: StatefulDataLoader(Shards(), batch_size=3, num_workers=2),
}


@pytest.mark.parametrize("name", PREFETCHED)
def test_a_prefetcher_that_is_one_batch_ahead_is_resumed_at_every_step(name):
    """W04: the waiting batch is given again, with its original draws, also across the end of an epoch."""

    def plain(data, events):
        for batch in ahead(batch for _ in range(2) for batch in data):
            events.append(event(batch))

    def loop(run):
        for batch in ahead(run.live.batches(epochs=2)):
            die(run, run.step(batch, samples=len(batch)))

    check(PREFETCHED[name], loop, plain, kills=None if "workers" not in name else [4, 6] if IS_DEEP else [4])


def test_a_prefetcher_over_a_stream_without_a_state_is_resumed_as_the_run_goes_on():
    """W04: it draws from its own streams, and is compared from the start of the epoch."""

    def loop(run):
        for batch in ahead(run.live.batches(epochs=2)):
            die(run, run.step(batch, samples=len(batch)))

    make = partial(StatefulDataLoader, Forgetful(), batch_size=3)
    run = Run(make)
    loop(run)
    check(make, loop, lambda _, events: events.extend(run.events))


def test_the_end_of_a_stream_that_a_prefetcher_has_seen_is_not_drawn_twice():
    """W04: a stream draws for samples that drop_last discards, and the loop sees its end two batches early."""

    def two_ahead(batches):
        waiting = []
        for batch in batches:
            waiting.append(batch)
            if len(waiting) > 2:
                yield waiting.pop(0)
        yield from waiting

    def plain(data, events):
        for batch in two_ahead(batch for _ in range(2) for batch in data):
            events.append(event(batch))

    def loop(run):
        for batch in two_ahead(run.live.batches(epochs=2)):
            die(run, run.step(batch, samples=len(batch)))

    check(lambda: StatefulDataLoader(Shards(), batch_size=3, drop_last=True), loop, plain)


def test_a_batch_that_waits_and_cannot_be_given_once_more_is_refused_at_a_save():
    """A06, W04: a step on no data, while a batch waits; a loader with a state was not asked for it before that batch."""
    live = Run(lambda: StatefulDataLoader(Noisy(), batch_size=3)).live
    batch = next(live.batches())
    with pytest.raises(CaptureRefused, match="handed out and not counted"):
        live.advance(samples=0)
    live.advance(samples=len(batch))
    live.capture()


def ahead(batches):
    """Draws one batch ahead."""
    waiting = None
    for batch in batches:
        if waiting is not None:
            yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting


def test_a_thread_that_draws_ahead_is_named_where_a_save_is_refused():
    """A06, W04: the refusal advised counting steps, and occurred or not by chance."""
    live = Run(loader).live
    batches = iter(live.batches())
    live.advance(samples=len(next(batches)))
    thread = threading.Thread(target=lambda: [next(batches) for _ in range(2)])
    thread.start()
    thread.join()
    with pytest.raises(IncompleteWindow, match=r"advance\(\): 2, to a thread that draws ahead.*num_workers="):
        live.capture()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_prefetcher_that_counts_without_samples_is_said_once_and_accumulation_is_not(kind, caplog):
    """W04: it counts a batch that was not trained on, which a resume would lose."""
    live = Run(lambda: kind(Noisy(), batch_size=1)).live
    for _ in itertools.islice(ahead(live.batches()), 6):
        live.advance()
    assert caplog.text.count("draws batches ahead") == 1
    caplog.clear()
    live = Run(lambda: kind(Noisy(), batch_size=1)).live
    for number, _ in enumerate(live.batches(epochs=2)):  # windows of 4, 4, 2
        if number % N in (3, 7, 9):
            live.advance()
    assert "ahead" not in caplog.text


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loop_that_leaves_an_epoch_and_comes_back_to_it_is_told_so_once(kind, caplog):
    """W04: outside of `live.epochs` it continues in the epoch, whereas a plain loop would start the next one."""
    live = Run(partial(kind, Noisy(), batch_size=2)).live
    for _ in range(3):
        for _ in live.batches():
            live.advance()
            break
    assert caplog.text.count("for epoch in live.epochs(n)") == 1
    caplog.clear()
    live = Run(partial(kind, Noisy(), batch_size=2)).live
    if kind is DataLoader:
        next(iter(live.batches()))  # the first batch, to see its shape
    for until in (2, 4, N // 2 + 1):
        for _ in live.batches(steps=until):
            live.advance()
    for _ in live.epochs(4) if kind is DataLoader else ():
        for _ in live.batches():
            live.advance()
            break
    assert not caplog.text


def two():
    return {"labelled": loader(1), "unlabelled": loader(-1, batch_size=5)}


@pytest.mark.parametrize("samples", [None, 8, 3, 5, {"labelled": 3, "unlabelled": 5}])
def test_samples_of_several_loaders_are_those_of_all_or_of_one_or_by_name(samples):
    """G02, W04."""
    live = Run(two).live
    next(live.batches("labelled")), next(live.batches("unlabelled"))
    progress = live.advance(samples=samples)
    assert progress.samples == (8 if samples is None or isinstance(samples, dict) else samples)
    live.capture()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (4, r"8, or of one loader.*samples=\{'labelled'"),
        (100, "100"),
        ({"labelled": 3, "unlabelled": 4}, r"whole batches.*\[5\]"),
        ({"labeled": 3}, "the name of a loader"),
        ({"labelled": -3}, "int >= 0"),
        ({"labelled": True}, "int >= 0"),
    ],
)
def test_samples_of_several_loaders_that_do_not_fit_are_refused_and_nothing_is_counted(samples, words):
    """G02, W04: they are compared with the batches given to the loop."""
    live = Run(two).live
    next(live.batches("labelled")), next(live.batches("unlabelled"))
    with pytest.raises((DataPositionMismatch, InvalidArgument), match=words):
        live.advance(samples=samples)
    assert live.progress.step == 0
    assert live.advance(samples={"labelled": 3, "unlabelled": 5}).samples == 8


def test_samples_by_name_say_which_loader_is_drawn_ahead():
    """W04: batches that no step was trained on are given again."""

    def pairs(batches):
        return zip(ahead(batches("labelled")), batches("unlabelled"), strict=False)

    def plain(data, events):
        for one, other in pairs(data.__getitem__):
            events.append(event(one, other))

    def loop(run):
        for _ in run.live.epochs(1):
            for one, other in pairs(run.live.batches):
                die(run, run.step(one, other, samples={"labelled": len(one), "unlabelled": len(other)}))

    check(two, loop, plain, kills=[1])


@pytest.mark.parametrize("loaders", [None, loader])
def test_samples_by_name_want_loaders_with_names(loaders):
    live = attach(torch.nn.Linear(1, 1), loader=None if loaders is None else loaders())
    if loaders:
        next(live.batches())
    with pytest.raises(InvalidArgument, match="where no loader has a name"):
        live.advance(samples={"labelled": 3})


def test_a_loop_that_counts_fewer_batches_than_it_reads_is_refused_at_a_save():
    """A06, W04: a prefetcher stays a constant number of batches ahead; a loop that forgets to count falls further behind."""
    live = Run(partial(loader, batch_size=2)).live
    batches = live.batches()
    for _ in range(2):
        next(batches)
        live.advance(samples=len(next(batches)))
    with pytest.raises(IncompleteWindow, match="handed out"):
        live.capture()


@pytest.mark.parametrize(
    ("loaders", "name", "words"),
    [
        (loader, "labelled", "no name"),
        (lambda: {"a": loader()}, None, r"\['a'\]"),
        (lambda: {"a": loader()}, "b", r"\['a'\]"),
    ],
)
def test_the_name_of_a_loader_is_checked(loaders, name, words):
    live = Run(loaders).live
    with pytest.raises(InvalidArgument, match=words):
        live.batches(name) if name else next(live.batches())


@pytest.mark.parametrize("given", [{}, {1: DataLoader([1])}, {"": DataLoader([1])}])
def test_loaders_without_names_are_refused(given):
    with pytest.raises(InvalidArgument, match="loaders by name"):
        attach(torch.nn.Linear(1, 1), loader=given)


def test_positions_of_other_loaders_are_refused_by_name():
    run = Run(lambda: {"a": loader(), "b": loader()})
    for _ in zip(run.live.batches("a", epochs=1), run.live.batches("b"), strict=False):
        run.live.advance()
    state = copied(run.live.capture())
    for make in (lambda: {"a": loader(), "c": loader()}, loader):
        with pytest.raises(RestoreRefused, match=r"state\.dataset"):
            Run(make, state=state)
    value = state.dataset.value
    broken = {**value["loaders"], "b": {**value["loaders"]["b"], "samples": -3}}
    with pytest.raises(RestoreRefused, match="samples"):
        Run(
            lambda: {"a": loader(), "b": loader()},
            state=state.evolve(dataset=type(state.dataset)({**value, "loaders": broken})),
        )


GENERATORS: dict[str, Any] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: float(torch.rand((), generator=g))),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.standard_normal()),
    "numpy, philox": (
        lambda: np.random.Generator(np.random.Philox(3)),
        lambda g: g.integers(2, size=3, dtype=np.uint8).tolist(),
    ),
    "numpy, sfc64": (lambda: np.random.Generator(np.random.SFC64(3)), lambda g: g.random()),
    "numpy, mt19937": (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(dtype=np.float32)),
    "numpy, old": (lambda: np.random.RandomState(3), lambda g: g.standard_normal()),
    "python": (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_under_extra_goes_on_where_it_was(name, tmp_path):
    """W04: a restore writes it in place, so that a dataset that holds it continues too."""
    import trainfold

    make, draw = GENERATORS[name]
    generator = make()
    live = attach(torch.nn.Linear(1, 1), extra={"noise": generator})
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=1) as manager:
        draw(generator)
        live.advance(samples=1)
        manager.step(live)
    expected = [draw(generator) for _ in range(3)]
    other = make()
    resumed = attach(torch.nn.Linear(1, 1), extra={"noise": other})
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=1) as manager:
        manager.restore(resumed)
    assert [draw(other) for _ in range(3)] == expected


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_run_that_is_let_go_of_lets_go_of_its_loader(kind):
    """W01: a loader that waits for a collection keeps its workers, and a process that is forked meanwhile waits for them."""
    gc.disable()
    try:
        data = kind(Noisy(), batch_size=5)
        live = attach(torch.nn.Linear(1, 1), loader=data)
        for _ in live.batches(epochs=1):
            live.advance()
        kept = weakref.ref(data)
        del data, live, _
        assert kept() is None
    finally:
        gc.enable()


def test_a_generator_of_another_kind_is_refused_by_name():
    state = copied(attach(torch.nn.Linear(1, 1), extra={"noise": np.random.default_rng(1)}).capture())
    for other in (torch.Generator(), np.random.Generator(np.random.SFC64()), random.Random(1)):
        with pytest.raises(RestoreRefused, match="noise"):
            attach(torch.nn.Linear(1, 1), extra={"noise": other}).restore(state)


@pytest.mark.parametrize("late", ["dataset", "model", "seed", "nothing"])
def test_streams_that_move_between_the_restore_and_the_first_batch_are_put_back_and_named(late, caplog):
    """G11: a dataset that is built late, a model that is initialised after it."""
    draws = {
        "dataset": lambda: [random.random() for _ in range(5)],
        "model": lambda: torch.nn.Linear(4, 4),
        "seed": lambda: seed_all(5),
        "nothing": lambda: None,
    }

    def read(run, until):
        return [[batch.tolist(), float(torch.rand(())), random.random()] for batch in run.live.batches(steps=until)
                if run.live.advance()]  # fmt: skip

    whole = read(Run(loader), 7)
    first = Run(loader)
    read(first, 3)
    state = copied(first.live.capture())
    second = Run(loader, seed=9, state=state)
    draws[late]()
    assert read(second, 7) == whole[3:]
    named = {"dataset": ["python"], "model": ["torch"], "seed": ["python", "numpy", "torch"], "nothing": []}[late]
    assert [name for name in ("python", "numpy", "torch") if f"{name}" in caplog.text] == named
    assert ("put back" in caplog.text) == bool(named)
