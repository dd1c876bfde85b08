"""Checked steps under DistributedDataParallel: its first backward in a process sums in another order than the next one, from three ranks on."""

import logging

import pytest
import torch
from kit.adapters.fsdp2_cases import bits
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.errors import StepNotRepeated
from trainfold.states import check_live_steps

pytestmark = [pytest.mark.slow(4), pytest.mark.long]


class Crossed(nn.Module):
    """Its layers are used in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.last, self.second, self.first = nn.Linear(200, 1), nn.Linear(200, 200), nn.Linear(8, 200)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def checked(collectives, folder, *, every, steps, spoilt=None):
    """The bits after each step, and the steps that were said not to be checked; goes on from the last checkpoint."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Crossed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    live, said, calls = attach(model, optimizer), [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("trainfold").addHandler(handler)

    def step(x):
        calls.append(1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if live.progress.step == spoilt:
            model.module.first.bias.grad += len(calls) * (collectives.rank == 1)
        optimizer.step()

    step = step if every is None else check_live_steps(live, step, every=every, collectives=collectives)
    found = []
    with CheckpointManager(folder, every=2, collectives=collectives) as manager:
        manager.restore(live)
        while live.progress.step < steps:
            generator = torch.Generator().manual_seed(10 * live.progress.step + collectives.rank)
            step(torch.randn(4, 8, generator=generator))
            live.advance(samples=4)
            found.append(bits(model, optimizer))
            manager.step(live)
    logging.getLogger("trainfold").removeHandler(handler)
    return found, [text for text in said if "not checked" in text], len(calls)


def loops(collectives, folder):
    plain = checked(collectives, f"{folder}/plain", every=None, steps=4)
    once = checked(collectives, f"{folder}/once", every=1, steps=2)
    again = checked(collectives, f"{folder}/once", every=1, steps=4)
    try:
        checked(collectives, f"{folder}/once", every=1, steps=6, spoilt=4)
    except StepNotRepeated as error:
        return plain, once, again, str(error)
    return plain, once, again, ""


def test_the_first_step_of_a_process_is_not_checked_and_those_after_it_are(processes, tmp_path):
    """A machine that was healthy was taken for one that computes wrongly. A process that resumes has its order from the checkpoint, so its first step is checked."""
    for rank, (plain, once, again, said) in enumerate(processes.run(3, loops, str(tmp_path), collectives=PATIENT)):
        assert once[0] + again[0] == plain[0]
        assert (plain[2], once[2], again[2]) == (4, 3, 4)
        assert (len(once[1]), again[1]) == (rank == 0, [])
        assert "step 5" in said
        assert "on rank 1" in said
