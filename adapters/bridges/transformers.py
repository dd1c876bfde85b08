"""`TrainfoldCallback`: saves and resumes a ``transformers.Trainer`` through a `CheckpointManager`, in the middle of an epoch too."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from trainfold.adapters.batches.feed import length_of
from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.streams.rng_streams import bound_device, capture_streams, restore_streams
from trainfold.backends.runs.api import load, plan
from trainfold.backends.stores.local import Run
from trainfold.core.checks import mapping_given
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import Opaque, TrainState

_COUNTERS, _EPOCH, _PLACE = "trainer_state", "trainer_epoch", "trainfold-resume"
_ALIKE = ("seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers", "max_grad_norm",
          "bf16", "fp16", "label_smoothing_factor", "neftune_noise_alpha")  # fmt: skip
_CURE = "train with trainer.train(resume_from_checkpoint=callback.resume(trainer))"


@final
class TrainfoldCallback:
    """A callback that makes a ``Trainer`` resumable: killed and run again, it ends with the bits of a run that was never killed.

    Give it to the trainer, and pass what `resume` returns to ``train``; in a new run that is None::

        callback = TrainfoldCallback("runs/a", every=100, keep_last=2)
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    A checkpoint has the model, the optimizer, the scheduler, the scaler, the random streams, the trainer's own counters and log, and the
    streams of the start of the epoch, from which the order of its batches comes. It is saved before the next step begins, so after the
    log and the evaluation of its own. :doc:`/how-to/bridge-trainers` says where the host permits less.

    Args:
        run: a directory, or a store.
        arguments: those of `CheckpointManager`, such as ``every=``, ``keep_last=`` and ``requests=``. A request to stop ends the training.

    Examples:
        >>> TrainfoldCallback("runs/a", every=100)
        TrainfoldCallback('runs/a', every=100)
    """

    def __init__(self, run: Run, **arguments: Any) -> None:
        self._run, self._arguments = run, arguments
        self._trainer: Any = None
        self._manager: CheckpointManager | None = None
        self._live: Live | None = None
        self._device: torch.device | None = None
        self._epoch: dict[
            str, Any
        ] = {}  # its number, the streams that it has begun with, and what its batches are drawn by
        self._resumed: dict[str, Any] | None = None  # the streams of the checkpoint, until its next step begins
        self._counted: dict[
            str, Any
        ] = {}  # what `resume` has found: the trainer's counters and the states of its callbacks
        self._undo: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"TrainfoldCallback({', '.join([repr(self._run), *(f'{k}={v!r}' for k, v in self._arguments.items())])})"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the trainer calls every event that its version has
            return lambda *_, **__: None
        raise AttributeError(name)

    def resume(self, trainer: Any) -> str | None:
        """Take the run's lock, and return what ``train(resume_from_checkpoint=...)`` needs to go on; None for a new run.

        It is a directory in ``output_dir``, with the counters of the newest checkpoint and weights that the trainer reads and the
        callback then replaces; it is removed when training begins.

        Args:
            trainer: the ``Trainer`` that has this callback.

        Raises:
            InvalidArgument: for settings with which a resume would not be exact, or a trainer without this callback.
            RunLocked: if another process saves into this run.
        """
        check_trainer(trainer, self)
        args = trainer.args
        self.close()
        mine = {f"trainer.{name}": getattr(args, name) for name in _ALIKE}
        contract = {**mine, **mapping_given("contract", self._arguments.get("contract"))}
        manager = CheckpointManager(self._run, **{**self._arguments, "contract": contract})
        self._trainer, self._manager, self._counted = trainer, manager, {}
        wanted = TrainState(extra={_COUNTERS: Opaque({"json": ""})})
        if self._arguments.get("start_over") or isinstance(
            plan(self._run, like=wanted, components=[_COUNTERS]), Refusal
        ):
            return None  # where there are checkpoints all the same, the restore says why none will do
        counters = load(self._run, like=wanted, components=[_COUNTERS]).extra[_COUNTERS].value["json"]
        self._counted = json.loads(counters)
        place = Path(args.output_dir, _PLACE)
        trainer.save_model(str(place), _internal_call=True)
        (place / "trainer_state.json").write_text(counters)
        return str(place)

    def close(self) -> None:
        """Release the run, as the end of a training does; after one that an error or an interrupt has ended, another callback can take it."""
        if self._manager is not None:
            self._manager.close()
        while self._undo:
            self._undo.pop()()
        self._manager = self._live = self._trainer = self._resumed = None

    # --- events -------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach the trainer's objects, and restore them from the checkpoint that `resume` has found."""
        if self._trainer is None or self._manager is None:
            raise InvalidState("TrainfoldCallback", expected="a call of resume before train", found="none", fix=_CURE)
        begins = self._counted.get("global_step", 0)
        if state.global_step != begins:
            raise InvalidState("TrainfoldCallback", expected=f"a trainer that begins at step {begins}, as the run does",
                               found=f"step {state.global_step}", fix=_CURE)  # fmt: skip
        shutil.rmtree(Path(args.output_dir, _PLACE), ignore_errors=True)
        model, optimizer = given["model"], given["optimizer"]
        self._device = bound_device(list(model.parameters()))
        self._epoch = {
            "number": -1,
            "order": order_of(given["train_dataloader"]),
            "streams": capture_streams(self._device),
        }
        extra: dict[str, Any] = {
            _COUNTERS: (lambda: {"json": self._counters(state)}, lambda _: None),  # the trainer has read them itself
            _EPOCH: (lambda: self._epoch, self._take_epoch),
        }
        if (scaler := getattr(self._trainer.accelerator, "scaler", None)) is not None:
            extra["scaler"] = scaler
        plain = getattr(
            optimizer, "optimizer", optimizer
        )  # the trainer opens accelerate's window before this callback saves
        self._live = live = attach(model, plain, scheduler=given["lr_scheduler"], extra=extra)
        if self._manager.restore(live).is_fresh:
            return
        if live.progress.step != begins:
            raise InvalidState("TrainfoldCallback", expected=f"the checkpoint of step {begins}, at which the trainer begins",
                               found=f"that it is damaged, and restored that of step {live.progress.step}",
                               fix="start the training again: the damaged one is set aside, and the trainer begins at the other")  # fmt: skip
        self._resumed = capture_streams(self._device)
        if args.eval_on_start:  # only a start evaluates
            args.eval_on_start = False
            self._undo.append(lambda: setattr(args, "eval_on_start", True))
        if begins >= state.max_steps:  # the trainer looks only after a step
            control.should_training_stop = True
            trainer = self._trainer
            trainer._run_epoch = lambda **_: None  # noqa: SLF001 - it has no public way to make no step
            self._undo.append(lambda: delattr(trainer, "_run_epoch"))

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Remember the streams that the order of the epoch comes from, or put those back with which this epoch had begun."""
        epoch = int(state.epoch)
        if self._resumed is None and state.epoch != epoch:
            raise InvalidState("TrainfoldCallback", expected="epochs with as many batches as the trainer counts on",
                               found=f"one that ended at epoch {state.epoch:g}",
                               fix="train on a dataset that has a length, without should_epoch_stop: a resume could not find its batch")  # fmt: skip
        if self._resumed is not None and self._epoch["number"] == epoch:
            restore_streams(self._epoch["streams"], self._device)
            return
        if self._resumed is not None:  # a run that had ended goes on
            restore_streams(self._resumed, self._device)
            self._resumed = None
        self._epoch = {**self._epoch, "number": epoch, "streams": capture_streams(self._device)}

    def on_step_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Save if the steps so far make it due; the first one of a resume begins with the streams of its checkpoint."""
        if self._resumed is not None:
            restore_streams(self._resumed, self._device)
            self._resumed = None
            self._restore_callbacks()
        elif self._live is not None and self._manager is not None and self._live.progress.step:
            self._manager.step(self._live)
            control.should_training_stop |= self._manager.should_stop

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Count the step."""
        if self._live is not None:
            self._live.advance()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Save the last state, but after a request to stop, which has saved already, and release the run."""
        if self._resumed is not None:  # the run had ended
            restore_streams(self._resumed, self._device)
            self._resumed = None
        if self._live is not None and self._manager is not None and not self._manager.should_stop:
            self._manager.finish(self._live)
        self.close()

    # --- state of the trainer -----------------------------------------------------------------------------------------

    def _counters(self, state: Any) -> str:
        """The trainer's state as its own saves write it, with the state of the callbacks as it is now."""
        self._trainer.store_flos()
        kept: dict[str, Any] = {}
        for each in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if hasattr(type(each), "from_state"):
                kept.setdefault(type(each).__name__, []).append(each.state())
        plain = {
            **dataclasses.asdict(state),
            "stateful_callbacks": {n: v if len(v) > 1 else v[0] for n, v in kept.items()},
        }
        return json.dumps(plain, sort_keys=True)

    def _restore_callbacks(self) -> None:
        """Give callbacks that have a state what they had counted; their arguments are those of the script."""
        saved = {n: v if isinstance(v, list) else [v] for n, v in self._counted["stateful_callbacks"].items()}
        for each in self._trainer.callback_handler.callbacks:
            if hasattr(type(each), "from_state") and saved.get(type(each).__name__):
                vars(each).update(saved[type(each).__name__].pop(0)["attributes"])

    def _take_epoch(self, saved: dict[str, Any]) -> None:
        found = self._epoch["order"]
        if any(found.get(name) != value for name, value in saved["order"].items()):
            raise InvalidState(f"state.extra[{_EPOCH!r}]['order']", expected=f"batches drawn as in the run: {saved['order']}",
                               found=str(found),
                               fix="use the data, the seed and the sampler of the run; set_seed before train changes the order")  # fmt: skip
        self._epoch = saved


def check_trainer(trainer: Any, callback: object) -> None:
    """Refuse a trainer whose resume would not be exact, or that does not call the callback."""
    args = trainer.args
    found = [
        (trainer.callback_handler.callbacks.count(callback) != 1, "a Trainer that has this callback, once", "pass callbacks=[callback] to it"),
        (args.world_size > 1 or args.n_gpu > 1, "one process and at most one GPU", "write the loop, and attach its objects on every rank"),
        (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled, "a model that this process has whole", "write the loop, and attach its objects"),
        (args.load_best_model_at_end, "load_best_model_at_end=False", "load the best checkpoint after train: its weights are not those of the last step"),
        (args.ignore_data_skip, "ignore_data_skip=False", "leave it out: the batches of a resume would not be those of the run"),
        (args.dataloader_persistent_workers, "dataloader_persistent_workers=False",
         "leave it out: workers that stay draw from the random streams only when they start, and those of a resume start later"),
        (args.auto_find_batch_size, "auto_find_batch_size=False", "set the batch size: a resume could take another"),
    ]  # fmt: skip
    for is_wrong, expected, fix in found:
        if is_wrong:
            raise InvalidArgument("TrainfoldCallback.resume", expected=expected, found="another", fix=fix)


def order_of(loader: Any) -> dict[str, Any]:
    """What the order of the batches comes from, beside the streams: the sampler, its seed, and the number of batches and examples."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    seed = getattr(sampler, "initial_seed", None)
    return {
        "sampler": type(sampler).__name__,
        "seed": seed,
        "batches": length_of(loader),
        "examples": length_of(loader.dataset),
    }
