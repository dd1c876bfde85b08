"""accelerate: prepared objects, save_state and load_state, with its stateful loader and its seedable sampler."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

from loops import task


def train(case, *, resume):
    """Train, from the newest checkpoint if there is one."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
        project_config=ProjectConfiguration(project_dir=case.run, automatic_checkpoint_naming=True),
    )
    net = task.make_net(case)
    made = task.optimizers_of(case, net)
    scheduler = task.scheduler_of(case, made[0])
    average = task.average_of(case, net)
    prepared = accelerator.prepare(net, task.loader_of(case), *made)
    module, loader, optimizers = prepared[0], prepared[1], prepared[2:]
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    if average is not None:
        accelerator.register_for_checkpointing(average)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoints = case.folder / "checkpoints"
    if resume and checkpoints.exists():
        newest = max(checkpoints.iterdir(), key=lambda path: int(path.name.rsplit("_", 1)[1]))
        accelerator.load_state(str(newest))
        accelerator.project_configuration.iteration = int(newest.name.rsplit("_", 1)[1]) + 1
    for epoch in range(progress.epoch, case.epochs):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(module):
                loss = task.loss_of(module, x, y)
                accelerator.backward(loss)
                for optimizer in optimizers:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if average is not None:
                average.update_parameters(net)
            progress.step += 1
            if progress.step % case.save_every == 0:
                accelerator.save_state()
            task.after_step(case, progress.step, loss.item())
    task.finish(case, net, average)


class Progress:
    """The progress of the loop."""

    def __init__(self):
        self.epoch = self.step = 0

    def state_dict(self):
        """Both counters."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        """Restore both counters."""
        self.epoch, self.step = state["epoch"], state["step"]


def evaluate(net, loader):
    """Return the mean of the gathered losses of each batch, as in its examples."""
    accelerator = Accelerator(cpu=True)
    net, loader = accelerator.prepare(net, loader)
    losses = []
    with torch.no_grad():
        for x, y in loader:
            loss = task.loss_of(net, x, y)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(x))))
    return torch.cat(losses).mean().item()
