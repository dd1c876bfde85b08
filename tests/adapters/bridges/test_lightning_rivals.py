"""A `Trainer` of Lightning that is killed and resumed ends with the bits of one that was never killed; `make rivals` installs it."""

import json
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import trainfold
from trainfold.adapters.bridges.lightning import LightningCallback
from trainfold.core.state.state import Opaque, TrainState

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.slow(120), pytest.mark.long, pytest.mark.filterwarnings("ignore")]
KEPT = TrainState(extra={"lightning": Opaque({})})
STEPS = 9  # three epochs of three: of six batches two, two and two


class Data(Dataset):
    """Of samples that are drawn anew in each epoch."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.randn(3, generator=torch.Generator().manual_seed(index)) + torch.rand(3), torch.tensor(index)


class Module(lightning.LightningModule):
    """With dropout and running averages; it writes what it sees to a file."""

    def __init__(self, seen, kind="step", lr=0.05):
        super().__init__()
        self.save_hyperparameters("lr")
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))  # fmt: skip
        self.mean = torchmetrics.MeanMetric()
        self.seen, self.kind = seen, kind

    def training_step(self, batch, number):
        values, indices = batch
        loss = self.net(values).square().mean()
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        step = self.trainer.global_step
        with Path(self.seen).open("a") as file:
            file.write(f"{self.trainer.current_epoch} {number} {step} {indices.tolist()} {loss.item().hex()}\n")
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        if self.kind == "step":
            scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        else:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            scheduler = {"scheduler": plateau, "monitor": self.kind}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Loaders(lightning.LightningDataModule):
    """With workers, and a state."""

    state = {"version": 3}

    def train_dataloader(self):
        return DataLoader(Data(), batch_size=4, shuffle=True, num_workers=2)

    def val_dataloader(self):
        return DataLoader(Data(), batch_size=7)

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        assert state == self.state


class Kills(lightning.Callback):
    """Kills its process within a step."""

    def __init__(self, step):
        self.step = step

    def on_before_optimizer_step(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(run, callbacks, **changed):
    args = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}  # fmt: skip
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(default_root_dir=f"{run}-out", callbacks=callbacks, **quiet, **(args | changed))


def train(run, die_at=None, *, kind="step", workers=False, extra=(), rename=None, manager=None, **changed):
    lightning.seed_everything(0, workers=True, verbose=False)
    callback = LightningCallback(run, **{"every": 1, "keep_last": 3, **(manager or {})})
    trainer = trainer_of(run, [callback, Kills(die_at), *(each() for each in extra)], **changed)
    module = Module(f"{run}.seen", kind)
    if rename is not None:
        kill_at_rename(rename)
    loaders = [Loaders()] if workers else [DataLoader(Data(), batch_size=4, shuffle=True), DataLoader(Data(), batch_size=7)]  # fmt: skip
    trainer.fit(module, *loaders, ckpt_path=callback.resume(trainer))
    return trainer, module


def kill_at_rename(number):
    """Kill this process before so many files of saves get their final names."""
    left = iter(range(number))

    def hook(event, _):
        if event == "os.rename" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(function, *arguments, **named):
    """The exit code of a process of its own, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments, **named)
        except BaseException:  # noqa: BLE001 - a fork of the tests may not return into them
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def last(run):
    """The step and the fingerprints of the last checkpoint, Lightning's own part with its values, and every batch that was seen."""
    plan = trainfold.plan(run, like=KEPT, components=["lightning"])
    kept = trainfold.load(run, like=KEPT, components=["lightning"]).extra["lightning"].value
    prints = {each.name: each.fingerprint for each in plan.manifest.components if each.name != "lightning"}
    assert {"model", "optimizer", "scheduler", "dataset", "rng"} <= prints.keys()
    return plan.step, prints, json.dumps(kept, default=repr, sort_keys=True), {*Path(f"{run}.seen").read_text().splitlines()}  # fmt: skip


def step_of(run):
    return trainfold.plan(run, like=KEPT, components=["lightning"]).step


@pytest.mark.parametrize(
    ("changed", "kills"),
    [
        ({}, [0, 1, 2, 3, 5, 8]),  # before the first save; inside an epoch; at its end and start; at the last step
        ({"manager": {"mode": "async"}}, [1, 4]),
        ({"kind": "loss_epoch", "val_check_interval": 2}, [1, 2, 7]),  # what it waits for is summed over the epoch
        ({"kind": "val_loss", "extra": [partial(lightning.pytorch.callbacks.EarlyStopping, "mean", patience=1)]}, [1, 7]),  # fmt: skip
        ({"workers": True}, [1, 3]),
        ({"limit_train_batches": 4}, [1, 2]),
        ({"max_epochs": -1, "max_steps": 8, "manager": {"every": 2}}, [1, 3, 7]),
        ({"extra": [partial(lightning.pytorch.callbacks.EMAWeightAveraging, decay=0.9)]}, [1, 4]),
    ],
    ids=["plain", "async", "plateau", "early", "workers", "limit", "steps", "ema"],
)
def test_a_killed_trainer_resumes_bit_for_bit(changed, kills, tmp_path):
    """The weights, every component, what Lightning saves of itself, and the batches with their losses."""
    assert forked(train, str(tmp_path / "whole"), **changed) == 0
    whole = last(tmp_path / "whole")
    for step in kills:
        run = str(tmp_path / f"killed-{step}")
        assert forked(train, run, step, **changed) == -signal.SIGKILL
        assert forked(train, run, **changed) == 0
        assert last(run) == whole, step


def test_a_trainer_that_was_killed_within_a_save_resumes_bit_for_bit(tmp_path):
    assert forked(train, str(tmp_path / "whole")) == 0
    whole, steps = last(tmp_path / "whole"), set()
    for number in (3, 7, 12, 20):
        run = str(tmp_path / f"killed-{number}")
        assert forked(train, run, rename=number) == -signal.SIGKILL
        steps.add(step_of(run) if Path(run, "latest").exists() else 0)
        assert forked(train, run) == 0
        assert last(run) == whole, number
    assert len(steps) > 1
    assert STEPS not in steps
