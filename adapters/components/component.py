"""`ComponentAdapter`: captures one component of a live run as a value, and writes it back from one."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final, runtime_checkable

import attrs
import torch

from trainfold.adapters.own_state.read_back import first_unequal, unlike_saved
from trainfold.adapters.sharded.trees import as_leaves, as_owned, tree_cut_problems
from trainfold.core import tree
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.json_values import SCALARS
from trainfold.core.printable import with_article
from trainfold.core.state.state import Opaque

Undo = Callable[[], None]
Fill = Callable[[Iterable[tuple[torch.Tensor, torch.Tensor]]], None]
"""Writes values into the memory of live tensors, given as pairs of a tensor and its value."""


@runtime_checkable
class ComponentAdapter(Protocol):
    """One or more mutable objects behind one component of a state."""

    def capture(self) -> Any:
        """Return the value of the component; tensors are the live ones, containers are copied. Nothing changes."""

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Return every reason why this value cannot be written; nothing is changed."""

    def write(self, saved: Any) -> Undo:
        """Write a value that has no problems; return its undo. A write that raises has changed nothing."""


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's pair of methods for its state."""

    def state_dict(self) -> Any:
        """Return the state as a tree."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


def nothing() -> None:
    """Do nothing: the undo of a write that is never undone, because neither it nor anything after it can fail."""


def copy_values(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy values into live tensors.

    Examples:
        >>> weight = torch.zeros(2)
        >>> copy_values([(weight, torch.ones(2))])
        >>> weight
        tensor([1., 1.])
    """
    with torch.no_grad():
        for memory, value in pairs:
            memory.copy_(value)


def copied_containers(value: Any) -> Any:
    """Return the tree in new dicts and lists; tensors and arrays are shared."""
    if type(value) in SCALARS:
        return value
    return tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else copy.copy(leaf), value)


def copied(value: Any) -> Any:
    """Return a copy of the tree that shares nothing, for an owner that will change it."""
    cloned = tree.map_tensors(lambda tensor: tensor.detach().clone(), value)
    return tree.map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), cloned)


@final
@attrs.frozen
class ObjectPart:
    """A component whose structure only its object knows: a scheduler, a grad scaler, a callback.

    Attributes:
        target: the object, with ``state_dict`` and ``load_state_dict``.
        path: its path in the state, for messages.
        same_keys: whether a saved dict must have the keys of the object's current ``state_dict()``.
    """

    target: Stateful
    path: str
    same_keys: bool = False

    def capture(self) -> Opaque:
        """Return the object's ``state_dict()``, in new containers."""
        return Opaque(as_leaves(copied_containers(self.target.state_dict()), self.path))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Check that it is the state of an object, with the object's keys."""
        if not isinstance(saved, Opaque):
            return [wrong_kind(self.path, "the saved state_dict of an object", saved)]
        if problems := tree_cut_problems(saved.value, self.target.state_dict, self.path):
            return problems
        own = self.target.state_dict() if self.same_keys else None
        if isinstance(own, dict) and isinstance(saved.value, dict) and set(own) != set(saved.value):
            return [
                InvalidState(
                    self.path,
                    expected=f"the state of {with_article(type(self.target).__qualname__)}, with the keys {sorted(map(str, own))}",
                    found=f"the keys {sorted(map(str, saved.value))}",
                    fix="build the object as it was when the state was saved",
                )
            ]
        return []

    def write(self, saved: Any) -> Undo:
        """Load the state into the object and read it back; if the load fails or reads back differently, restore the old state.

        Raises:
            InvalidState: if the object does not return what was saved, naming its class.
        """
        before = copied(self.target.state_dict())

        def undo() -> None:
            self.target.load_state_dict(before)

        try:
            self.target.load_state_dict(as_owned(copied(saved.value), before, self.path))
            self._check_read_back(saved.value)
        except Exception:
            undo()
            raise
        return undo

    def _check_read_back(self, saved: Any) -> None:
        found = as_leaves(self.target.state_dict(), self.path)
        difference = first_unequal(saved, found, self.path)
        if (
            difference is None
            or first_unequal(found, as_leaves(self.target.state_dict(), self.path), self.path) is not None
        ):
            return  # a state that differs at each read, such as a clock, cannot be compared
        kind = type(self.target).__qualname__
        raise unlike_saved(
            difference,
            after=f"load_state_dict() of {kind}",
            fix=f"fix the pair of methods of {kind}, whose load_state_dict() does not restore its state_dict(); or attach a pair of functions",
        )


@final
@attrs.frozen
class TreePart:
    """A component behind a pair of functions: ``get()`` returns a tree, ``set(tree)`` restores one."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    path: str

    def capture(self) -> Any:
        """Return the result of ``get()``; it is opaque, because its owner decides its structure, which may grow."""
        return Opaque(as_leaves(self.get(), self.path))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Return a problem for each part of a tensor that is another rank's; only the owner of the tree knows its structure."""
        return tree_cut_problems(saved.value if isinstance(saved, Opaque) else saved, self.get, self.path)

    def write(self, saved: Any) -> Undo:
        """Call ``set`` with a copy."""
        before = copied(self.get())
        try:
            self.set(as_owned(copied(saved.value if isinstance(saved, Opaque) else saved), before, self.path))
        except Exception:
            self.set(before)
            raise
        return lambda: self.set(before)


def kind_of(value: object) -> str:
    """Return the name of an object's class, such as ``"torch.optim.adamw.AdamW"``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def wrong_kind(path: str, expected: str, found: object) -> InvalidState:
    """Return the error for a component with a value of another kind."""
    return InvalidState(
        path,
        expected=expected,
        found=f"{with_article(type(found).__qualname__)}",
        fix="attach the objects that the state was captured from, or leave the component out with components=",
    )
