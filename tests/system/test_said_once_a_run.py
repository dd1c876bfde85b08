"""What is said of a run on several ranks, and not of one of them, is said once a run."""

import logging
import warnings

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager

pytestmark = pytest.mark.slow(4)


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        if record.levelno >= logging.WARNING:
            self.texts.append(record.getMessage())


class Meter:
    def __init__(self):
        self.value = torch.zeros(1)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Counting(torch.nn.Module):
    """It has a state that no component saves."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), 0

    def forward(self, x):
        self.seen += len(x)
        return self.layer(x)


def run(collectives, folder, *, extra, steps, epochs=2, seed=0):
    """Train on both ranks; what is odd about it is so on each."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 1))
    sampler = DistributedSampler(data, num_replicas=2, rank=collectives.rank, seed=seed)
    live = attach(model, optimizer, loader=DataLoader(data, batch_size=1, sampler=sampler), extra=extra)
    with CheckpointManager(folder, collectives=collectives, every=2) as manager:
        manager.restore(live)
        for (x,) in live.batches(epochs=epochs, steps=steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance()
            manager.step(live)
        for _ in live.batches(epochs=1) if steps is None else ():
            pass
        manager.finish(live)


def everything(collectives, folder):
    said = Said()
    logging.getLogger("trainfold").addHandler(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(collectives, folder, extra={"meter": Meter()}, steps=6)
        run(collectives, folder, extra={}, steps=None)
    logging.getLogger("trainfold").removeHandler(said)
    return said.texts + [str(each.message) for each in caught]


PARTS = (
    "holds no checkpoint",
    "state that no component saves",
    "not registered here",
    "set_epoch(1) is called",
    "has no batch left",
)


def test_what_is_said_of_a_run_is_said_by_one_rank(processes, tmp_path):
    """R01: 64 ranks used to say the same 64 times."""
    first, *others = processes.run(2, everything, str(tmp_path), collectives=PATIENT)
    for part in PARTS:
        assert any(part in text for text in first), (part, first)
    assert others == [[]]
