"""`Leaves`: a frozen mapping from names to leaves that a donating step can consume. See ADR-0003."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, final

import attrs
import optree

from trainfold.core.errors import StateDonated

T = TypeVar("T")
_ADDRESS_FREE_REPR_LIMIT = 4


class Reader(Protocol):
    """A background reader of leaves, such as the hold of an async save."""

    @property
    def is_over(self) -> bool:
        """Whether it has finished reading."""

    def protect(self) -> None:
        """Return once the leaves may be overwritten: the unread leaves have been read or copied."""


@final
@attrs.define(eq=False)
class Lease:
    """The right to read a set of leaves, shared by every `Leaves` of one state and every part selected from it.

    A donating step ends the lease of its input with one assignment, however many leaves there are.

    Attributes:
        consumed_by: the step that took the storage, or None while the leaves are alive.
        readers: the background readers of the leaves; each is called before the leaves are overwritten.
    """

    consumed_by: int | None = None
    readers: tuple[Reader, ...] = ()

    def add_reader(self, reader: Reader) -> None:
        """Add a reader that is called before the leaves are overwritten."""
        self.readers = (*(each for each in self.readers if not each.is_over), reader)

    def protect(self) -> None:
        """Let the readers finish or copy. Call this before writing to the leaves."""
        for reader in self.readers:
            reader.protect()
        self.readers = ()  # not before: a caller that was interrupted while it waited must wait again


@final
class Leaves(Mapping[str, T], Generic[T]):
    """A frozen, ordered mapping from a name (an FQN) to a leaf, or to a mapping of leaves.

    It reads like a dict. After a donating step has consumed its state, each access raises `StateDonated` with the leaf
    and the step. `is_donated` reports that without raising.

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
        """Wrap a dict without a copy, under a lease that other leaves share. For steps; the caller gives up the dict."""
        self = cls.__new__(cls)
        self._items = items
        self._lease = lease
        return self

    @property
    def lease(self) -> Lease:
        """The lease of these leaves."""
        return self._lease

    @property
    def is_donated(self) -> bool:
        """Whether a donating step has consumed these leaves."""
        return self._lease.consumed_by is not None

    def alive(self, leaf: str = "*") -> dict[str, T]:
        """Return the dict itself, which must not be changed; raise `StateDonated` with the name ``leaf`` if it is consumed."""
        if self._lease.consumed_by is not None:
            raise StateDonated(
                leaf,
                expected="a state that no step has consumed",
                found=f"a state whose storage the step from {self._lease.consumed_by} consumed",
                fix="use the state that the step returned, or make the step with donate=False",
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


def leaves_in(tree: Any) -> list[Leaves[Any]]:
    """Return the outermost `Leaves` of a tree.

    Examples:
        >>> leaves_in({"ema": Leaves({"w": 1}), "n": 2})
        [Leaves(1: w)]
    """
    found = optree.tree_leaves(tree, _is_leaves, none_is_leaf=True, namespace="trainfold")
    return [leaf for leaf in found if isinstance(leaf, Leaves)]


def _is_leaves(node: Any) -> bool:
    return isinstance(node, Leaves)


def _flatten(leaves: Leaves[T]) -> tuple[Iterable[T], tuple[str, ...], tuple[str, ...]]:
    items = leaves.alive()
    names = tuple(items)
    return items.values(), names, names


def _unflatten(names: tuple[str, ...], values: Iterable[T]) -> Leaves[T]:
    return Leaves(zip(names, values, strict=True))


_register: Any = optree.register_pytree_node  # its type stub does not cover such a mapping
_register(Leaves, _flatten, _unflatten, path_entry_type=optree.MappingEntry, namespace="trainfold")
