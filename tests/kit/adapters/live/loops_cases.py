"""Helpers shared by the tests of loops."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.format.structure.describe import describe

N = 10


class Noisy(Dataset):
    """Draws from the global streams."""

    def __init__(self, sign=1):
        self.sign = sign

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([self.sign * (index + 1), random.random(), float(torch.rand(()))], dtype=torch.float64)


def loader(sign=1, **arguments):
    return DataLoader(Noisy(sign), **{"batch_size": 3, "shuffle": True, **arguments})


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


class Run:
    """A live run whose events are written down; it stops after a number of steps."""

    def __init__(self, make, seed=1, state=None):
        model = torch.nn.Linear(1, 1)
        seed_all(seed)
        self.live = attach(model, loader=make())
        if state is not None:
            self.live.restore(state)
        self.events, self.stop, self.state = [], None, None

    def step(self, *batches, samples=None):
        """One step; True where the run is to die."""
        self.events.append([batch.tolist() for batch in batches] + [float(torch.rand(())), random.random()])
        self.live.advance(samples=samples)
        if self.live.progress.step == self.stop:
            self.state = copied(self.live.capture())
            describe(self.state.dataset, "dataset")
            return True
        return False


class Died(Exception):
    pass


def check(make, loop, plain, kills=None):
    """The loop with a live run does what the plain one does, and does it again after a death at every step."""
    seed_all(1)
    whole: list[Any] = []
    plain(make(), whole)
    run = Run(make)
    loop(run)
    assert run.events == whole, "attaching has changed a draw"
    steps = run.live.progress.step
    for kill in kills or range(1, steps + 1):
        first = Run(make)
        first.stop = kill
        with pytest.raises(Died):
            loop(first)
        second = Run(make, seed=77, state=first.state)
        loop(second)
        assert first.events + second.events == whole, kill
        third_at = kill + 1
        if third_at < steps:  # and once more, from a position that a resumed run has saved
            second = Run(make, seed=78, state=first.state)
            second.stop = third_at
            with pytest.raises(Died):
                loop(second)
            third = Run(make, seed=79, state=second.state)
            loop(third)
            assert first.events + second.events + third.events == whole, kill


def event(*batches):
    return [batch.tolist() for batch in batches] + [float(torch.rand(())), random.random()]


def die(run, dies):
    if dies:
        raise Died
