"""`remember`: copies everything that an object holds, so that a load that fails halfway can be undone."""

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import torch

_DEPTH: Final = 12
_LEAVES: Final = (str, bytes, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


def remember(objects: Iterable[Any]) -> Callable[[], None]:
    """Copy what these objects hold now, so that it can be restored.

    Attributes, the dicts, lists and sets that they lead to, and the values of tensors are restored in the same objects, so
    that every other reference to them sees the old values as well. Tensors are copied, which costs their memory.

    Args:
        objects: for example, an optimizer and the optimizers that it holds.

    Returns:
        A function that restores everything; it may be called again.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> undo, group = remember([optimizer]), optimizer.param_groups[0]
        >>> group["lr"] = 7.0
        >>> undo()
        >>> group["lr"]
        0.5
    """
    walk = _Walk()
    for each in objects:
        walk.visit(each, 0)
    return walk.undo


@final
class _Walk:
    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        self._undos: list[Callable[[], None]] = []

    def undo(self) -> None:
        with torch.no_grad():
            for each in self._undos:
                each()

    def visit(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, _LEAVES) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, MutableMapping):
            entries = dict(value)
            self._undos.append(lambda: _refill(value, entries))
            self._visit_all([*entries, *entries.values()], depth)
        elif isinstance(value, MutableSequence | deque):
            items = list(value)
            self._undos.append(lambda: _replace(value, items))
            self._visit_all(items, depth)
        elif isinstance(value, MutableSet):
            members = set(value)
            self._undos.append(lambda: _swap(value, members))
        elif isinstance(value, tuple | frozenset):
            self._visit_all(value, depth)
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
            self.visit(vars(value), depth)

    def _visit_all(self, values: Iterable[Any], depth: int) -> None:
        for each in values:
            self.visit(each, depth + 1)

    def _tensor(self, value: torch.Tensor) -> None:
        data, copy = value.data, value.detach().clone()

        def undo() -> None:
            value.data = data  # a load may have replaced its memory
            if not torch.equal(data, copy):
                data.copy_(copy)

        self._undos.append(undo)


def _refill(mapping: MutableMapping[Any, Any], entries: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(entries)


def _replace(sequence: Any, items: list[Any]) -> None:
    sequence.clear()
    sequence.extend(items)


def _swap(kept: MutableSet[Any], members: set[Any]) -> None:
    kept.clear()
    for each in members:
        kept.add(each)
