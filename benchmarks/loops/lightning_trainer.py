"""Lightning's Trainer, with its checkpoint callback, its averaging callback and a loader that has a state."""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from loops import task


class Module(lightning.LightningModule):
    """The task."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.net = task.make_net(case)

    def training_step(self, batch, _):
        """Return the loss; Lightning divides it by the number of accumulated batches."""
        return task.loss_of(self.net, *batch)

    def configure_optimizers(self):
        """Return one optimizer; several need manual optimization, in which Lightning counts the steps of each."""
        optimizer = task.optimizers_of(self.case, self.net)[0]
        scheduler = task.scheduler_of(self.case, optimizer)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Report(Callback):
    """Records the losses."""

    def __init__(self, case):
        self.case = case
        self.seen = 0

    def on_train_batch_start(self, trainer, *_):
        """Return the progress of the run."""
        self.seen = trainer.global_step

    def on_train_batch_end(self, trainer, module, outputs, *_):
        """Report a batch that made a step."""
        del module
        if trainer.global_step > self.seen:
            task.after_step(self.case, trainer.global_step, outputs["loss"])


def train(case, *, resume):
    """Train, from the last checkpoint if there is one."""
    if case.two_optimizers:
        raise task.NotOffered
    lightning.seed_everything(0, workers=True, verbose=False)
    module = Module(case)
    folder = case.folder / "checkpoints"
    callbacks = [
        Report(case),
        ModelCheckpoint(folder, every_n_train_steps=case.save_every, save_top_k=-1, save_last=True),
    ]
    if case.ema:
        callbacks.append(EMAWeightAveraging(decay=task.DECAY))
    trainer = lightning.Trainer(
        max_epochs=case.epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        accumulate_grad_batches=case.accumulate,
        default_root_dir=case.folder,
    )
    is_there = resume and folder.exists()
    trainer.fit(module, task.loader_of(case, StatefulDataLoader), ckpt_path="last" if is_there else None)
    task.finish(case, module.net)


class Evaluation(lightning.LightningModule):
    """An evaluation that logs the mean of a batch, as the documentation does."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def test_step(self, batch, _):
        """Log it; Lightning weighs it by the batch's size."""
        self.log("loss", task.loss_of(self.net, *batch))


def evaluate(net, loader):
    """Return what it logs."""
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    with torch.no_grad():
        return trainer.test(Evaluation(net), loader, verbose=False)[0]["loss"]
