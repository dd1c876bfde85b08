"""A loop saved by hand as an expert would: every stream and position, written to a temporary file and renamed, the epoch drawn again."""

import random

import numpy as np
import torch

from loops import task


def streams():
    """The random streams of the process."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def put_streams(state):
    """Write them back."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def train(case, *, resume):
    """Train, from the file if there is one."""
    task.seed_all()
    net = task.make_net(case)
    optimizers = task.optimizers_of(case, net)
    scheduler = task.scheduler_of(case, optimizers[0])
    average = task.average_of(case, net)
    path = case.folder / "checkpoint.pt"
    position = {"epoch": 0, "batches": 0, "step": 0, "epoch_streams": None}
    now = None
    if resume and path.exists():
        saved = torch.load(path, weights_only=False)
        net.load_state_dict(saved["net"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
        if average is not None:
            average.load_state_dict(saved["average"])
        position, now = saved["position"], saved["streams"]
    step, skip = position["step"], position["batches"]
    loader = task.loader_of(case)
    for epoch in range(position["epoch"], case.epochs):
        if now is not None:
            put_streams(position["epoch_streams"] if skip else now)
        began = streams()
        batches = iter(loader)
        for _ in range(skip):
            next(batches)
        if now is not None and skip:
            put_streams(now)  # the skipped batches have drawn their order and their noise again
        for number, (x, y) in enumerate(batches, skip + 1):
            loss = task.loss_of(net, x, y) / case.accumulate
            loss.backward()
            if number % case.accumulate:
                continue
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(net)
            step += 1
            if step % case.save_every == 0:
                is_end = number == len(loader)
                torch.save(
                    {
                        "net": net.state_dict(),
                        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                        "scheduler": None if scheduler is None else scheduler.state_dict(),
                        "average": None if average is None else average.state_dict(),
                        "position": {
                            "epoch": epoch + is_end,
                            "batches": 0 if is_end else number,
                            "step": step,
                            "epoch_streams": began,
                        },
                        "streams": streams(),
                    },
                    path.with_suffix(".new"),
                )
                path.with_suffix(".new").replace(path)
            task.after_step(case, step, loss.item())
        skip, now = 0, None
    task.finish(case, net, average)


def evaluate(net, loader):
    """The sum over samples, divided once."""
    total, samples = 0.0, 0
    for x, y in loader:
        total += task.loss_of(net, x, y).item() * len(x)
        samples += len(x)
    return total / samples
