"""Helpers shared by the tests of audit."""

import itertools
import random
import warnings
from collections import Counter, deque

import numpy as np
import torch
from torch import nn

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HiddenState


class Net(nn.Module):
    """A model whose forward calls ``change`` on it."""

    def __init__(self, change=lambda net: None, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        for name, value in attributes.items():
            setattr(self, name, value)
        object.__setattr__(self, "change", change)

    def forward(self, x):
        self.change(self)
        return self.layer(self.drop(self.norm(x)))


def run(model, steps=3, *, loader=None, optimizer=None, each=lambda step: None, every=1, restore=True, **options):
    """Train and save at each ``every`` steps; return the warnings, and the contract of the last checkpoint."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, loader=loader, **options)
    store = MemoryStore()
    with CheckpointManager(store, every=every) as manager, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if restore:
            manager.restore(live)
        batches = live.batches(steps=steps) if loader else itertools.repeat(torch.ones(4, 3), steps)
        for step, batch in enumerate(batches, 1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            each(step)
            live.advance(samples=len(batch))
            manager.step(live)
        contract = live.contract()
    return [str(each.message) for each in heard if each.category is HiddenState], contract.get("unsaved", {})


class Helper:
    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1


class Slots:
    __slots__ = ("empty", "n")

    def __init__(self):
        self.n = 0


def attributes():
    return {
        "average": torch.zeros(2), "seen": np.zeros(2), "calls": 0, "losses": [0.0], "queue": deque([0, 1], maxlen=2),
        "counts": Counter("ab"), "generator": torch.Generator(), "rng": np.random.default_rng(0), "random": random.Random(0),
        "helper": Helper(), "slots": Slots(), "teachers": [nn.Linear(3, 1)], "ids": itertools.count(),
    }  # fmt: skip
