"""`RecordFile`: entries in a file that survives the death of the process which writes them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from trainfold.core.rehearsal.entry import EntryKind, RecordedLine, decode_entry, encode_entry


def read_entries(path: Path) -> list[RecordedLine]:
    """All whole entries of a file, in the order in which they were written; torn lines are passed over."""
    return Tail(path).new()


@final
class Tail:
    """Follows a file that another process appends to.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new(self) -> list[RecordedLine]:
        """The whole entries that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(found)
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [entry for entry in map(decode_entry, lines) if entry is not None]


@final
class RecordFile:
    """Appends entries to a file, one ``write`` each, and repeats them on a pipe if there is one.

    What the operating system has taken survives the death of the process. It is not synced, so the death of the machine
    may lose it.

    Args:
        path: the file; it may hold entries, or half of one, of earlier processes.
        watcher: a file descriptor to repeat the entries on, or None.
        clock: seconds, from any start.
    """

    def __init__(self, path: Path, *, watcher: int | None = None, clock: Callable[[], float]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._watcher = watcher
        self._clock = clock
        self._start = clock()
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            os.write(self._file, b"\n")  # else the first entry here would be glued to the torn one before

    def write(self, kind: EntryKind, step: int, **data: object) -> None:
        """Append an entry.

        Raises:
            BrokenPipeError: if the watcher has gone; what is written to the file stays.
        """
        line = encode_entry(RecordedLine(kind, step, os.getpid(), round(self._clock() - self._start, 6), data))
        os.write(self._file, line)
        if self._watcher is not None:
            os.write(self._watcher, line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
