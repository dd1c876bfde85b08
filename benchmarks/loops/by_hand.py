"""A loop that saves by hand as the tutorials do: model, optimizer and epoch in one dict, through torch.save."""

import torch

from loops import task


def train(case, *, resume):
    """Train, from the file if there is one."""
    task.seed_all()
    net = task.make_net(case)
    optimizers = task.optimizers_of(case, net)
    scheduler = task.scheduler_of(case, optimizers[0])
    average = task.average_of(case, net)
    path = case.folder / "checkpoint.pt"
    first, step = 0, 0
    if resume and path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model_state_dict"])
        for optimizer, state in zip(optimizers, saved["optimizer_state_dict"], strict=True):
            optimizer.load_state_dict(state)
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler_state_dict"])
        if average is not None:
            average.load_state_dict(saved["average_state_dict"])
        first, step = saved["epoch"], saved["step"]
    loader = task.loader_of(case)
    for epoch in range(first, case.epochs):
        for number, (x, y) in enumerate(loader):
            loss = task.loss_of(net, x, y) / case.accumulate
            loss.backward()
            if (number + 1) % case.accumulate:
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
                torch.save(
                    {
                        "epoch": epoch,
                        "step": step,
                        "model_state_dict": net.state_dict(),
                        "optimizer_state_dict": [optimizer.state_dict() for optimizer in optimizers],
                        "scheduler_state_dict": None if scheduler is None else scheduler.state_dict(),
                        "average_state_dict": None if average is None else average.state_dict(),
                    },
                    path,
                )
            task.after_step(case, step, loss.item())
    task.finish(case, net, average)


def evaluate(net, loader):
    """The mean of the batches' means."""
    losses = [task.loss_of(net, x, y).item() for x, y in loader]
    return sum(losses) / len(losses)
