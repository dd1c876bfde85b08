"""`ByteRange`: a range of bytes in an open file, from which no more is read than is there."""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, Self, final

import attrs

from trainfold.core.errors import CheckpointHostile, CheckpointMissing, CheckpointTorn

_AT_ONCE: Final = 1 << 30  # bytes; Linux reads no more than 2 GiB in one call


@final
@attrs.frozen
class ByteRange:
    """A range of bytes in an open file.

    Attributes:
        name: of the file, and of what is in the range, for messages.
        descriptor: of the file.
        start: where the range begins.
        size: bytes.
    """

    name: str
    descriptor: int
    start: int
    size: int

    def inside(self, start: int, size: int, name: str) -> "ByteRange":
        """A range in this one.

        Raises:
            CheckpointTorn: if it is not inside.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise torn_bytes(name, f"bytes {start} to {start + size}", f"{self.size} bytes")
        return ByteRange(name, self.descriptor, self.start + start, size)

    def read(self, start: int, size: int) -> bytes:
        """Some of its bytes.

        Raises:
            CheckpointTorn: if they are not there.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise torn_bytes(self.name, f"bytes {start} to {start + size}", f"{self.size} bytes")
        found = os.pread(self.descriptor, size, self.start + start)
        if len(found) == size:
            return found
        memory = bytearray(size)
        self.read_into(start, memoryview(memory))
        return bytes(memory)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes into memory until it is full.

        Raises:
            CheckpointTorn: if there are not so many.
        """
        if start < 0 or start + len(memory) > self.size:
            raise torn_bytes(self.name, f"bytes {start} to {start + len(memory)}", f"{self.size} bytes")
        done = 0
        while done < len(memory):
            count = os.preadv(self.descriptor, [memory[done : done + _AT_ONCE]], self.start + start + done)
            if not count:
                raise torn_bytes(self.name, f"{len(memory)} bytes at {self.start + start}", f"{done} bytes")
            done += count

    def pieces(self, start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Its bytes from `start` to `stop`, piece by piece, each with where it begins. The next piece takes the memory of the one before."""
        memory = memoryview(bytearray(min(piece_bytes, max(0, stop - start))))
        for at in range(start, stop, piece_bytes):
            piece = memory[: stop - at]
            self.read_into(at, piece)
            yield at, piece


@final
class OpenFiles(AbstractContextManager["OpenFiles"]):
    """The files of a directory, each opened once, when it is first needed.

    Args:
        directory: in which they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, ByteRange] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._closing.close()

    def whole(self, file: str) -> ByteRange:
        """All bytes of a file.

        Raises:
            CheckpointMissing: if it is not there, or cannot be read.
            CheckpointHostile: if it is a pipe, or something else that has no end.
        """
        if file not in self._open:
            path = self._directory / file
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
                self._closing.callback(os.close, descriptor)
                found = os.fstat(descriptor)
            except OSError as error:
                raise CheckpointMissing(
                    str(path), expected="a file that can be read", found=error, fix="copy the directory again"
                ) from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointHostile(
                    str(path),
                    expected="a file",
                    found="a directory, a pipe or a device",
                    fix="do not use this directory",
                )
            self._open[file] = ByteRange(str(path), descriptor, 0, found.st_size)
        return self._open[file]

    def stats(self) -> list[tuple[str, int, int]]:
        """The name, the size and the time of each file that is open."""
        found = [(name, os.fstat(each.descriptor)) for name, each in sorted(self._open.items())]
        return [(name, each.st_size, each.st_mtime_ns) for name, each in found]


def torn_bytes(name: str, expected: str, found: str) -> CheckpointTorn:
    """The error for bytes that are not there."""
    return CheckpointTorn(name, expected=expected, found=found, fix="copy it again; the copy is not whole")
