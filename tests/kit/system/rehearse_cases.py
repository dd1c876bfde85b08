"""Helpers shared by the tests of rehearse."""

import pytest

from trainfold.adapters.cli.rehearse import options
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal
from trainfold.adapters.cli.terminal import plot
from trainfold.adapters.cli.terminal.plot import draw_losses

# An ordinary program; each hidden state below replaces a line of it.
PROGRAM = """
import os, random, sys
import numpy as np
import torch
from torch import nn
import trainfold

random.seed(0); np.random.seed(0); torch.manual_seed(0)

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(48, 6)
        self.own = torch.Generator().manual_seed(5)
    def __len__(self):
        return 48
    def __getitem__(self, index):
        x = self.x[index]
        return x, x.sum()

def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(12, 1)
    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.dropout(h)).squeeze(1)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, collate_fn=collate)
live = trainfold.attach(model, optimizer, loader=loader)
manager = trainfold.CheckpointManager("runs/mine", every=1000)
manager.restore(live)
count, average, scale = 0, 0.0, 1.0
for x, y in live.batches(epochs=100):
    loss = (model(x) - y).square().mean() * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    count += 1
    live.record(loss=loss)
    live.advance(samples=len(x))
    manager.step(live)
    if manager.should_stop:
        break
manager.close()
"""


def program(*changes):
    """The program with lines replaced: (what it says, what it says in that place)."""
    text = PROGRAM
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def rehearse(warm_python, tmp_path, monkeypatch):
    """Rehearses a program: 12 steps, a save each fourth, one kill; with a picture only if it asks for one."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments, kills=1, steps=12, every=4, draws=False, **options):
        monkeypatch.setattr(plot, "draw_losses", draw_losses if draws else lambda *_, **__: None)
        script = tmp_path / "train.py"
        script.write_text(text)
        settings = make_settings(
            warm_python.command(script, *arguments), steps=steps, every=every, kills=kills, **options
        )
        return run_rehearsal(tmp_path / "rehearsal", settings)

    return run


HIDDEN = {
    "a variable of the loop": [("loss = (model(x) - y).square().mean() * scale", "scale *= 1.01; loss = (model(x) - y).square().mean() * scale")],
    "a closure": [
        ("count, average, scale", "def made():\n    seen = [0]\n    def warm():\n        seen[0] += 1\n        return min(1.0, seen[0] / 9)\n    return warm\nwarm = made()\ncount, average, scale"),
        ("    optimizer.step()", "    optimizer.param_groups[0]['weight_decay'] = 0.1 * warm()\n    optimizer.step()"),
    ],
    "a counter that decides something": [("    optimizer.step()", "    if count % 5 == 4: nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n    optimizer.step()")],
    "a generator of the dataset": [("x = self.x[index]", "x = self.x[index] + 0.1 * torch.randn(6, generator=self.own)")],
    "a counter of the collate function": [("    x, y = zip(*samples)", "    collate.calls = getattr(collate, 'calls', 0) + 1\n    x, y = zip(*samples)\n    x = [each * (1 + 0.01 * collate.calls) for each in x]")],
    "a buffer that is not persistent": [
        ("        self.dropout =", "        self.register_buffer('mean', torch.zeros(12), persistent=False)\n        self.dropout ="),
        ("        return self.last", "        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)\n        h = h - self.mean\n        return self.last"),
    ],
    "a tensor that is a plain attribute": [("        h = self.first(x).relu()", "        self.seen = getattr(self, 'seen', 0.0) + x.abs().sum().item() / 500\n        h = self.first(x / (1 + self.seen)).relu()")],
    "a dropout that is annealed": [("    count += 1", "    count += 1; model.dropout.p *= 0.8")],
    "a submodule that goes to eval": [("    count += 1", "    count += 1\n    if count == 3: model.dropout.eval()")],
    "moments that an optimizer's subclass keeps": [
        ("optimizer = torch.optim.SGD(", "class Slow(torch.optim.SGD):\n    slow = None\n    def step(self, closure=None):\n        super().step(closure)\n        now = [p.detach().clone() for g in self.param_groups for p in g['params']]\n        self.slow = self.slow or now\n        self.slow = [0.9 * a + 0.1 * b for a, b in zip(self.slow, now)]\n        for p, a in zip((p for g in self.param_groups for p in g['params']), self.slow):\n            p.data.lerp_(a, 0.1)\noptimizer = Slow("),
    ],
    "a rate that is set from a counter": [("    optimizer.step()", "    optimizer.param_groups[0]['lr'] = 0.05 * 0.9 ** count\n    optimizer.step()")],
    "gradients that are carried over": [("    optimizer.zero_grad()", "    count % 3 == 2 and optimizer.zero_grad()")],
    "state of a module": [("    loss = (model", "    random.scale = getattr(random, 'scale', 1.0) * 0.97\n    x = x * random.scale\n    loss = (model")],
    "an average of the weights that is not attached": [
        ("count, average, scale", "teacher = [p.detach().clone() for p in model.parameters()]\ncount, average, scale"),
        ("    loss = (model", "    for t, p in zip(teacher, model.parameters()): t.lerp_(p.detach(), 0.2)\n    loss = 0.1 * sum((t - p).square().sum() for t, p in zip(teacher, model.parameters())) + (model"),
    ],
    "numbers drawn between the restore and the loop": [("manager.restore(live)", "manager.restore(live)\nrandom.random()"), ("    loss = (model", "    x = x * (1 + 0.1 * random.random())\n    loss = (model")],
}  # fmt: skip


RANKS = """
import sys
import torch
import trainfold
from trainfold.ranks import run_threads

x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(dim=1))

def train(ranks):
    model = torch.nn.Linear(6, 1)
    torch.nn.init.zeros_(model.weight)  # threads share the generator, so no random number is drawn
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = trainfold.data.GlobalBatchSampler(data, 12, seed=3, rank=ranks.rank, replicas=ranks.world_size)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    live = trainfold.attach(model, optimizer, loader=loader)
    manager = trainfold.CheckpointManager("runs/mine", every=1000, collectives=ranks)
    manager.restore(live)
    for x, y in live.batches(epochs=100):
        loss = (model(x).squeeze(1) - y).square().sum() / 12
        optimizer.zero_grad()
        loss.backward()
        sums = ranks.all_sum([loss.detach(), *(each.grad for each in model.parameters())])
        for each, whole in zip(model.parameters(), sums[1:]):
            each.grad.copy_(whole)
        optimizer.step()
        live.record(loss=sums[0])
        live.advance()
        manager.step(live)
        if manager.should_stop:
            break
    manager.close()

run_threads(int(sys.argv[-1]), train)
"""


@pytest.fixture
def on_threads(rehearse, monkeypatch):
    """Rehearses a program whose ranks are threads: it is given their number as its last argument."""
    monkeypatch.setattr(options, "under_torchrun", lambda command, count: [*command, str(count)])
    return rehearse
