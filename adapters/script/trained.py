"""`Trained`: which parameters of a live run are trained, beside how its script has attached them (W07)."""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from trainfold.core.state.fqn import canonical_name


@final
class Trained:
    """Notes what a loop has frozen and unfrozen since its modules were attached, and puts it back at a resume.

    A loop that does this once, at a step, does not do it again in the process that resumes after that step. One that does it in
    each step does, and then nothing is lost by having put it back.

    Args:
        attached: component -> object; those that are modules are looked at.
    """

    def __init__(self, attached: Mapping[str, Any]) -> None:
        self._modules = {name: each for name, each in attached.items() if isinstance(each, torch.nn.Module)}
        self._attached = self._now()

    def attach(self, name: str, target: Any) -> None:
        """One more object."""
        if isinstance(target, torch.nn.Module):
            self._modules[name] = target
            self._attached = {**self._now(), **self._attached}

    def contract(self) -> dict[str, bool]:
        """Parameter -> whether it is trained, where that is otherwise than when it was attached."""
        return {path: now for path, now in self._now().items() if now != self._attached.get(path, now)}

    def put_back(self, saved: Mapping[str, bool]) -> dict[str, bool]:
        """Make parameters trained or frozen as a checkpoint says; return those that were not.

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
            for path, parameter in module.named_parameters():
                yield f"{name}.{canonical_name(path)}", parameter
