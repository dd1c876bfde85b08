"""Where Lightning lets `LightningCallback` in: the training loader, the ``CheckpointIO`` of the strategy, and what it has to refuse."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, UnsupportedLeaf
from trainfold.core.json_values import encode_scalar


@final
class Followed:
    """A training loader of which the callback follows the batches; the trainer sees it as a loader with a state."""

    def __init__(self, loader: Any, next_batch: Callable[..., Any]) -> None:
        self._loader, self._next_batch = loader, next_batch

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
        return OneIteration(self._next_batch)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run has the position."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Do nothing: the run is restored at the first batch."""


@final
class OneIteration:
    """One iteration over a followed loader, of which nothing happens before its first batch."""

    def __init__(self, next_batch: Callable[..., Any]) -> None:
        self._next_batch, self._begins = next_batch, True

    def __iter__(self) -> "OneIteration":
        return self

    def __next__(self) -> Any:
        begins, self._begins = self._begins, False
        return self._next_batch(begins=begins)


@final
class RunOrFile:
    """The ``CheckpointIO`` of a strategy: what goes to the run is the callback's, and any other path goes to the one that was there."""

    def __init__(
        self,
        run: str,
        files: Any,
        *,
        take: Callable[[dict[str, Any]], None],
        read: Callable[[], dict[str, Any]],
    ) -> None:
        self._run, self._files, self._take, self._read = run, files, take, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, or give that of the run to the callback."""
        if self._is_run(path):
            self._take(checkpoint)
        else:
            self._files.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Load a checkpoint, or the newest one of the run."""
        if self._is_run(path):
            return self._read()
        found: dict[str, Any] = self._files.load_checkpoint(path, *arguments, **named)
        return found

    def _is_run(self, path: Any) -> bool:
        return Path(path).absolute() == Path(self._run).absolute()


def check_lightning_trainer(trainer: Any, callback: object) -> None:
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


def draw_seeds_apart(loader: Any) -> list[Callable[[], None]]:
    """Let workers that stay from one validation to the next draw their seeds from a generator of their own, and return how to undo it.

    They draw when they start: in a resumed process at another validation than in the run. Workers that end draw at each of them.
    """
    if not getattr(loader, "persistent_workers", False) or loader.generator is not None:
        return []
    loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    return [lambda: setattr(loader, "generator", None)]


def check_unpickled(checkpoint: dict[str, Any]) -> None:
    """Refuse what Lightning would pickle, with how to leave it out.

    Args:
        checkpoint: what Lightning saves, in plain containers.

    Raises:
        UnsupportedLeaf: naming the first such value.
    """
    for path, leaf in tree.named_leaves(checkpoint):
        try:
            None if isinstance(leaf, torch.Tensor | np.ndarray) else encode_scalar(leaf, path)
        except UnsupportedLeaf as error:
            fix = "leave a hyperparameter out with save_hyperparameters(ignore=[...]); write other state as tensors and plain values in its own "
            raise UnsupportedLeaf(f"what Lightning saves: {path}", expected=error.expected, found=error.found,
                                  fix=f"{fix}hook, such as on_save_checkpoint: nothing is pickled") from None  # fmt: skip
