"""`WindowProbe`: detects, from outside a loop, that an accumulation window is open."""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, final

import torch

from trainfold.adapters.sharded.dtensor import local_part
from trainfold.adapters.sharded.fsdp2_groups import HELD_BACK, are_held_back, fsdp2_modules, param_groups

_PROBES = 4
_PROBE_NUMEL = 1 << 16


@final
class WindowProbe:
    """Watches optimizers' steps and a few gradients between two calls of ``advance``.

    It sees steps that were taken and not counted, gradients that a backward has written since, and a window that was
    declared open. It cannot see a partial backward whose gradients reach none of the probed parameters, or are all zero; a
    loop that counts a step before it takes it; or the steps of a wrapping optimizer that never called
    ``Optimizer.__init__``, where torch sets up the hooks.

    Args:
        objects: the components of a run by name. For each module the smallest trainable parameters are probed, and for each
            optimizer the steps are counted. There may be several of either, since not all step in every window.

    Attributes:
        open_samples: of a window that was declared open.
        steps: those of each optimizer since the last boundary, by its name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._probes: list[torch.nn.Parameter] = []
        self._marks: list[tuple[torch.Tensor | None, int]] = []
        self.steps: Counter[str] = Counter()
        self._modules: list[torch.nn.Module] = []
        self.open_samples = 0
        for name, target in objects.items():
            self.watch(name, target)

    def watch(self, name: str, target: Any) -> None:
        """Watch one more object; anything other than a module or an optimizer is ignored."""
        if isinstance(target, torch.nn.Module):
            small = [p for p in target.parameters() if p.requires_grad and p.numel() <= _PROBE_NUMEL]
            probes = sorted(small, key=lambda parameter: parameter.numel())[:_PROBES]
            self._probes += probes
            self._marks += _marks(probes)
            self._modules.append(target)
        if isinstance(target, torch.optim.Optimizer) and hasattr(target, "_optimizer_step_post_hooks"):
            count = weakref.WeakMethod(self._count)  # weak: an optimizer that outlives the run must not keep it alive

            def hook(*_: Any) -> None:
                counting = count()
                if counting is not None:
                    counting(name)

            target.register_step_post_hook(hook)

    def close(self) -> None:
        """Declare that this is a boundary."""
        self.open_samples = 0
        self.steps.clear()
        self._marks = _marks(self._probes)

    def _count(self, name: str) -> None:
        self.steps[name] += 1

    def open(self, samples: int) -> None:
        """Declare that this is inside a window."""
        self.open_samples += samples

    def evidence(self) -> str | None:
        """The evidence that a window is open, as text, or None."""
        if self.open_samples:
            return f"a window open since {self.open_samples} samples: advance(steps=0) was the last call"
        if taken := self.uncounted():
            return taken
        if self._gradients_changed():
            return "gradients that changed since the last advance()"
        return HELD_BACK if self.holds_gradients_back else None

    @property
    def holds_gradients_back(self) -> bool:
        """Whether FSDP2 has gradients of its own, which are in no ``grad`` before a backward synchronises them."""
        return are_held_back(param_groups(fsdp2_modules(self._modules)))

    def uncounted(self) -> str | None:
        """The uncounted optimizer steps, as text, or None."""
        taken = ", ".join(f"{steps} of {name}" for name, steps in self.steps.items())
        return f"optimizer steps since the last advance(): {taken}" if taken else None

    def _gradients_changed(self) -> bool:
        return any(
            parameter.grad is not None
            and (parameter.grad is not gradient or parameter.grad._version != version)  # noqa: SLF001
            and bool(local_part(parameter.grad).any())
            for parameter, (gradient, version) in zip(self._probes, self._marks, strict=True)
        )


def _marks(probes: list[torch.nn.Parameter]) -> list[tuple[torch.Tensor | None, int]]:
    # torch has no public name for how often a tensor was written to
    return [(p.grad, 0 if p.grad is None else p.grad._version) for p in probes]  # noqa: SLF001
