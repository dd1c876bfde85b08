"""The same loop with trainfold's lines."""

import torch

import trainfold
from loops import task
from trainfold import metrics as M


def train(case, *, resume):
    """Train, from the newest checkpoint if there is one."""
    del resume  # the script is the same at each start
    task.seed_all()
    net = task.make_net(case)
    optimizers = task.optimizers_of(case, net)
    scheduler = task.scheduler_of(case, optimizers[0])
    average = task.average_of(case, net)
    extra = {} if average is None else {"average": average}
    extra |= {f"optimizer_{index}": optimizer for index, optimizer in enumerate(optimizers) if index}
    live = trainfold.attach(net, optimizers[0], scheduler=scheduler, loader=task.loader_of(case), extra=extra)
    with trainfold.CheckpointManager(case.folder / "run", every=case.save_every) as manager:
        manager.restore(live)
        number = live.progress.samples // case.batch_size
        for x, y in live.batches(epochs=case.epochs):
            loss = task.loss_of(net, x, y) / case.accumulate
            loss.backward()
            number += 1
            if number % case.accumulate:
                live.advance(samples=len(x), steps=0)
                continue
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(net)
            live.advance(samples=len(x))
            manager.step(live)
            task.after_step(case, live.progress.step, loss.item())
    task.finish(case, net, average)


def evaluate(net, loader):
    """The ratio of exact sums, over chunks that do not depend on the loader's batches."""

    def forward(batch):
        x, y = batch
        nll = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
        return {"loss": (nll, len(nll))}

    with torch.no_grad():
        return trainfold.evaluate(forward, loader, {"loss": M.Ratio()}, chunk=32)["loss"]
