"""`LightningCallback`: saves and resumes a program of Lightning's ``Trainer`` through a `CheckpointManager`, in the middle of an epoch too."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.own_state.plain_form import from_plain, to_plain
from trainfold.backends.runs.api import load, plan
from trainfold.backends.stores.local import Run, open_store
from trainfold.core.checks import mapping_given
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import Opaque, TrainState

_KEPT = "lightning"
_ELSEWHERE = ("state_dict", "optimizer_states", "lr_schedulers")  # components of their own
_ALIKE = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "limit_train_batches", "overfit_batches")  # fmt: skip
_NOTHING = TrainState(extra={_KEPT: Opaque({})})
END = object()
_CURE = "train with trainer.fit(..., ckpt_path=callback.resume(trainer))"


@final
class LightningCallback:
    """A callback that makes a ``lightning.Trainer`` resumable: killed and run again, it ends with the bits of a run that was never killed.

    Give it to the trainer, and pass what `resume` returns to ``fit``; in a new run that is None::

        callback = LightningCallback("runs/a", every=100, keep_last=2)
        trainer = Trainer(..., callbacks=[callback])
        trainer.fit(module, loader, ckpt_path=callback.resume(trainer))

    A checkpoint has the module, the optimizer, the schedulers, the position in the data, the random streams, and what Lightning itself
    would save: its loops, callbacks, hyperparameters, precision and data module. It is saved where the next batch is asked for, so after the
    validation, and a resume goes on at that place. :doc:`/how-to/bridge-trainers` says where the host permits less.

    Args:
        run: a directory, or a store.
        arguments: those of `CheckpointManager`, such as ``every=``, ``keep_last=`` and ``requests=``. A request to stop ends the training.

    Examples:
        >>> LightningCallback("runs/a", every=100)
        LightningCallback('runs/a', every=100)
    """

    def __init__(self, run: Run, **arguments: Any) -> None:
        self._run, self._arguments = run, arguments
        self._trainer: Any = None
        self._manager: CheckpointManager | None = None
        self._loader: Any = None
        self._live: Live | None = None
        self._undo: list[Callable[[], None]] = []
        self._attached: tuple[Any, list[Any]] = None, []
        self._epochs: Iterator[int] = iter(())
        self._batches: Iterator[Any] = iter(())
        self._kept: dict[str, Any] = {}  # what Lightning saves, as the last restore or save had it
        self._checkpoint: dict[str, Any] = {}  # what Lightning saves, while it does
        self._is_at_end = False
        self._sums: dict[str, Any] = {}  # of what the resumed epoch had logged, until it logs again
        self._last = 0  # the step for which a save was considered last

    def __repr__(self) -> str:
        return f"LightningCallback({', '.join([repr(self._run), *(f'{k}={v!r}' for k, v in self._arguments.items())])})"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the trainer calls every event that its version has
            return lambda *_, **__: None
        raise AttributeError(name)

    @property
    def state_key(self) -> str:
        """The name by which the trainer tells callbacks apart."""
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run is saved by this callback, and not with it."""
        return {}

    @property
    def path(self) -> str:
        """The run, as ``ckpt_path=`` of the trainer names it."""
        return open_store(self._run).url

    def resume(self, trainer: Any) -> str | None:
        """Take the run's lock, and return what ``fit(ckpt_path=...)`` needs to go on; None for a new run.

        Args:
            trainer: the ``Trainer`` that has this callback.

        Raises:
            InvalidArgument: for settings with which a resume would not be exact, or a trainer without this callback.
            RunLocked: if another process saves into this run.
        """
        check_trainer(trainer, self)
        self._close()
        contract = {f"trainer.{name}": str(getattr(trainer, name)) for name in _ALIKE}
        contract |= mapping_given("contract", self._arguments.get("contract"))
        self._trainer, self._manager = (
            trainer,
            CheckpointManager(self._run, **{**self._arguments, "contract": contract}),
        )
        is_new = self._arguments.get("start_over") or isinstance(
            plan(self._run, like=_NOTHING, components=[_KEPT]), Refusal
        )
        return None if is_new else self.path

    # --- events -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Let the trainer's strategy read and write the run, and follow the batches of its training loader."""
        strategy, files = trainer.strategy, trainer.strategy.checkpoint_io
        self._undo.append(lambda: setattr(strategy, "checkpoint_io", files))
        strategy.checkpoint_io = RunOrFile(self, files, module)
        if stage != "fit":
            return
        if self._manager is None:
            self.resume(trainer)
        process = strategy.process_dataloader

        def followed(loader: Any) -> Any:
            loader = process(loader)
            return self._followed(loader) if trainer.training else loader

        self._undo.append(lambda: setattr(strategy, "process_dataloader", process))
        strategy.process_dataloader = followed

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count the batch, and its step if it has made one."""
        if self._live is not None:
            self._live.advance(steps=trainer.global_step - self._live.progress.step)
            self._sums = add_sums(trainer, self._sums)

    def on_train_end(self, _trainer: Any, _module: Any) -> None:
        """Save the last state, but after a request to stop, which has saved already."""
        if self._live is not None and self._manager is not None and not self._manager.should_stop:
            self._is_at_end = True
            self._manager.finish(self._live)

    def on_exception(self, *_: Any) -> None:
        """Release the run."""
        self._close()

    def teardown(self, _trainer: Any, _module: Any, stage: str) -> None:  # noqa: ARG002 - the trainer names it
        """Release the run, and leave the trainer as it was."""
        self._close()

    # --- batches ------------------------------------------------------------------------------------------------------

    def _followed(self, loader: Any) -> "Followed":
        if self._loader is not None or not hasattr(loader, "__len__"):
            raise InvalidArgument("LightningCallback", expected="one training loader, with a length",
                                  found="several" if self._loader is not None else f"{type(loader).__qualname__} without one",
                                  fix="write the loop, and attach its loaders")  # fmt: skip
        self._loader = loader
        return Followed(self, loader)

    def next_batch(self, *, begins: bool) -> Any:
        """The next batch; before it the run is restored, or saved if its steps make that due.

        Args:
            begins: whether it is the first one of an epoch, or of a resume.
        """
        if self._live is None or self._manager is None:
            self._live = self._begin()
            first = self._first_of_epoch(self._live)
            return self._first_of_epoch(self._live) if first is END else first  # the run had ended with an epoch
        if begins:
            next(self._epochs)
            self._batches = self._live.batches()
        if self._live.progress.step > self._last:
            self._last = self._live.progress.step
            self._check_attached()
            self._manager.step(self._live)
            self._trainer.should_stop |= self._manager.should_stop
        return next(self._batches)

    def _first_of_epoch(self, live: Live) -> Any:
        next(self._epochs)
        self._batches = live.batches()
        return next(self._batches, END)

    def _begin(self) -> Live:
        """Attach the trainer's objects and restore them; the loops, too, go on where they were."""
        trainer = self._trainer
        if self._manager is None or trainer is None:
            raise InvalidState("LightningCallback", expected="a trainer that calls its setup", found="none", fix=_CURE)
        check_module(trainer.lightning_module)
        self._attached = trainer.optimizers[0], [each.scheduler for each in trainer.lr_scheduler_configs]
        optimizer, schedulers = self._attached
        live = attach(
            trainer.lightning_module,
            optimizer,
            scheduler=schedulers[0] if len(schedulers) == 1 else schedulers or None,
            loader=self._loader,
            extra={_KEPT: (self._keep, self._take)},
        )
        step = self._manager.should_load(live).step or 0
        if step != trainer.global_step:
            if not step:
                self._manager.restore(live)  # raises the reasons why no checkpoint will do, if there are any
            raise InvalidState("LightningCallback", expected=f"a trainer that begins at step {step}, as the run does",
                               found=f"step {trainer.global_step}", fix=_CURE)  # fmt: skip
        self._is_at_end = False
        if not self._manager.restore(live).is_fresh:
            self._go_on()
        self._last = live.progress.step
        self._epochs = live.epochs(sys.maxsize)
        return live

    def _check_attached(self) -> None:
        optimizer, schedulers = self._attached
        now = [each.scheduler for each in self._trainer.lr_scheduler_configs]
        if self._trainer.optimizers[0] is not optimizer or [*map(id, now)] != [*map(id, schedulers)]:
            raise InvalidState("LightningCallback", expected="the optimizer and the schedulers that the training began with", found="others",
                               fix="leave out the callback that replaces them, such as StochasticWeightAveraging, or write the loop")  # fmt: skip

    def _go_on(self) -> None:
        trainer, kept = self._trainer, self._kept
        trainer.callback_metrics.update(kept["metrics"])
        if kept["is_at_end"]:
            return
        self._sums = kept["sums"]
        for name, states in kept["states"].items():
            vars(trainer.lightning_module.get_submodule(name)).update(states)
        fit = trainer.fit_loop
        fit.load_state_dict(kept["loops"]["fit_loop"])
        steps = fit.epoch_loop
        for each in (fit, steps, steps.val_loop, steps.automatic_optimization, steps.manual_optimization):
            each.on_iteration_done()  # it goes on inside of them, and does not begin them again

    # --- state of the trainer -----------------------------------------------------------------------------------------

    def _keep(self) -> dict[str, Any]:
        self._trainer.save_checkpoint(self.path, weights_only=False)
        taken, self._checkpoint = self._checkpoint, {}
        kept = {name: value for name, value in taken.items() if name not in _ELSEWHERE}
        if not is_alike(taken["state_dict"], self._trainer.strategy.lightning_module_state_dict()):
            kept["state_dict"] = taken["state_dict"]  # a hook has put others there, such as averages
        kept |= {
            "metrics": dict(self._trainer.callback_metrics),
            "sums": sums_of(self._trainer),
            "states": states_of_metrics(self._trainer.lightning_module),
            "is_at_end": self._is_at_end,
        }
        plain: dict[str, Any] = to_plain(kept, {})
        return plain

    def _take(self, kept: dict[str, Any]) -> None:
        self._kept = from_plain(kept, {})

    def taken(self, checkpoint: dict[str, Any]) -> None:
        """Take what the trainer saves."""
        self._checkpoint = checkpoint

    def read(self, module: Any) -> dict[str, Any]:
        """What the trainer loads of the newest checkpoint; the module has its weights already, and the rest follows at the first batch."""
        kept = load(self._run, like=_NOTHING, components=[_KEPT]).extra[_KEPT].value
        live = attach(module)
        live.restore(load(self._run, like=live.capture(), components=["model"]), components=["model"])
        return {"state_dict": module.state_dict(), **from_plain(kept, {}), "optimizer_states": [], "lr_schedulers": []}

    def _close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        while self._undo:
            self._undo.pop()()
        self._manager = self._live = self._trainer = self._loader = None


@final
class Followed:
    """A training loader of which the callback follows the batches; the trainer sees it as a loader with a state."""

    def __init__(self, callback: LightningCallback, loader: Any) -> None:
        self._callback, self._loader = callback, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """That of the loader; ``seed_everything(workers=True)`` sets it."""
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return Reading(self._callback)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run has the position."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Do nothing: the run is restored at the first batch."""


@final
class Reading:
    """One iteration over a followed loader, of which nothing happens before its first batch."""

    def __init__(self, callback: LightningCallback) -> None:
        self._callback, self._begins = callback, True

    def __iter__(self) -> "Reading":
        return self

    def __next__(self) -> Any:
        begins, self._begins = self._begins, False
        return self._callback.next_batch(begins=begins)


@final
class RunOrFile:
    """The ``CheckpointIO`` of a strategy: what goes to the run is the callback's, and any other path goes to the one that was there."""

    def __init__(self, callback: LightningCallback, files: Any, module: Any) -> None:
        self._callback, self._files, self._module = callback, files, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, or give that of the run to the callback."""
        if self._is_run(path):
            self._callback.taken(checkpoint)
        else:
            self._files.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Load a checkpoint, or the newest one of the run."""
        if self._is_run(path):
            return self._callback.read(self._module)
        found: dict[str, Any] = self._files.load_checkpoint(path, *arguments, **named)
        return found

    def _is_run(self, path: Any) -> bool:
        return Path(path).absolute() == Path(self._callback.path).absolute()


def check_trainer(trainer: Any, callback: object) -> None:
    """Refuse a trainer whose resume would not be exact, or that does not call the callback."""
    found = [
        (callback not in trainer.callbacks, "a Trainer that has this callback", "pass callbacks=[callback] to it"),
        (trainer.world_size > 1, "one process", "write the loop, and attach its objects on every rank"),
        (trainer.strategy.restore_checkpoint_after_setup, "a model that this process has whole", "write the loop, and attach its objects"),
        (trainer.fast_dev_run, "fast_dev_run=False", "leave the callback out of a trial"),
        (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs=0", "leave it out: a new loader has no position"),
    ]  # fmt: skip
    for is_wrong, expected, fix in found:
        if is_wrong:
            raise InvalidArgument("LightningCallback.resume", expected=expected, found="another", fix=fix)


def check_module(module: Any) -> None:
    """Refuse a module whose steps or batches the callback cannot count."""
    found = [
        (not module.automatic_optimization, "automatic_optimization=True", "write the loop: a step of several optimizers has no boundary that Lightning knows"),
        ("dataloader_iter" in inspect.signature(module.training_step).parameters, "training_step(batch)", "take a batch in place of dataloader_iter"),
    ]  # fmt: skip
    for is_wrong, expected, fix in found:
        if is_wrong:
            raise InvalidArgument("LightningCallback", expected=f"a module with {expected}", found="another", fix=fix)


def is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts have the same tensors in the same memory, and nothing else."""
    return one.keys() == other.keys() and all(
        isinstance(value, torch.Tensor)
        and value.data_ptr() == other[name].data_ptr()
        and value.shape == other[name].shape
        for name, value in one.items()
    )


def states_of_metrics(module: Any) -> dict[str, Any]:
    """What the metrics of torchmetrics in a module have counted in the epoch so far; they do not save it by themselves."""
    return {
        name: {**each.metric_state, "_update_count": each._update_count, "_computed": None}  # noqa: SLF001 - it has no public name
        for name, each in module.named_modules()
        if hasattr(type(each), "metric_state")
    }


def sums_of(trainer: Any) -> dict[str, Any]:
    """What the epoch has logged so far, for its averages; Lightning does not save it."""
    logged = trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - it has no public name
    return {
        key: {name: getattr(each, name) for name in ("value", "cumulated_batch_size") if hasattr(each, name)}
        for key, each in logged.items()
        if each.is_tensor and each.meta.on_epoch and each.update_called
    }


def add_sums(trainer: Any, sums: dict[str, Any]) -> dict[str, Any]:
    """Add what an epoch had logged before a resume to what it has logged since, and return what it has not logged again yet."""
    logged = trainer.fit_loop.epoch_loop._results if sums else {}  # noqa: SLF001 - it has no public name
    for key in sums.keys() & logged.keys():
        each, meta = logged[key], logged[key].meta
        how = meta.reduce_fx if meta.is_max_reduction or meta.is_min_reduction else torch.add
        for name, value in sums[key].items():
            setattr(each, name, how(value.to(each.value.device), getattr(each, name)))
        each._computed = None  # noqa: SLF001 - its cache
    return {key: each for key, each in sums.items() if key not in logged}
