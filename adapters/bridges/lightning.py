"""`LightningCallback`: saves and resumes a program of Lightning's ``Trainer`` through a `CheckpointManager`, in the middle of an epoch too."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, final

from trainfold.adapters.batches.feed import END
from trainfold.adapters.bridges.lightning_kept import go_on, kept_by
from trainfold.adapters.bridges.lightning_logged import add_sums
from trainfold.adapters.bridges.lightning_seams import (
    Followed,
    RunOrFile,
    check_lightning_trainer,
    check_module,
    check_unpickled,
    draw_seeds_apart,
)
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
_ALIKE = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "limit_train_batches", "overfit_batches")  # fmt: skip
_LIGHTNINGS = ("model._current_fx_name", "model._metric_attributes")
_NOTHING = TrainState(extra={_KEPT: Opaque({})})
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
        self._accumulates: int | None = None  # as the script says; a callback may change it by the epoch
        self._last = 0  # the step for which a save was considered last

    def __repr__(self) -> str:
        return f"LightningCallback({', '.join([repr(self._run), *(f'{k}={v!r}' for k, v in self._arguments.items())])})"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the trainer calls every event that its version has
            return lambda *_, **__: None
        raise AttributeError(name)

    @property
    def state_key(self) -> str:
        """The name by which the trainer knows this callback from others."""
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
        check_lightning_trainer(trainer, self)
        self._close()
        contract = {f"trainer.{name}": str(getattr(trainer, name)) for name in _ALIKE}
        contract |= mapping_given("contract", self._arguments.get("contract"))
        self._trainer, self._manager = (
            trainer,
            CheckpointManager(self._run, **{**self._arguments, "contract": contract}),
        )
        self._accumulates = trainer.accumulate_grad_batches
        is_new = self._arguments.get("start_over") or isinstance(
            plan(self._run, like=_NOTHING, components=[_KEPT]), Refusal
        )
        return None if is_new else self.path

    # --- events -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Let the trainer's strategy read and write the run, and follow the batches of its training loader."""
        if stage == "fit":
            check_module(module)
            if self._manager is None:
                self.resume(trainer)
        strategy, files = trainer.strategy, trainer.strategy.checkpoint_io
        self._undo.append(lambda: setattr(strategy, "checkpoint_io", files))
        strategy.checkpoint_io = RunOrFile(self.path, files, take=self._taken, read=lambda: self._read(trainer, module))
        if stage != "fit":
            return
        process = strategy.process_dataloader

        def followed(loader: Any) -> Any:
            loader = process(loader)
            if trainer.training:
                return self._followed(loader)
            self._undo.extend(draw_seeds_apart(loader))
            return loader

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

    def on_exception(self, trainer: Any, _module: Any, error: BaseException) -> None:
        """Release the run; before that, save if the trainer ends between two batches because of a signal that is a request, too."""
        try:
            is_between = type(error).__name__ == "SIGTERMException" and trainer.training
            if is_between and self._live is not None and self._manager is not None:
                self._is_at_end = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
                self._manager.step(self._live)
        finally:
            self._close()

    def teardown(self, _trainer: Any, _module: Any, stage: str) -> None:  # noqa: ARG002 - the trainer names it
        """Release the run, and leave the trainer as it was."""
        self._close()

    # --- batches ------------------------------------------------------------------------------------------------------

    def _followed(self, loader: Any) -> Followed:
        if self._loader is not None or not hasattr(loader, "__len__"):
            raise InvalidArgument("LightningCallback", expected="one training loader, with a length",
                                  found="several" if self._loader is not None else f"{type(loader).__qualname__} without one",
                                  fix="write the loop, and attach its loaders")  # fmt: skip
        self._loader = loader
        return Followed(loader, self._next_batch)

    def _next_batch(self, *, begins: bool) -> Any:
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
        self._attached = trainer.optimizers[0], [each.scheduler for each in trainer.lr_scheduler_configs]
        optimizer, schedulers = self._attached
        live = attach(
            trainer.lightning_module,
            optimizer,
            scheduler=schedulers[0] if len(schedulers) == 1 else schedulers or None,
            loader=self._loader,
            extra={_KEPT: (self._keep, self._take)},
            unsaved=_LIGHTNINGS,
        )
        begins, newest = trainer.global_step, self._manager.should_load(live)
        if newest.step and not begins:
            raise InvalidState(
                "LightningCallback",
                expected=f"a trainer that begins at step {newest.step}, as the run does",
                found="step 0",
                fix=_CURE,
            )
        self._is_at_end = False
        restored = self._manager.restore(live)  # raises the reasons why no checkpoint will do, if there are any
        if live.progress.step != begins:
            raise InvalidState("LightningCallback", expected=f"a checkpoint of step {begins}, at which the trainer begins",
                               found=f"the run at step {live.progress.step}",
                               fix=f"{_CURE}; if the newest checkpoint was damaged, it is set aside now, and the next start begins at the one before")  # fmt: skip
        if not restored.is_fresh:
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
        kept = self._kept
        go_on(self._trainer, kept)
        self._sums = {} if kept["is_at_end"] else kept["sums"]

    # --- state of the trainer -----------------------------------------------------------------------------------------

    def _keep(self) -> dict[str, Any]:
        self._trainer.save_checkpoint(self.path, weights_only=False)
        taken, self._checkpoint = self._checkpoint, {}
        kept = kept_by(self._trainer, taken, is_at_end=self._is_at_end)
        if self._trainer.accumulate_grad_batches != self._accumulates:
            kept["accumulates"] = self._trainer.accumulate_grad_batches
        plain: dict[str, Any] = to_plain(kept, {})
        check_unpickled(plain["checkpoint"])
        return plain

    def _take(self, kept: dict[str, Any]) -> None:
        self._kept = from_plain(kept, {})

    def _taken(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def _read(self, trainer: Any, module: Any) -> dict[str, Any]:
        """What the trainer loads of the newest checkpoint; the module has its weights already, and the rest follows at the first batch."""
        if isinstance(plan(self._run, like=_NOTHING, components=[_KEPT]), Refusal):
            raise InvalidState("LightningCallback", expected=f"a checkpoint in {self.path!r}", found="none that Lightning can go on from",
                               fix=f"{_CURE}, which is None in a new run")  # fmt: skip
        kept = load(self._run, like=_NOTHING, components=[_KEPT]).extra[_KEPT].value["checkpoint"]
        live = attach(trainer.precision_plugin.convert_module(module))  # the trainer does so only after it has loaded
        live.restore(load(self._run, like=live.capture(), components=["model"]), components=["model"])
        return {"state_dict": module.state_dict(), **from_plain(kept, {}), "optimizer_states": [], "lr_schedulers": []}

    def _close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        while self._undo:
            self._undo.pop()()
        self._manager = self._live = self._trainer = self._loader = None
