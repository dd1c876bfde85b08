"""`Leaves`: a frozen mapping from names to leaves that a donating step can consume. See ADR-0003."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, final

import attrs
import optree

from trainfold.core.errors import StateDonated

T = TypeVar("T")
_ADDRESS_FREE_REPR_LIMIT = 4


@final
@attrs.define(eq=False)
class Lease:
    """The right to read a set of leaves, shared by every `Leaves` of one state and every part selected from it.

    A donating step ends the lease of its input: one assignment, however many leaves there are.

    Attributes:
        consumed_by: the step that took the storage, or None while the leaves are alive.
    """

    consumed_by: int | None = None


@final
class Leaves(Mapping[str, T], Generic[T]):
    """A frozen, ordered mapping from a name (an FQN) to a leaf, or to a mapping of leaves.

    It reads like a dict. After a donating step consumed the state that it belongs to, each access raises
    `StateDonated` with the leaf and the step; `is_donated` says so without raising.

    Args:
        items: a mapping or pairs; the order is kept.

    Examples:
        >>> leaves = Leaves({"w": 1, "b": 2})
        >>> leaves["w"], len(leaves), list(leaves)
        (1, 2, ['w', 'b'])
    """

    __slots__ = ("_items", "_lease")

    _items: dict[str, T]
    _lease: Lease

    def __init__(self, items: Mapping[str, T] | Iterable[tuple[str, T]] = ()) -> None:
        self._items = dict(items)
        self._lease = Lease()

    @classmethod
    def leased(cls, items: dict[str, T], lease: Lease) -> "Leaves[T]":
        """Wrap a dict without a copy, under a lease that other leaves share (for steps; the dict is given up)."""
        self = cls.__new__(cls)
        self._items = items
        self._lease = lease
        return self

    @property
    def lease(self) -> Lease:
        """The lease that these leaves are read under."""
        return self._lease

    @property
    def is_donated(self) -> bool:
        """Whether a donating step has consumed these leaves."""
        return self._lease.consumed_by is not None

    def alive(self, leaf: str = "*") -> dict[str, T]:
        """The dict itself (not to be changed), or `StateDonated` naming ``leaf``."""
        if self._lease.consumed_by is not None:
            raise StateDonated(
                leaf,
                expected="a state that is alive",
                found=f"one whose storage the step from {self._lease.consumed_by} consumed",
                mend="use the state that the step returned, or make the step with donate=False",
            )
        return self._items

    def __getitem__(self, name: str) -> T:
        return self.alive(repr(name))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.alive())

    def __len__(self) -> int:
        return len(self.alive())

    def __contains__(self, name: object) -> bool:
        return name in self.alive(repr(name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.alive() == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if self.is_donated:
            return f"Leaves(donated to the step from {self._lease.consumed_by})"
        names = list(self._items)
        shown = ", ".join(names[:_ADDRESS_FREE_REPR_LIMIT]) + (", ..." if len(names) > _ADDRESS_FREE_REPR_LIMIT else "")
        return f"Leaves({len(names)}: {shown})"


def _flatten(leaves: Leaves[T]) -> tuple[Iterable[T], tuple[str, ...], tuple[str, ...]]:
    items = leaves.alive()
    names = tuple(items)
    return items.values(), names, names


def _unflatten(names: tuple[str, ...], values: Iterable[T]) -> Leaves[T]:
    return Leaves(zip(names, values, strict=True))


_register: Any = optree.register_pytree_node  # its stub knows no mapping with a lease
_register(Leaves, _flatten, _unflatten, path_entry_type=optree.MappingEntry, namespace="trainfold")
