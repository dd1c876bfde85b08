"""`ComponentAdapter`: one component of a live run, as something that can be read into a value and written back from one."""

import copy
from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

import attrs

from trainfold.adapters.own_state.read_back import first_difference
from trainfold.core import tree
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.json_values import SCALARS
from trainfold.core.state.state import Opaque

Undo = Callable[[], None]


@runtime_checkable
class ComponentAdapter(Protocol):
    """A mutable object, or several, behind one component of a state."""

    def capture(self) -> Any:
        """The component's value; tensors are the live ones, containers are copied. Nothing moves (C14)."""

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why this value cannot be written, all at once; nothing is changed (V12)."""

    def write(self, saved: Any) -> Undo:
        """Write a value without problems; return how to take it back. A write that raises has changed nothing."""


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's pair of methods."""

    def state_dict(self) -> Any:
        """The state, as a tree."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""


def nothing() -> None:
    """The undo of a write that cannot fail and after which nothing can."""


def copied_containers(value: Any) -> Any:
    """The same tree in new dicts and lists; tensors and arrays are shared."""
    if type(value) in SCALARS:
        return value
    return tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else copy.copy(leaf), value)


def copied(value: Any) -> Any:
    """The same tree with nothing shared, for an owner that will change it."""
    return tree.map(copy.deepcopy, tree.map_tensors(lambda tensor: tensor.detach().clone(), value))


@final
@attrs.frozen
class ObjectPart:
    """A component whose structure its own object knows: a scheduler, a grad scaler, a callback.

    Attributes:
        target: the object, with ``state_dict`` and ``load_state_dict``.
        path: where it stands in the state, for messages.
        same_keys: whether the keys of a saved dict must be those of the object's own.
    """

    target: Stateful
    path: str
    same_keys: bool = False

    def capture(self) -> Opaque:
        """The object's ``state_dict()``, in containers of its own."""
        return Opaque(copied_containers(self.target.state_dict()))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Whether it is such a value at all, and has the keys that the object has."""
        if not isinstance(saved, Opaque):
            return [wrong_kind(self.path, "the saved state_dict of an object", saved)]
        own = self.target.state_dict() if self.same_keys else None
        if isinstance(own, dict) and isinstance(saved.value, dict) and set(own) != set(saved.value):
            return [
                InvalidState(
                    self.path,
                    expected=f"the state of a {type(self.target).__qualname__}, with the keys {sorted(map(str, own))}",
                    found=f"the keys {sorted(map(str, saved.value))}",
                    fix="build the object as it was when the state was saved",
                )
            ]
        return []

    def write(self, saved: Any) -> Undo:
        """Give the object its state, and read it back; if it refuses, or comes back otherwise, give it back what it had.

        Raises:
            InvalidState: if what the object says now is not what was saved, naming its class (W05).
        """
        before = copied(self.target.state_dict())

        def undo() -> None:
            self.target.load_state_dict(before)

        try:
            self.target.load_state_dict(copied(saved.value))
            self._check_read_back(saved.value)
        except Exception:
            undo()
            raise
        return undo

    def _check_read_back(self, saved: Any) -> None:
        found = self.target.state_dict()
        difference = first_difference(saved, found, self.path)
        if difference is None or first_difference(found, self.target.state_dict(), self.path) is not None:
            return  # what never says the same twice, such as a clock, cannot be compared
        where, was, now = difference
        kind = type(self.target).__qualname__
        raise InvalidState(
            where,
            expected=f"{was}, as it was saved",
            found=f"{now}, after load_state_dict() of {kind}",
            fix=f"{kind} does not take back what its state_dict() says: fix its pair of methods, or attach a pair of functions",
        )


@final
@attrs.frozen
class TreePart:
    """A component behind a pair of functions: ``get()`` returns a tree, ``set(tree)`` takes one back."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    path: str

    def capture(self) -> Any:
        """What ``get()`` returns; opaque, because its shape is its owner's and may grow."""
        return Opaque(self.get())

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """None that could be known here: the owner of the tree may have changed its shape."""
        del saved
        return []

    def write(self, saved: Any) -> Undo:
        """Call ``set`` with a copy."""
        before = copied(self.get())
        try:
            self.set(copied(saved.value if isinstance(saved, Opaque) else saved))
        except Exception:
            self.set(before)
            raise
        return lambda: self.set(before)


def kind_of(value: object) -> str:
    """The class of an object, ``"torch.optim.adamw.AdamW"``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def wrong_kind(path: str, expected: str, found: object) -> InvalidState:
    """The error for a component that holds something else altogether."""
    return InvalidState(
        path,
        expected=expected,
        found=f"a {type(found).__qualname__}",
        fix="attach the objects that the state was captured from, or leave the component out with components=",
    )
