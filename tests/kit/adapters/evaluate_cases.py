"""Helpers shared by the tests of evaluate."""

import sys
import weakref
from collections import deque

import torch
from hypothesis import settings
from hypothesis import strategies as st

from trainfold import metrics as M

MANY = settings(deadline=None, max_examples=40)


SUITE = {
    "loss": M.Ratio(),
    "ppl": M.Perplexity(),
    "largest": M.Max(),
    "spread": M.Variance(),
    "positions": M.PositionAccuracy(),
    "acc_len": M.AcceptanceLength(),
}


def forward(batch):
    """Per-sample values that do not depend on the batch: what a model's kernels cannot promise."""
    values = batch["values"]
    hits = values[:, None] > torch.arange(batch["positions"])
    return {
        "loss": (values, len(values)),
        "ppl": (values, len(values)),
        "largest": values,
        "spread": values,
        "positions": (hits, torch.ones_like(hits)),
        "acc_len": (hits, torch.ones_like(hits)),
    }


def batches_of(values, cuts, positions=3):
    return [{"values": part, "positions": positions} for part in values.tensor_split(cuts) if len(part)]


def bits(evaluation):
    return {
        name: [x if x is None else x.hex() for x in value] if isinstance(value, list) else value.hex()
        for name, value in evaluation.items()
    }


floats = st.floats(-100, 100, width=32)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(1))
        self.seen = []

    def forward(self, batch):
        self.seen.append((self.training, self.inner[1].training, torch.is_grad_enabled()))
        return self.inner(batch["values"][:, None])[:, 0]


GLOBAL_MODEL = Counting()


def numbers(count=20):
    return torch.arange(float(count))


def summed(batch):
    return {"sum": batch}


SUM = {"sum": M.Sum()}


class Chain:
    def __init__(self, inner):
        self.inner = inner


class Shelf:
    model = None


def deep(model, kind):
    if kind == "attributes":
        held = Chain(Chain(Chain(model)))
        return lambda batch: {"loss": (held.inner.inner.inner(batch), 1)}
    if kind == "dicts":
        held = {"a": {"b": {"c": {"d": [{"e": model}]}}}}
        return lambda batch: {"loss": (held["a"]["b"]["c"]["d"][0]["e"](batch), 1)}
    if kind == "class":
        Shelf.model = model
        return lambda batch: {"loss": (Shelf.model(batch), 1)}
    if kind == "weakref":
        held = weakref.ref(model)
        return lambda batch: {"loss": (held()(batch), 1)}
    if kind == "module":
        held = sys.modules[__name__]
        held.MODEL = model
        return lambda batch: {"loss": (held.MODEL(batch), 1)}
    if kind == "deque":
        held = deque([model])
        return lambda batch: {"loss": (held[0](batch), 1)}
    raise AssertionError(kind)


class Fielded:
    """A metric of a user's, whose text has an address and a set in it."""

    def __init__(self):
        self.inner, self.tags = M.Sum(), frozenset({"b", "a"})

    def __repr__(self):
        return f"Fielded({object.__repr__(self)})"

    def __getattr__(self, name):
        return getattr(self.inner, name)
