"""Helpers shared by the tests of manager."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.live.attach import attach
from trainfold.backends.runs.scan import read_inventory
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Progress, TrainState


class Job:
    """A small run with everything in it, made from scratch each time."""

    def __init__(self, seed, *, hidden=6, batch_size=4, lr=0.05, decay=0.01, register=True):
        torch.manual_seed(seed)
        random.seed(seed)
        x = torch.linspace(-1, 1, 44).reshape(22, 2)
        self.model = nn.Sequential(nn.Linear(2, hidden), nn.Dropout(0.2), nn.Linear(hidden, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=15)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        extra = {"ema": self.ema} if register else {}
        self.live = attach(self.model, self.optimizer, scheduler=self.scheduler, loader=loader, extra=extra)

    def run(self, manager, steps):
        saved = []
        for x, y in self.live.batches(steps=steps):
            loss = ((self.model(x + random.random()) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.live.advance(samples=len(x))
            result = manager.step(self.live)
            saved += [result.step] if result else []
        return saved


def state_at(step, value=0.0):
    return TrainState(trainer=Progress(step=step), extra={"w": Leaves({"x": torch.full((4,), float(value))})})


def value_in(state):
    return state.extra["w"]["x"][0].item()


def steps_of(store):
    return [entry.head.step for entry in read_inventory(store).entries if entry.head is not None]


# --- the law, through the real format ---------------------------------------------------------------------------------
