"""Helpers shared by the tests of bisection: a program into which a cause is planted."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfold import CheckpointManager, Loss, attach, init_state, make_step, optimizer

STEPS, EVERY = 9, 3
BACKWARDS = []


class Net(torch.nn.Module):
    """Layers with a running mean and dropout, and a sum that can be made in two orders."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        if len(BACKWARDS):
            return sum((h[:, at] * self.last.weight[0, at] for at in reversed(range(8))), self.last.bias[0])
        return self.last(h).squeeze(1)


class Swapped(TensorDataset):
    """Data of which two samples can change places."""

    def __init__(self, *tensors, swaps):
        super().__init__(*tensors)
        self.swaps = swaps

    def __getitem__(self, index):
        return super().__getitem__({17: 18, 18: 17}.get(index, index) if self.swaps else index)


def _drawn(noise, own):
    if noise == "numpy":
        return float(np.random.randn())  # noqa: NPY002 (the global stream is the subject)
    if noise == "python":
        return random.gauss(0, 1)
    return torch.randn((), generator=own) if noise == "generator" else 0.0


def _threaded(threads):
    """A sum of many numbers, whose order depends on the number of threads; nothing without one."""
    if not threads:
        return 0.0
    x = torch.rand(300, 300, generator=torch.Generator().manual_seed(0))
    return (x @ x).sum()


def train(
    run, *, seed=0, lr=0.1, swaps=False, schedules=True, forgets=False, doubles_lr=False, drops=True, at_four=None, loses_window=False,
    noise="", noise_seed=0, unused_seed=0, shuffles=False, workers=0, threads=0, every=EVERY, record=1, is_logged=True, steps=STEPS,
    begin=None, adam=False, loses_update=False,
):  # fmt: skip
    """Nine steps, or as many as given; ``at_four`` is called with the model after the fourth one, in which the loop doubles the rate, too; ``begin`` goes back to a step."""
    torch.set_num_threads(threads or 1)
    torch.manual_seed(seed)
    random.seed(noise_seed if noise == "python" else 0)
    np.random.seed(noise_seed if noise == "numpy" else unused_seed)  # noqa: NPY002
    own = torch.Generator().manual_seed(noise_seed)
    model, x = Net(), torch.linspace(-1, 1, 4 * 72).reshape(72, 4)
    model.drop.train(drops)
    sgd = torch.optim.Adam(model.parameters(), lr=lr) if adam else torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5) if schedules else None
    loader = DataLoader(Swapped(x, x.sum(1).sin(), swaps=swaps), batch_size=8, shuffle=shuffles, num_workers=workers)
    live = attach(model, sgd, scheduler=scheduler, loader=loader, extra={"noise": own} if noise == "generator" else {})
    with CheckpointManager(run, every=every, record=record if is_logged else None) as manager:
        manager.restore(live, step=begin)
        for x, y in live.batches(epochs=2):
            loss = (model(x + _drawn(noise, own)) - y).square().mean()
            if loses_window and live.progress.step == 4 and loss is not None:
                loses_window = False
                live.drop_window()
                continue
            sgd.zero_grad()
            loss.backward()
            if not loses_update or live.progress.step != 3:
                sgd.step()
            if scheduler is not None and not forgets:
                scheduler.step()
            if doubles_lr and live.progress.step == 3:
                sgd.param_groups[0]["lr"] *= 2
            loss = loss + _threaded(threads)
            norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
            live.record(loss=loss, grad_norm=norm)
            if at_four is not None and live.progress.step == 3:
                at_four(model)
            live.advance(samples=len(x))
            manager.step(live)
            if live.progress.step == steps:
                break


def train_pure(run, *, seed=0, every=EVERY, record=1, is_logged=True):
    """Nine pure steps with dropout, of a program whose only seed is that of its state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    step = make_step(model, lambda model, x: Loss((model(x).squeeze(1) - x.sum(1)).square().sum(), len(x)), sgd)
    state = init_state(model, sgd, seed=seed)
    with CheckpointManager(run, every=every, record=record if is_logged else None) as manager:
        step = manager.recorded(step) if is_logged else step
        for x in torch.linspace(-1, 1, 4 * 72).reshape(STEPS, 8, 4):
            state, _ = step(state, x)
            manager.step(state)


def train_two_rates(run, *, doubles_at=0, halves_at=0, follows=False, noise_seed=0, draws_at=0):
    """Six steps with dropout, noise, and two optimizers; the loop sets the second one's rate, which ``follows`` the loss or is changed in two steps."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(first, torch.nn.Dropout(0.2), second)
    one, two = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second))
    own = torch.Generator().manual_seed(noise_seed)
    loader = DataLoader(torch.linspace(-1, 1, 4 * 48).reshape(48, 4), batch_size=8)
    live = attach(model, one, loader=loader, extra={"second": two, "noise": own})
    with CheckpointManager(run, every=3, record=1) as manager:
        manager.restore(live)
        for x in live.batches(epochs=1):
            step = live.progress.step + 1
            torch.rand(int(step == draws_at))
            two.param_groups[0]["lr"] *= {doubles_at: 2.0, halves_at: 0.5}.get(step, 1.0)
            loss = (model(x + torch.randn((), generator=own)) - x.sum(1, keepdim=True)).square().mean()
            one.zero_grad()
            two.zero_grad()
            loss.backward()
            one.step()
            two.step()
            if follows:
                two.param_groups[0]["lr"] = 0.1 / (1 + loss.item())
            live.record(loss=loss)
            live.advance(samples=len(x))
            manager.step(live)


@torch.no_grad()
def flip_a_bit(model):
    model.last.weight.view(torch.int32)[0, 3] ^= 1 << 12


@torch.no_grad()
def reset_mean(model):
    model.norm.running_mean.zero_()


def sum_backwards(model):
    BACKWARDS.append(model)
