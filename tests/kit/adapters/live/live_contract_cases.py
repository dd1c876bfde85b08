"""Helpers shared by the tests of live contract."""

import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.format.fingerprint import fingerprint


class Heads(nn.Module):
    """A trunk and two heads, of which a step trains one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x, head):
        return self.heads[head](self.trunk(x))


def trained(build, store, steps, die_after=None):
    """Train objects of its own from what the store has; the fingerprint at the end, or None if it died before."""
    torch.manual_seed(0)
    live, step = build()
    with CheckpointManager(store, every=1) as manager:
        manager.restore(live)
        while live.progress.step < steps:
            step()
            live.advance(samples=2)
            manager.step(live)
            if live.progress.step == die_after:
                return None
    return fingerprint(live.capture())


def check_resumes(build, *, steps, deaths):
    """Check that a loop that died and was resumed in new objects ends with the bits of one that did not die.

    Args:
        build: makes a live run and a function that trains it for one step.
        steps: in all.
        deaths: after how many of them to die, each in a run of its own.
    """
    whole = trained(build, MemoryStore(), steps)
    for die_after in deaths:
        store = MemoryStore()
        assert trained(build, store, steps, die_after) is None
        assert trained(build, store, steps) == whole


def two_optimizers(*, lr=0.1, weight_decay=0.0, schedule=None):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    main = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.AdamW(other.parameters(), lr=lr, weight_decay=weight_decay)
    scheduler = None if schedule is None else schedule(second)
    return attach(model, main, scheduler=scheduler, extra={"other": other, "second": second}), model, other


def scheduled(**changes):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **changes)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


class Homemade:
    """A scheduler that knows its optimizer under a name of its own."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state


def one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(2, 2)).square().mean().backward()
    optimizer.step()


def scheduled_step(model, optimizer, scheduler):
    one_step(model, optimizer)
    scheduler.step()
