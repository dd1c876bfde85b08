"""`PresentDirectory`: a directory that is there already; what would be written is compared with its files (ADR-0059). `is_present`: whether its names and sizes permit that."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias, final

from trainfold.backends.stores.os_errors import save_failure
from trainfold.backends.stores.protocol import Buffer
from trainfold.backends.stores.staged_files import sync_above
from trainfold.core.errors import InvalidArgument

PartsFrom: TypeAlias = Callable[[int], Iterable[Buffer]]
"""Gives the bytes of a file from an offset on."""

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a directory is opened that is not a link."""

_PIECE_BYTES: Final = 1 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@final
class PresentDirectory:
    """A directory that is there, as what writes it again sees it: nothing is written, and each byte is compared.

    Args:
        path: of the directory, which `is_present`; without links.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = os.open(path, DIRECTORY)
        self._compared: set[str] = set()

    def write(self, name: str, parts: Iterable[Buffer] | PartsFrom, *, size_bytes: int) -> bool:
        """Compare a file with what would be written.

        Args:
            name: of the file, without a directory.
            parts: its bytes in order, or a function that gives them from an offset on.
            size_bytes: how many they are in all.

        Returns:
            False: nothing was written.

        Raises:
            InvalidArgument: if the file has other bytes.
            SaveFailed: if it cannot be read.
        """
        with failures(self._path):
            fd = os.open(name, _READ, dir_fd=self._files)
            try:
                at = 0
                for part in parts(0) if callable(parts) else parts:
                    view = memoryview(part).cast("B")
                    for start in range(0, len(view), _PIECE_BYTES):
                        piece = view[start : start + _PIECE_BYTES]
                        there = bytearray(len(piece))
                        if os.preadv(fd, [there], at) < len(piece) or there != piece:
                            raise in_the_way(self._path, f"another {name}, from byte {at} on or soon after it")
                        at += len(piece)
                        del piece
                    del part, view  # before the next one is made: its memory may be as much again
                if at != size_bytes or os.fstat(fd).st_size != size_bytes:
                    raise in_the_way(self._path, f"another {name}, of another size")
                os.fsync(fd)
            finally:
                os.close(fd)
        self._compared.add(name)
        return False

    def path_of(self, name: str) -> str:
        """Where a file is."""
        return f"{self._path}/{name}"

    def commit(self) -> None:
        """Make the directory durable, which a writer may have left undone.

        Raises:
            InvalidArgument: if it has files that were not compared.
            SaveFailed: if it cannot be synced.
        """
        with failures(self._path):
            if others := set(os.listdir(self._files)) ^ self._compared:  # noqa: PTH208  # a descriptor
                raise in_the_way(self._path, f"one with or without {min(others)}")
            os.fsync(self._files)
            sync_above(self._path)

    def close(self) -> None:
        """Close it."""
        os.close(self._files)


def is_present(path: str, files: Mapping[str, int]) -> bool:
    """Whether a directory has files of these names and sizes, and nothing else.

    Args:
        path: of the directory.
        files: name -> size in bytes.
    """
    if not files or not os.path.isdir(path):  # noqa: PTH112
        return False
    with os.scandir(path) as entries:
        found = {each.name: each.stat(follow_symlinks=False) for each in entries}
    return {name: each.st_size for name, each in found.items() if stat.S_ISREG(each.st_mode)} == files and len(
        found
    ) == len(files)


def what_is_at(path: str) -> str:
    """What is in the way of a directory; an empty text for nothing, and for an empty directory."""
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        return "a link that leads nowhere" if os.path.lexists(path) else ""
    except NotADirectoryError:
        return "a file"
    return "" if first is None else f"a directory with {first.name} in it"


def in_the_way(path: str, found: str = "") -> InvalidArgument:
    """The error for a directory that is not written.

    Args:
        path: of the directory.
        found: what is there, if it is known better than by its first name.
    """
    return InvalidArgument(path, expected="a directory that does not exist yet, or is empty, or has the very files that are to be written",
                           found=found or what_is_at(path) or "something else",
                           fix="choose another path, or remove what is there; nothing is overwritten")  # fmt: skip


@contextmanager
def failures(where: str) -> Iterator[None]:
    """Name the errors of the machine, and say what they mean for a directory that is staged."""
    try:
        yield
    except OSError as error:
        named = save_failure(error, where)
        raise type(named)(where, expected=named.expected, found=error,
                          fix="make room or look at the device there, or choose another disk; run this again, and it goes on with what is missing",
                          ) from error  # fmt: skip
