"""Helpers shared by the tests of runs."""

import attrs
import torch

from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState


class RankFiles(MemoryStore):
    """A store for which a rank writes one data file, however few ranks there are."""

    prefers = FilePreference(1)


def state_at(step, value=0.0, **changes):
    model = ModelState(Leaves({"w": torch.full((2, 3), value + step), "b": torch.zeros(3)}), Leaves())
    slots = Leaves({"w": {"exp_avg": torch.full((2, 3), float(step)), "step": torch.tensor(float(step))}})
    optimizer = OptimizerState("torch.optim.adamw.AdamW", slots, (ParamGroup({"lr": 0.1}, ("w", "b")),))
    whole = TrainState(model, optimizer, {"kind": "constant", "total": 100}, Progress(step, samples=step * 4), rng=7)
    return attrs.evolve(whole, **changes)


def saved_run(*steps):
    store = MemoryStore()
    for step in steps:
        save(state_at(step), store)
    return store


def damage(store, name, at=-1):
    """A store whose file has one bit flipped."""
    data = bytearray(store.read(name))
    data[at] ^= 1
    store.delete(name)
    store.write(name, [bytes(data)], size_bytes=len(data))
