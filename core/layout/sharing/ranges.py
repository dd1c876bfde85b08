"""`ByteSpan`: bytes of a file that a rank needs; `SharedRange`: bytes that one rank reads for all that need them. Nothing else is known of them."""

from typing import NamedTuple, final


@final
class ByteSpan(NamedTuple):
    """Bytes of a file that a rank needs.

    Attributes:
        file: the number of the file, in the order in which files are read.
        start: the first byte.
        stop: one past the last.
    """

    file: int
    start: int
    stop: int


@final
class SharedRange(NamedTuple):
    """Bytes that one rank reads for all that need them.

    Attributes:
        file: the number of the file.
        start: the first byte.
        stop: one past the last.
        reader: the rank that reads them; one of the takers.
        takers: the ranks that need them.
    """

    file: int
    start: int
    stop: int
    reader: int
    takers: frozenset[int]

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.stop - self.start
