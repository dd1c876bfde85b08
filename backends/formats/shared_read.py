"""`read_shared`: reads bytes of files straight into memory, with a second thread if they are many."""

import os
from collections import deque
from collections.abc import Iterable
from typing import Final, TypeAlias

from trainfold.backends.formats.torch_save.byte_range import ByteRange
from trainfold.backends.side_by_side import at_once

_THREADS: Final = 2  # one copies about as fast as half of the memory's speed
_SHARED_FROM_BYTES: Final = 1 << 23
_PIECE_BYTES: Final = 1 << 22

Read: TypeAlias = tuple[ByteRange, int, memoryview]
"""A file, where the bytes begin in it, and the memory that is filled with them."""


def read_shared(reads: Iterable[Read]) -> None:
    """Fill memory with bytes of files.

    The page cache is copied once, and nothing is mapped: to map the pages of a file, and to unmap them, takes about as long as to copy them.

    Args:
        reads: any number of them. A thread takes the next piece when it has read one, so that one that waits for a core delays no other.

    Raises:
        CheckpointTorn: if a file has not so many bytes; some of the memory is filled then.
    """
    pieces = deque(
        (file, start + at, memory[at : at + _PIECE_BYTES])
        for file, start, memory in reads
        for at in range(0, len(memory), _PIECE_BYTES)
    )

    def read() -> None:
        while True:
            try:
                file, start, memory = pieces.popleft()
            except IndexError:  # nothing is left
                return
            file.read_into(start, memory)

    is_little = sum(len(memory) for _, _, memory in pieces) < _SHARED_FROM_BYTES
    threads = 1 if is_little or (os.cpu_count() or 1) == 1 else _THREADS
    at_once([read] * threads, threads=threads)
