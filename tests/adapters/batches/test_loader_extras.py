"""Datasets and samplers that draw from objects under ``extra`` resume exactly, and the data probe changes none of them."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from kit.depth import IS_DEEP
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import DataPositionMismatch, RestoreRefused
from trainfold.core.format.structure.describe import describe
from trainfold.core.state.state import Opaque

N = 10
pytestmark = [
    pytest.mark.slow(0.25),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]
KINDS: dict[str, Any] = {"plain": DataLoader, "stateful": StatefulDataLoader}
ELSEWHERE: dict[str, Any] = {}  # state that is in no dataset


class Data(Dataset):
    def __init__(self, draw=lambda: 0.0):
        self.draw = draw

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw()], dtype=torch.float64)


class Held(Data):
    """Draws from its own generator."""

    def __init__(self, rng):
        super().__init__(self.number)
        self.rng = rng

    def number(self):
        if isinstance(self.rng, torch.Generator):
            return float(torch.rand((), generator=self.rng))
        return float(self.rng.random())


class Counting(Data):
    """Has a ``state_dict``, or a count that a pair of functions reads."""

    def __init__(self):
        super().__init__(self.next)
        self.reads = 0

    def next(self):
        self.reads += 1
        return float(self.reads)

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


def generator(rng):
    dataset = Held(rng)
    return dataset, {"noise": rng}


def pair():
    dataset = Counting()
    return dataset, {"reads": (lambda: dataset.reads, lambda reads: setattr(dataset, "reads", reads))}


def stateful_dataset():
    dataset = Counting()
    return dataset, {"data": dataset}


def getstate():
    dataset = Held(random.Random(5))
    return dataset, {"noise": (dataset.rng.getstate, dataset.rng.setstate)}


CASES: dict[str, Any] = {
    "numpy": lambda: generator(np.random.default_rng(3)),
    "numpy's old one": lambda: generator(np.random.RandomState(3)),
    "python": lambda: generator(random.Random(3)),
    "torch": lambda: generator(torch.Generator().manual_seed(3)),
    "a pair for a count": pair,
    "a pair for a generator": getstate,
    "an object": stateful_dataset,
}


class Run:
    """A run that records its batches and what the training drew."""

    def __init__(self, make, kind="plain", state=None, policy=None, step=None, **arguments):
        torch.manual_seed(1 if state is None else 99)
        dataset, extra = make()
        data = KINDS[kind](dataset, **{"batch_size": 2, "shuffle": "sampler" not in arguments, **arguments})
        self.live = attach(
            torch.nn.Linear(1, 1), loader=data, extra=extra, unsaved=["loader.dataset", "loader.sampler"]
        )
        self.extra, self.step = extra, step or (lambda extra: None)
        if state is not None:
            self.live.restore(state, policy=policy)

    def read(self, until):
        seen = []
        for batch in self.live.batches(steps=until):
            seen.append((batch.tolist(), float(torch.rand(())), self.step(self.extra)))
            self.live.advance()
        return seen

    def state(self):
        found = copied(self.live.capture())
        describe(found.dataset, "dataset")  # it can be saved
        return found


def check(make, *, cuts=(1, 4, 6), until=8, policy=None, **arguments):
    whole = Run(make, **arguments).read(until)
    for cut in cuts:
        first = Run(make, **arguments)
        seen = first.read(cut)
        resumed = Run(make, state=first.state(), policy=policy, **arguments)
        seen += resumed.read(cut + 1)
        seen += Run(make, state=resumed.state(), policy=policy, **arguments).read(until)
        assert seen == whole, cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_what_a_dataset_draws_from_under_extra_is_resumed_exactly(name, kind, caplog):
    """W03: the probe draws the last batch again as before, compares it, and leaves the restored state unchanged."""
    make = CASES[name]
    if kind == "stateful" and name == "an object":
        return  # such a loader saves the dataset itself
    check(make, kind=kind)
    assert "not compared" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["numpy", "a pair for a count"])
def test_other_data_are_still_refused_where_the_dataset_draws_from_extra(name, kind):
    """W03."""
    first = Run(CASES[name], kind)
    first.read(3)

    def make():
        dataset, extra = CASES[name]()
        dataset.draw = lambda: -1.0
        return dataset, extra

    with pytest.raises(DataPositionMismatch, match="looks the same but has other values"):
        Run(make, kind, state=first.state()).read(4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_under_extra_makes_no_other_data_pass(kind):
    """W03: the clock changes while the batch is drawn, but not because of the draw."""
    ticks = iter(range(10**6))

    def make(scale):
        return Data(lambda: scale), {"clock": (lambda: next(ticks), lambda tick: None)}

    first = Run(lambda: make(1.0), kind)
    first.read(3)
    Run(lambda: make(1.0), kind, state=first.state()).read(4)
    with pytest.raises(DataPositionMismatch):
        Run(lambda: make(2.0), kind, state=first.state()).read(4)


def elsewhere():
    ELSEWHERE["rng"] = np.random.default_rng(3)
    return Data(draw_elsewhere), {"noise": ELSEWHERE["rng"]}


def draw_elsewhere():
    return float(ELSEWHERE["rng"].random())


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_drawn_from_extra_in_a_way_that_is_not_seen_are_exact_and_said(kind, caplog):
    """W03: the state before the last batch is not known, so a difference proves nothing. The probe changes no state."""
    check(elsewhere, kind=kind, cuts=(3,))
    assert "not compared" in caplog.text
    assert "extra['noise']" in caplog.text


class Own(Sampler):
    """A sampler with a generator that no loader knows; it draws when iteration starts, or during it."""

    def __init__(self, rng, *, late):
        self.rng = rng
        self.late = late

    def __len__(self):
        return N

    def __iter__(self):
        if self.late:
            return (int(self.rng.integers(N)) for _ in range(N))
        return iter(self.rng.permutation(N).tolist())


@pytest.mark.parametrize("policy", [None, {"data_probe": "adapt"}])
@pytest.mark.parametrize(
    ("late", "workers"), [(False, 0), (True, 0), pytest.param(False, 2, marks=pytest.mark.long), (True, 2)]
)
def test_a_samplers_own_generator_under_extra_gives_the_same_order(late, workers, policy):
    """W03: the order of an epoch comes from that generator, whether the last batch is drawn again or not."""

    class Runs(Run):
        def __init__(self, **arguments):
            rng = np.random.default_rng(4)
            sampler = Own(rng, late=late)
            super().__init__(lambda: (Data(), {"order": rng}), sampler=sampler, num_workers=workers, **arguments)

    whole = Runs().read(12)
    for cut in (1, 3, 4, 5, 7) if not workers else (3, 7) if IS_DEEP else (7,):
        first = Runs()
        seen = first.read(cut)
        assert seen + Runs(state=first.state(), policy=policy).read(12) == whole, cut


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_only_the_training_draws_from_stays_where_it_was_restored(workers):
    """W03: starting the sampler again puts it back to the epoch's start for a moment only."""

    def make():
        return Data(), {"noise": np.random.default_rng(5)}

    check(
        make,
        cuts=(3, 5) if IS_DEEP or not workers else (5,),
        num_workers=workers,
        step=lambda extra: float(extra["noise"].random()),
    )


class Curriculum(Data):
    level = 0.0

    def __init__(self):
        super().__init__(lambda: self.level)


def curriculum():
    dataset = Curriculum()
    return dataset, {"level": (lambda: dataset.level, lambda level: setattr(dataset, "level", level))}


def harder(extra):
    get, put = extra["level"]
    put(get() + 1.0)
    return get()


@pytest.mark.parametrize("kind", KINDS)
def test_a_curriculum_that_the_training_moves_is_drawn_again_at_its_level(kind):
    """W03: the last batch has another level than the next."""
    check(curriculum, kind=kind, step=harder)


def test_a_curriculum_in_workers_goes_on_at_the_level_that_they_were_started_with():
    """W01: workers have copies of the dataset, from the start of the epoch."""
    check(curriculum, step=harder, cuts=(3, 6), num_workers=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_waits_is_drawn_once_more_from_what_it_was_drawn_from(kind):
    """W04: the loop draws one batch ahead, and the dataset has its own generator."""

    def read(run, until):
        seen, waiting = [], deque()
        for batch in run.live.batches(steps=until):
            waiting.append(batch)
            if len(waiting) == 2:
                seen.append((waiting.popleft().tolist(), run.step(run.extra)))
                run.live.advance(samples=2)
        return seen

    for make, step in ((CASES["numpy"], None), (CASES["a pair for a count"], None), (curriculum, harder)):
        whole = read(Run(make, kind, step=step), 8)
        for cut in (1, 3, 5):
            first = Run(make, kind, step=step)
            seen = read(first, cut)
            assert seen + read(Run(make, kind, state=first.state(), step=step), 8) == whole, cut


def test_a_position_without_what_the_order_was_drawn_from_is_refused_by_name():
    """V09: older versions of trainfold did not save that state."""

    def start(**arguments):
        rng = np.random.default_rng(4)
        return Run(lambda: (Data(), {"order": rng}), sampler=Own(rng, late=False), **arguments)

    first = start()
    first.read(3)
    state = first.state()
    value = state.dataset.value
    old = {**value, "order": {name: held for name, held in value["order"].items() if name != "extra"}}
    with pytest.raises(DataPositionMismatch, match="collate_fn and sampler"):
        start(state=state.evolve(dataset=Opaque(old))).read(4)


@pytest.mark.parametrize("value", [5, {"noise": 5}, {"noise": {"kind": "x", "state": 1}}])
def test_what_is_no_state_of_a_generator_is_refused(value):
    """G02: it is checked before anything changes."""
    make = CASES["numpy"]
    first = Run(make)
    first.read(3)
    state = first.state()
    held = state.dataset.value
    with pytest.raises(RestoreRefused, match=r"state\.dataset\.order"):
        Run(make, state=state.evolve(dataset=Opaque({**held, "order": {**held["order"], "extra": value}})))
    last = held["draws"]["lasts"][0]
    lasts = [{**last, "before": {**last["before"], "extra": value}}]
    with pytest.raises(RestoreRefused, match=r"state\.dataset\.draws\.lasts"):
        Run(make, state=state.evolve(dataset=Opaque({**held, "draws": {**held["draws"], "lasts": lasts}})))
