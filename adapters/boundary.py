"""`Boundary`: what shows, from outside a loop, that an accumulation window is open (A06)."""

import weakref
from typing import Any, final

import torch

_PROBES = 4
_PROBE_NUMEL = 1 << 16


@final
class Boundary:
    """Watches an optimizer's steps and a few gradients between two calls of ``advance``.

    What it sees: steps taken and not counted, gradients that a backward has written to since, a window declared open.
    What it cannot see: a partial backward whose gradients reach none of the probed parameters, or that are all zero;
    and a loop that counts a step before it takes it.

    Args:
        model: whose smallest trainable parameters are probed.
        optimizer: whose steps are counted, or None.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        small = [p for p in model.parameters() if p.requires_grad and p.numel() <= _PROBE_NUMEL]
        self._probes = sorted(small, key=lambda parameter: parameter.numel())[:_PROBES]
        self._marks: list[tuple[torch.Tensor | None, int]] = []
        self._steps = 0
        self.open_samples = 0
        if optimizer is not None:
            count = weakref.WeakMethod(self._count)  # an optimizer that outlives the run does not keep it alive

            def hook(*_: Any) -> None:
                counting = count()
                if counting is not None:
                    counting()

            optimizer.register_step_post_hook(hook)
        self.close()

    def close(self) -> None:
        """Declare that this is a boundary."""
        self._steps = self.open_samples = 0
        self._marks = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self._probes]  # noqa: SLF001 (torch
        # has no public name for how often a tensor was written to)

    def _count(self) -> None:
        self._steps += 1

    def open(self, samples: int) -> None:
        """Declare that this is inside a window."""
        self.open_samples += samples

    def evidence(self) -> str | None:
        """What shows that a window is open, in words, or None."""
        if self.open_samples:
            return f"a window open since {self.open_samples} samples: advance(steps=0) was the last call"
        if self._steps:
            return f"optimizer steps since the last advance(): {self._steps}"
        if self._gradients_changed():
            return "gradients that changed since the last advance()"
        return None

    def _gradients_changed(self) -> bool:
        return any(
            parameter.grad is not None
            and (parameter.grad is not gradient or parameter.grad._version != version)  # noqa: SLF001
            and bool(parameter.grad.any())
            for parameter, (gradient, version) in zip(self._probes, self._marks, strict=True)
        )
