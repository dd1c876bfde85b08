"""`UnsetWatch`: whether a run trains with tensors that nothing has set since its model was built on meta."""

from collections.abc import Callable, Iterable
from typing import final

import torch

from trainfold.adapters.construct.recipes import Slot, slots_of
from trainfold.adapters.sharded.dtensor import local_part
from trainfold.core.state.fqn import RECIPES, unset_error
from trainfold.core.tensor_memory import looks_unset


@final
class UnsetWatch:
    """Remembers what had no value when a run was attached. A model that was not built on meta costs one look at its modules.

    Args:
        modules: returns those of the run.

    Attributes:
        names: of the tensors that had no value at the last look, and may have none now.
    """

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._modules = modules
        self.names: set[str] = set()
        self.look()

    def look(self) -> None:
        """Look at what has no value now, such as of a module that was attached just now."""
        self.names |= {slot.name for slot in self._slots() if looks_unset(local_part(slot.tensor))}

    def check(self, where: str) -> None:
        """Raise if any of it has no value yet, or a NaN: an optimizer may have moved the one to the other.

        Raises:
            InvalidState: naming the tensors.
        """
        unset = [slot.name for slot in self._slots() if slot.name in self.names and _has_none(local_part(slot.tensor))]
        if unset:
            raise unset_error(where, list(dict.fromkeys(unset)))
        self.names = set()

    def _slots(self) -> list[Slot]:
        built = [root for root in self._modules() if any(RECIPES in vars(each) for each in root.modules())]
        return [slot for slot in slots_of(built) if not slot.tensor.is_meta]


def _has_none(tensor: torch.Tensor) -> bool:
    if looks_unset(tensor):
        return True
    return tensor.numel() > 0 and bool(tensor.detach()[(0,) * tensor.dim()].isnan())
