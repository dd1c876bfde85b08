"""A `Trainer` of Lightning that is killed and resumed ends with the bits of one that was never killed; `make rivals` installs it."""

import contextlib
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.forks import forked, kill_at_rename
from torch.utils.data import DataLoader, Dataset

import trainfold
from trainfold import CheckpointManager
from trainfold.adapters.bridges.lightning import LightningCallback
from trainfold.backends.runs.load import ResumeDrift
from trainfold.core.state.state import Opaque, TrainState

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.slow(120), pytest.mark.long, pytest.mark.filterwarnings("ignore")]
KEPT = TrainState(extra={"lightning": Opaque({})})
STEPS = 9  # three epochs of three: of six batches two, two and two


class Data(Dataset):
    """Of samples that are drawn again in each epoch."""

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

    def train_dataloader(self):
        return DataLoader(Data(), batch_size=4, shuffle=True, num_workers=2)

    def val_dataloader(self):
        return DataLoader(Data(), batch_size=7)

    def state_dict(self):
        return {"version": 3}

    def load_state_dict(self, state):
        assert state == {"version": 3}


def steady():
    """A validation loader with a worker that stays."""
    data = [(torch.full((3,), 0.1 * i), torch.tensor(i)) for i in range(8)]
    return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)


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


def train(run, die_at=None, *, kind="step", workers=False, extra=(), rename=None, manager=None, validates=None, **changed):  # fmt: skip
    lightning.seed_everything(0, workers=True, verbose=False)
    callback = LightningCallback(run, **{"every": 1, "keep_last": 3, **(manager or {})})
    trainer = trainer_of(run, [callback, Kills(die_at), *(each() for each in extra)], **changed)
    module = Module(f"{run}.seen", kind)
    if rename is not None:
        kill_at_rename(rename)
    loaders = [Loaders()] if workers else [DataLoader(Data(), batch_size=4, shuffle=True), DataLoader(Data(), batch_size=7)]  # fmt: skip
    if validates is not None:
        loaders[1] = validates()
    trainer.fit(module, *loaders, ckpt_path=callback.resume(trainer))
    return trainer, module


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
        (
            {"kind": "val_loss", "extra": [partial(lightning.pytorch.callbacks.EarlyStopping, "mean", patience=1)]},
            [1, 7],
        ),
        ({"workers": True}, [1, 3]),
        ({"limit_train_batches": 4}, [1, 2]),
        ({"max_epochs": -1, "max_steps": 8, "manager": {"every": 2}}, [1, 3, 7]),
        ({"extra": [partial(lightning.pytorch.callbacks.EMAWeightAveraging, decay=0.9)]}, [1, 4]),
        ({"precision": "bf16-true"}, [4]),  # the trainer reads a checkpoint before it has converted the module
        (
            {
                "accumulate_grad_batches": 1,
                "extra": [partial(lightning.pytorch.callbacks.GradientAccumulationScheduler, {0: 1, 1: 2})],
            },
            [7],
        ),
        ({"validates": steady}, [1, 4]),
    ],
    ids=[
        "plain",
        "async",
        "plateau",
        "early",
        "workers",
        "limit",
        "steps",
        "ema",
        "bfloat16",
        "accumulation",
        "steady",
    ],
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


@pytest.mark.parametrize("part", ["model", "lightning"])
def test_a_damaged_checkpoint_is_passed_over_with_its_loops(part, tmp_path):
    """A module of one step with the loops of another would leave out the steps between them."""
    assert forked(train, str(tmp_path / "whole")) == 0
    run = tmp_path / "a"
    assert forked(train, str(run), 4) == -signal.SIGKILL
    file = next((run / "step-00000004").glob(f"{part}-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    if part == "model":
        with pytest.raises(
            trainfold.errors.InvalidState,
            match=r"step 4, at which the trainer begins, found the run at step 3.*set aside",
        ):
            train(str(run))
    assert forked(train, str(run)) == 0
    assert last(run) == last(tmp_path / "whole")


class EachEpoch(Module):
    """Its scheduler steps at the end of an epoch."""

    def configure_optimizers(self):
        made = super().configure_optimizers()
        return {**made, "lr_scheduler": {**made["lr_scheduler"], "interval": "epoch"}}


def test_a_scheduler_that_is_stepped_otherwise_is_a_warning(tmp_path):
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    callback = LightningCallback(run, every=1)
    trainer = trainer_of(run, [callback])
    with pytest.warns(ResumeDrift, match="'interval': 'step'.*wanted.*'interval': 'epoch'"):
        trainer.fit(
            EachEpoch(f"{run}.seen"), DataLoader(Data(), batch_size=4, shuffle=True), ckpt_path=callback.resume(trainer)
        )


# --- beyond one run ---------------------------------------------------------------------------------------------------


def fitted(run, **changed):
    """A run that has ended: its trainer and module."""
    trainer, module = train(str(run), **changed)
    return trainer, {name: value.clone() for name, value in module.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_run_that_had_ended_has_its_weights_and_can_be_longer(tmp_path):
    """With the bits of one that was planned so; a module that the trainer has nothing left to do for has them, too."""
    _, whole = fitted(tmp_path / "whole", max_epochs=4)
    _, short = fitted(tmp_path / "a")
    trainer, again = fitted(tmp_path / "a")
    assert trainer.global_step == STEPS
    assert equal(again, short)
    trainer, longer = fitted(tmp_path / "a", max_epochs=4)
    assert trainer.current_epoch == 4
    assert equal(longer, whole)
    assert last(tmp_path / "a")[3] == last(tmp_path / "whole")[3]


def test_the_path_of_the_run_is_a_checkpoint_for_the_trainer(tmp_path):
    """Also to test with, and in a run without `resume`; another path is a file as before."""
    run = str(tmp_path / "a")
    trainer, weights = fitted(run)
    trainer.save_checkpoint(f"{run}.ckpt")
    assert "optimizer_states" in torch.load(f"{run}.ckpt", weights_only=False)
    callback = LightningCallback(run)
    trainer, module = trainer_of(run, [callback]), Module(f"{run}.seen")
    trainer.validate(module, DataLoader(Data(), batch_size=7), ckpt_path=run, verbose=False)
    assert equal(module.state_dict(), weights)
    trainer, module = trainer_of(run, [LightningCallback(run)], max_epochs=4), Module(f"{run}.seen")
    trainer.fit(module, DataLoader(Data(), batch_size=4, shuffle=True), ckpt_path=run)
    assert step_of(run) == 12


def stopped(run, ask, step, requests, **changed):
    """Train until a request to stop, which comes within a step."""

    class Asks(lightning.Callback):
        def on_before_optimizer_step(self, trainer, *_):
            if trainer.global_step == step:
                ask()

    with contextlib.suppress(SystemExit):  # as Lightning ends at a SIGTERM
        train(run, extra=[Asks], manager={"every": 100, "requests": requests()}, **changed)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("by", ["file", "signal"])
def test_a_request_to_stop_saves_and_ends(by, step, tmp_path):
    """In the middle of an epoch, and at its last step."""
    changed = {"limit_val_batches": 0}
    assert forked(train, str(tmp_path / "whole"), **changed) == 0
    run = str(tmp_path / "a")
    ask, requests = {
        "file": (Path(run, "STOP").touch, partial(trainfold.StopFile, run, every_secs=0)),
        "signal": (partial(signal.raise_signal, signal.SIGTERM), trainfold.SignalRequests),
    }[by]
    assert forked(stopped, run, ask, step, requests, **changed) == 0
    assert step_of(run) == step + 1
    Path(run, "STOP").unlink(missing_ok=True)
    assert forked(train, run, **changed) == 0
    assert last(run)[1:] == last(tmp_path / "whole")[1:]


class Collects(Module):
    """It has a list, which nothing saves."""

    def on_train_start(self):
        self.outputs = []

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.outputs.append(loss.item())
        return loss


def test_what_a_module_keeps_without_saving_it_is_named(tmp_path, caplog):
    """And nothing of the trainer, to which each module of Lightning refers."""
    run = str(tmp_path / "a")
    callback = LightningCallback(run, every=1)
    trainer = trainer_of(run, [callback])
    trainer.fit(Collects(f"{run}.seen"), one_loader(), ckpt_path=callback.resume(trainer))
    assert "model.outputs" in caplog.text
    assert "model._" not in caplog.text


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, "last"])
def test_a_trainer_that_does_not_resume_is_refused(path, tmp_path):
    """Without what `resume` returns, a trainer would begin again, and save that over the run."""
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    trainer = trainer_of(run, [LightningCallback(run, every=1)])
    with pytest.raises(trainfold.errors.InvalidState, match=r"begins at step 2, as the run does, found step 0.*resume"):
        trainer.fit(Module(f"{run}.seen"), DataLoader(Data(), batch_size=4, shuffle=True), ckpt_path=path)
    assert step_of(run) == 2


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    run = str(tmp_path / "a")
    trainer = trainer_of(run, [LightningCallback(run, every=1)])
    with pytest.raises(trainfold.errors.InvalidState, match="which is None in a new run"):
        trainer.fit(Module(f"{run}.seen"), DataLoader(Data(), batch_size=4), ckpt_path=run)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"fast_dev_run": True}, "fast_dev_run=False"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=0"),
    ],
)
def test_settings_with_which_no_resume_is_exact_are_refused(changed, expected, tmp_path):
    callback = LightningCallback(str(tmp_path / "a"))
    with pytest.raises(trainfold.errors.InvalidArgument, match=expected):
        callback.resume(trainer_of(tmp_path / "a", [callback], **changed))
    with pytest.raises(trainfold.errors.InvalidArgument, match="a Trainer that has this callback"):
        callback.resume(trainer_of(tmp_path / "a", []))


class Manual(Module):
    """It makes its steps itself."""

    automatic_optimization = False


class Pulls(Module):
    """It takes the iterator over the batches."""

    def training_step(self, dataloader_iter):
        raise AssertionError


class Unsaveable(Module):
    """It adds to a checkpoint what only pickle could hold."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"function": lambda: None}


class KeepsModules(Module):
    """It keeps a module as a hyperparameter, as Lightning's first page does."""

    def __init__(self, seen):
        super().__init__(seen)
        self.hparams["kind"] = torch.nn.Linear(1, 1)


def one_loader():
    return DataLoader(Data(), batch_size=4)


@pytest.mark.parametrize(
    ("made", "loaders", "expected"),
    [
        (Manual, one_loader, "automatic_optimization=True"),
        (Pulls, one_loader, r"training_step\(batch\)"),
        (KeepsModules, one_loader, r"hyper_parameters.*'kind'.*Linear; leave .*save_hyperparameters\(ignore="),
        (Unsaveable, one_loader, r"\['mine'\]\['function'\]: expected a tensor"),
        (Module, lambda: [one_loader(), one_loader()], "one training loader, with a length, found several"),
        (Module, lambda: iter(one_loader()), "attach.loader"),
    ],
    ids=["manual", "iterator", "hyperparameter", "unsaveable", "loaders", "loader"],
)
def test_what_cannot_be_followed_or_saved_is_refused_by_name(made, loaders, expected, tmp_path):
    run = str(tmp_path / "a")
    callback = LightningCallback(run, every=1)
    trainer = trainer_of(run, [callback], gradient_clip_val=None, accumulate_grad_batches=1)
    with pytest.raises(trainfold.errors.TrainfoldError, match=expected):
        trainer.fit(made(f"{run}.seen"), loaders(), ckpt_path=callback.resume(trainer))
    CheckpointManager(run).close()  # its lock is free


def test_other_accumulation_and_other_data_are_refused_at_a_resume(tmp_path):
    run = str(tmp_path / "a")
    assert forked(train, run, 2) == -signal.SIGKILL
    callback = LightningCallback(run, every=1)
    trainer = trainer_of(run, [callback], accumulate_grad_batches=3)
    with pytest.raises(trainfold.errors.ResumeRefused, match="accumulate_grad_batches"):
        trainer.fit(Module(f"{run}.seen"), DataLoader(Data(), batch_size=4), ckpt_path=callback.resume(trainer))


def test_a_callback_that_replaces_the_scheduler_is_refused(tmp_path):
    run = str(tmp_path / "a")
    averaging = partial(lightning.pytorch.callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=2)
    with pytest.raises(trainfold.errors.InvalidState, match="such as StochasticWeightAveraging"):
        train(run, extra=[averaging])


# --- the page ---------------------------------------------------------------------------------------------------------


def of_page(run):
    """Run what the page says, in a folder of its own."""
    os.chdir(run)
    lightning.seed_everything(0, verbose=False)
    page = (
        (Path(__file__).parents[3] / "docs/how-to/bridge-trainers.md")
        .read_text()
        .partition("## Trainer of Lightning")[2]
    )
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("every=500", "every=2"), names)
    kills = Kills(6) if not Path("runs").exists() else lightning.Callback()
    module = Module("seen")
    module.configure_callbacks = lambda: [kills]
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    names["fit"](module, DataLoader(Data(), batch_size=4, shuffle=True), max_epochs=2, logger=False, **quiet)


def test_the_lines_of_the_page_are_enough(tmp_path):
    assert forked(of_page, tmp_path) == -signal.SIGKILL
    assert forked(of_page, tmp_path) == 0
    lines = Path(tmp_path, "seen").read_text().splitlines()
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines}) + 1, "one batch was killed and came again"
    assert len(set(lines)) == 12
