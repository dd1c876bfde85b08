"""Lightning's Fabric: the loop of a script, its state in one dict with a loader that has a state, through fabric.save."""

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from loops import by_hand, task


def train(case, *, resume):
    """Train, from the checkpoint if there is one."""
    lightning.seed_everything(0, workers=True, verbose=False)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = task.make_net(case)
    made = task.optimizers_of(case, net)
    scheduler = task.scheduler_of(case, made[0])
    average = task.average_of(case, net)
    module, *optimizers = fabric.setup(net, *made)
    loader = task.loader_of(case, StatefulDataLoader)
    state = {"net": module, "loader": loader, "epoch": 0, "step": 0}
    state |= {f"optimizer_{index}": optimizer for index, optimizer in enumerate(optimizers)}
    state |= {"scheduler": scheduler} if scheduler is not None else {}
    state |= {"average": average} if average is not None else {}
    path = case.folder / "checkpoint"
    if resume and path.exists():
        fabric.load(path, state)
    for epoch in range(state["epoch"], case.epochs):
        for number, (x, y) in enumerate(loader):
            loss = task.loss_of(module, x, y) / case.accumulate
            fabric.backward(loss)
            if (number + 1) % case.accumulate:
                continue
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if average is not None:
                average.update_parameters(net)
            state["epoch"], state["step"] = epoch, state["step"] + 1
            if state["step"] % case.save_every == 0:
                fabric.save(path, state)
            task.after_step(case, state["step"], loss.item())
    task.finish(case, net, average)


def evaluate(net, loader):
    """Evaluate in the script, as Fabric leaves it to the script."""
    with torch.no_grad():
        return by_hand.evaluate(net, loader)
