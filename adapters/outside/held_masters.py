"""`HeldMasters`: fp32 copies of parameters that optimizers hold as slots, which follow the weights where weights alone are taken."""

from collections.abc import Iterable
from typing import final

import torch

from trainfold.adapters.sharded.dtensor import local_part
from trainfold.core.state.masters import is_low_precision


@final
class HeldMasters:
    """The masters in the slots of optimizers. The next step rounds them into the parameters, and so would revert what was loaded.

    A slot is one if its name has the word, or if all slots of its name round to their parameters, which are not all zero. It has fp32 and the shape of
    a parameter with less precision.

    Args:
        optimizers: before the weights change.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> sgd = torch.optim.SGD([weight], lr=0.1)
        >>> sgd.state[weight]["copy"] = torch.full((2,), 1.001)
        >>> masters = HeldMasters([sgd])
        >>> _ = weight.data.fill_(3)
        >>> masters.refresh()
        >>> sgd.state[weight]["copy"]
        tensor([3., 3.])
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for optimizer in optimizers:
            slots = _candidates(optimizer)
            for name, pairs in slots.items():
                if "master" in name or (
                    all(_rounds_to(*each) for each in pairs) and any(each[1].any() for each in pairs)
                ):
                    self._pairs += pairs

    def refresh(self) -> None:
        """Set those that no longer round to their parameters to the weights that these have now; the others keep their precision."""
        for slot, parameter in self._pairs:
            if not _rounds_to(slot, parameter):
                slot.copy_(parameter)


def _candidates(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Name -> the slots of this name that may be masters, each with its parameter, in this rank's memory."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for parameter, slots in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not is_low_precision(parameter) or not isinstance(slots, dict):
            continue
        own = local_part(parameter).detach()
        for name, slot in slots.items():
            if isinstance(slot, torch.Tensor) and slot.dtype == torch.float32 and local_part(slot).shape == own.shape:
                found.setdefault(str(name), []).append((local_part(slot).detach(), own))
    return found


def _rounds_to(slot: torch.Tensor, parameter: torch.Tensor) -> bool:
    return torch.equal(slot.to(device=parameter.device, dtype=parameter.dtype), parameter)
