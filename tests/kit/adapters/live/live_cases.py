"""Helpers shared by the tests of live."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.attach import attach
from trainfold.core import tree
from trainfold.core.state.components import components_of
from trainfold.core.state.state import TrainState

SAMPLES = 22


BATCH = 4  # the last batch of an epoch is short: 6 steps an epoch


class Limit:
    """An object of the user's, whose state is the same on all ranks."""

    def __init__(self, **settings):
        self.__dict__.update(settings)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Net(nn.Module):
    """Dropout, batch norm, a tied pair, a frozen layer, a parameter without a gradient, a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(8, 8)
        self.tied_again = nn.Linear(8, 8)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(8, 1)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        x = self.drop(self.norm(self.embed(x)))
        x = torch.relu(self.tied(x)) + self.tied_again(x)
        return self.head(self.frozen(x))


class Averaged:
    """A user's own object: a moving average of the loss, kept in python and in a tensor."""

    def __init__(self):
        self.value = torch.zeros(())
        self.seen = 0

    def update(self, loss):
        self.value = 0.9 * self.value + 0.1 * loss.detach()
        self.seen += 1

    def state_dict(self):
        return {"value": self.value, "seen": self.seen}

    def load_state_dict(self, state):
        self.value, self.seen = state["value"], state["seen"]


class Job:
    """Everything of one run, made from scratch each time, as a script does."""

    def __init__(self, seed, *, optimizer=torch.optim.AdamW, workers=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global stream is the subject)
        data = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 5, generator=data)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.97**step)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.average = Averaged()
        self.live = attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            extra={"ema": self.ema, "average": self.average},
        )

    def run(self, steps):
        """Go on until the run has had so many steps."""
        for x, y in self.live.batches(steps=steps):
            noise = random.random() + float(np.random.normal()) + torch.randn(())  # noqa: NPY002 (the global stream is the subject)
            loss = ((self.model(x) - y - 0.01 * noise) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.average.update(loss)
            self.live.advance(samples=len(x))
        return self


def bits(state: TrainState) -> dict[str, Any]:
    """Every leaf of a state in a form that compares by bits."""

    def form(leaf):
        if isinstance(leaf, torch.Tensor):
            return (
                str(leaf.dtype),
                tuple(leaf.shape),
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        if isinstance(leaf, np.ndarray):
            return (str(leaf.dtype), leaf.shape, leaf.tobytes())
        return repr(leaf)

    return {
        path: form(leaf)
        for name, component in components_of(state).items()
        for path, leaf in tree.named_leaves(component, name)
    }


def differing(one: TrainState, other: TrainState) -> list[str]:
    left, right = bits(one), bits(other)
    return [path for path in {**left, **right} if left.get(path) != right.get(path)]


# --- the law ---------------------------------------------------------------------------------------------------------
