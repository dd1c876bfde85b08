"""`read_pieces`: the bytes of a log, whatever parts it has, piece by piece, with a few requests at a time."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Final, TypeAlias

from trainfold.backends.flight.log_parts import PART_BYTES, part_name, part_numbers
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store

_AT_ONCE: Final = 16  # pieces of `PART_BYTES` that are in memory
Sizes: TypeAlias = list[tuple[str, int]]
"""The parts of a log, in order, with their sizes in bytes."""


def sizes_of(store: Store, name: str, names: Collection[str]) -> Sizes:
    """The parts of a log.

    Args:
        store: the run.
        name: of the log.
        names: what the run holds.
    """
    parts = [part_name(name, number) for number in part_numbers(name, names)]
    return [(part, store.size(part) or 0) for part in parts]


def read_pieces(store: Store, sizes: Sizes, *, start: int = 0) -> Iterator[bytes]:
    """The bytes of a log from ``start`` on, each piece at most 1 MiB.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> for name in ("a.log", "a-00001.log"):
        ...     store.write(name, [name.encode()], size_bytes=len(name))
        >>> list(read_pieces(store, sizes_of(store, "a.log", store.list()), start=3))
        [b'og', b'a-00001.log']
    """
    calls = []
    for name, size in sizes:
        calls += [
            partial(store.read, name, start=at, stop=min(size, at + PART_BYTES))
            for at in range(max(0, start), size, PART_BYTES)
        ]
        start -= size
    for at in range(0, len(calls), _AT_ONCE):
        yield from side_by_side(calls[at : at + _AT_ONCE])


def read_log(store: Store, name: str, names: Collection[str]) -> bytes:
    """All bytes of a log.

    Args:
        store: the run.
        name: of the log.
        names: what the run holds.
    """
    return b"".join(read_pieces(store, sizes_of(store, name, names)))
