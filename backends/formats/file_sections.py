"""`Section`: a part of a file that is made when its bytes are due. `bytes_from`: the bytes of sections from an offset on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias, final

from trainfold.backends.stores.protocol import Buffer

Section: TypeAlias = tuple[int, Callable[[], Iterable[Buffer]]]
"""How many bytes it has, and a function that makes them, piece by piece."""


def bytes_from(sections: Iterable[Section], start: int) -> Iterator[Buffer]:
    """The bytes of sections from an offset on. A section that ends before it is not made; one in which it lies is, and its first bytes are dropped.

    Of a section nothing is kept when the next one is made.

    Args:
        sections: in order.
        start: the offset.

    Examples:
        >>> [bytes(each) for each in bytes_from([(3, lambda: 1 / 0), (4, lambda: [b"de", b"fg"])], 4)]
        [b'e', b'fg']
    """
    for size_bytes, pieces in sections:
        if start and start >= size_bytes:
            start -= size_bytes
            continue
        for piece in pieces():
            view = memoryview(piece).cast("B")
            if start < len(view):
                yield view[start:]
            start = max(0, start - len(view))
            del piece, view  # before the next one is made: its memory may be as much again


@final
class CutParts:
    """Parts, given up to a number of bytes at a time.

    Args:
        parts: in order; the next one is asked for when all of the one before was given.
        whole: a hash, which is updated with what was given.
    """

    def __init__(self, parts: Iterable[Buffer], whole: Any) -> None:
        self._parts = iter(parts)
        self._rest: memoryview = memoryview(b"")
        self.whole: Final = whole

    def upto(self, size_bytes: int) -> Iterator[Buffer]:
        """The next bytes: as many, or all that are left."""
        while size_bytes and self._fill():
            piece, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
            self.whole.update(piece)
            size_bytes -= len(piece)
            yield piece
            del piece  # as in `bytes_from`

    def has_more(self) -> bool:
        """Whether there are bytes that were not given."""
        return self._fill()

    def _fill(self) -> bool:
        while not self._rest:
            self._rest = memoryview(b"")  # the memory of the part before may be needed for this one
            part = next(self._parts, None)
            if part is None:
                return False
            self._rest = memoryview(part).cast("B")
        return True
