"""`Trained`: records the parameters frozen or unfrozen after the attach, and restores that at a resume."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from trainfold.core.state.names.wrapper_names import canonical_name, name_in


@final
class Trained:
    """Records which parameters a loop has frozen or unfrozen since the attach, and restores that at a resume.

    A loop that changes this once, at a certain step, does not do it again in a process that resumes after that step. A loop
    that sets it in each step does it again, so restoring it does no harm.

    Args:
        attached: component -> object; only modules are used.
    """

    def __init__(self, attached: Mapping[str, Any]) -> None:
        self._modules = {name: each for name, each in attached.items() if isinstance(each, torch.nn.Module)}
        self._attached = self._now()

    def attach(self, name: str, target: Any) -> None:
        """Include one more object."""
        if isinstance(target, torch.nn.Module):
            self._modules[name] = target
            self._attached = {**self._now(), **self._attached}

    def contract(self) -> dict[str, bool]:
        """Parameter -> whether it is trained, for the parameters where this has changed since the attach."""
        return {path: now for path, now in self._now().items() if now != self._attached.get(path, now)}

    def put_back(self, saved: Mapping[str, bool]) -> dict[str, bool]:
        """Make parameters trained or frozen as in a checkpoint; return those that had to change.

        Args:
            saved: parameter -> whether it was trained.
        """
        changed: dict[str, bool] = {}
        for path, parameter in self._parameters() if saved else ():
            value = saved.get(path, parameter.requires_grad)
            if value != parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(value)
                changed[path] = value
        return changed

    def _now(self) -> dict[str, bool]:
        return {path: parameter.requires_grad for path, parameter in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, module in self._modules.items():
            taken: set[str] = set()
            for path, parameter in module.named_parameters():
                short = canonical_name(name_in(module, path))  # as checkpoints have it (ADR-0056)
                yield f"{name}.{short if short not in taken else name_in(module, path)}", parameter
                taken.add(short)
