"""`Redo`: takes attached objects back to before a step, so that the step can run again."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from trainfold.adapters.components.component import ComponentAdapter, copied
from trainfold.adapters.live.restore import write_all
from trainfold.adapters.live.run_watch import RunWatch
from trainfold.adapters.parallel.ddp_wrappers import BetweenForwards, ddp_wrappers
from trainfold.adapters.sharded.dtensor import local_part


@final
class Redo:
    """The objects as they are now, inside a step too: after a batch was drawn, and before it is counted.

    Counters and the position in the data are not among them: a step moves neither.

    Args:
        parts: the components that a step may change.
        parameters: name -> tensor, of those whose gradients it may change.
        modules: those whose forwards it may call, each itself or in a wrapper.
        watch: of the run.
        announce: called before memory is overwritten that a save may still read.
    """

    def __init__(
        self,
        parts: Mapping[str, ComponentAdapter],
        parameters: Mapping[str, torch.Tensor],
        modules: Sequence[torch.nn.Module],
        watch: RunWatch,
        announce: Callable[[], object],
    ) -> None:
        self._parts = parts
        self._watch = watch
        self._announce = announce
        self._steps = watch.window.steps.copy()
        self._before = copied(self.values())
        self._gradients = [
            (each, each.grad, None if each.grad is None else each.grad.detach().clone()) for each in parameters.values()
        ]
        self._parameters = parameters
        wrappers = ddp_wrappers(dict(enumerate(modules)), least_ranks=2).values()
        self._between = BetweenForwards(each for found in wrappers for each in found)

    def values(self) -> dict[str, Any]:
        """Each component as it is now; its tensors are the live ones."""
        return {name: part.capture() for name, part in self._parts.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of this rank as they are now, by the names of their parameters."""
        found = {name: local_part(each.grad) for name, each in self._parameters.items() if each.grad is not None}
        return {name: each.to_dense() if each.layout is not torch.strided else each for name, each in found.items()}

    def steps(self) -> dict[str, int]:
        """How many steps each optimizer has taken that `advance` has not seen, by its name."""
        return dict(self._watch.window.steps)

    def first_run(self) -> AbstractContextManager[None]:
        """Around the step as it runs first."""
        return self._between.watched()

    @property
    def is_lost(self) -> bool:
        """Whether, after the first run, DDP waits or has waited for a backward in a way that `back` cannot put back."""
        return self._between.is_lost

    def back(self) -> None:
        """Put everything back: tensors in place, random streams, gradients, what DDP carries to its next forward, and the count of steps that `advance` has not seen.

        Raises:
            RestoreRefused: if an object does not take its own state; nothing was changed.
            HalfRestored: if memory could not be overwritten.
        """
        self._announce()
        write_all(self._parts, self._before, begins=self._watch.overwrites)
        with torch.no_grad():
            for tensor, gradient, value in self._gradients:
                tensor.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)
        self._between.back()
        self._watch.window.steps.clear()
        self._watch.window.steps.update(self._steps)
        self._watch.overwrites(is_over=True)
