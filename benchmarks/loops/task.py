"""The task that every loop trains: the model, the data, the cases, and the report of a loop."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import xxhash

SAMPLES, FEATURES, CLASSES = 64, 16, 4
LEARNING_RATE = 1e-2
DECAY = 0.9


class NotOffered(Exception):
    """A tool has no documented way to do what a case needs."""


@attrs.frozen
class Case:
    """What to train, and when to die.

    Attributes:
        run: the folder for checkpoints and reports.
        epochs: number of epochs; each has 8 batches of 8.
        die_at: the optimizer step after which the process kills itself; None to train to the end.
        save_every: optimizer steps between checkpoints.
        width: hidden units; more units make a larger checkpoint.
    """

    run: str
    epochs: int = 3
    batch_size: int = 8
    workers: int = 0
    augment: bool = False
    dropout: float = 0.1
    accumulate: int = 1
    schedule: str | None = None
    ema: bool = False
    two_optimizers: bool = False
    dtype: str = "float32"
    optimizer: str = "AdamW"
    save_every: int = 4
    die_at: int | None = None
    width: int = 32

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run)

    @property
    def steps(self) -> int:
        """The total number of optimizer steps."""
        return self.epochs * (SAMPLES // self.batch_size) // self.accumulate


class Data(torch.utils.data.Dataset):
    """Sixty-four samples; with ``augment`` each read adds noise from the three usual random streams."""

    def __init__(self, *, augment):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.augment = augment

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        """One sample."""
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(FEATURES) + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.randn())  # noqa: NPY002
        return x, self.y[index]


def make_net(case):
    """A perceptron with dropout."""
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, case.width),
        torch.nn.LayerNorm(case.width),
        torch.nn.ReLU(),
        torch.nn.Dropout(case.dropout),
        torch.nn.Linear(case.width, case.width),
        torch.nn.ReLU(),
        torch.nn.Linear(case.width, CLASSES),
    )
    return net.to(getattr(torch, case.dtype))


def loss_of(net, x, y):
    """The mean loss of a batch."""
    return torch.nn.functional.cross_entropy(net(x.to(next(net.parameters()).dtype)).float(), y)


def optimizers_of(case, net):
    """Return the optimizers: one for all layers, or one for the first layer and one for the others."""
    kind = getattr(torch.optim, case.optimizer)
    parameters = list(net.parameters())
    if case.two_optimizers:
        return [kind(parameters[:2], lr=LEARNING_RATE), torch.optim.SGD(parameters[2:], lr=LEARNING_RATE, momentum=0.9)]
    return [kind(parameters, lr=LEARNING_RATE)]


def scheduler_of(case, optimizer):
    """Return the scheduler, which steps once per optimizer step; None if the case has no scheduler."""
    if case.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=case.steps)
    if case.schedule == "onecycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=case.steps + 1)
    return None


def average_of(case, net):
    """Return the exponential average of the weights; None if the case has no average."""
    if not case.ema:
        return None
    return torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY))


def loader_of(case, kind=torch.utils.data.DataLoader):
    """The loader of the training data."""
    return kind(Data(augment=case.augment), batch_size=case.batch_size, shuffle=True, num_workers=case.workers)


def seed_all():
    """Seed everything, as a script does first."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def after_step(case, step, loss):
    """Record the loss of a step, and die at the step that the case names."""
    with (case.folder / "losses.jsonl").open("a") as log:
        log.write(json.dumps([int(step), float(loss).hex()]) + "\n")
    if step == case.die_at:
        os.kill(os.getpid(), signal.SIGKILL)


def digest_of(*modules):
    """One digest of all parameters and buffers."""
    digest = xxhash.xxh3_128()
    for module in modules:
        for name, value in sorted(module.state_dict().items() if module is not None else ()):
            digest.update(name.encode())
            digest.update(value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def finish(case: Case, net: Any, average: Any = None) -> None:
    """Report the final weights of the run."""
    inner = None if average is None else getattr(average, "module", average)
    (case.folder / "final.json").write_text(json.dumps({"digest": digest_of(net, inner)}))
