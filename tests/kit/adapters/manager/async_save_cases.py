"""Helpers shared by the tests of async save."""

import threading

import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.format.file_names import RUN_FILE
from trainfold.core.format.run_file import run_document

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach adam": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


class PausingStore:
    """A store whose writes wait at a given place: before part number ``at`` of the run."""

    def __init__(self, at=None, fault=None):
        self.inner = MemoryStore(fault=fault)
        self.inner.commit(RUN_FILE, run_document("a" * 32))  # so that manifests can be compared byte by byte
        self.at = at
        self.count = 0
        self.has_paused = threading.Event()
        self.may_go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        def paused():
            iterator = iter(parts)
            while True:
                if self.at is not None and self.count == self.at:
                    self.has_paused.set()
                    assert self.may_go_on.wait(20)
                self.count += 1
                part = next(iterator, None)  # asked for when there is room for it, as a store on a disk does
                if part is None:
                    return
                yield part

        self.inner.write(name, paused(), size_bytes=size_bytes)

    def files(self):
        return {
            f"{directory}/{name}": self.inner.read(f"{directory}/{name}")
            for directory in self.inner.list()
            if directory.startswith("step-")
            for name in self.inner.list(directory)
        }


class Job:
    """A small mutable run with everything that changes at another moment than the parameters do."""

    def __init__(self, kind="adamw"):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = OPTIMIZERS[kind]([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = None if kind == "lbfgs" else torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.notes = {"seen": [], "scale": torch.ones(3)}
        self.live = attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra={"ema": self.ema, "notes": (lambda: self.notes, self._take)},
        )

    def _take(self, notes):
        self.notes = notes

    def train(self):
        x = torch.randn(8, 4)

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)
        if self.scheduler is not None:
            self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.notes["seen"].append(float(x.sum()))
        self.notes["scale"].mul_(0.5)
        self.live.advance(samples=8)


def momentum_job():
    """Fused SGD moves no version counter: whatever is written past the gate would be torn in silence."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    live = attach(model, optimizer)

    def train():
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        live.advance(samples=4)

    train()
    return live, train
