"""`RecordFile`: a file of entries that survives the death of the writing process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from trainfold.core.rehearsal.entry import EntryKind, RecordedLine, decode_entry, encode_entry


def read_entries(path: Path) -> list[RecordedLine]:
    """All complete entries of a file, in the order of writing; torn lines are skipped."""
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
        """The complete entries that arrived since the last call."""
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
    """Appends entries to a file with one ``write`` each, and repeats them on a pipe if there is one.

    An entry that the operating system has accepted survives the death of the process. Entries are not synced, so a crash of the
    machine may lose them.

    Args:
        path: the file; it may hold entries of earlier processes, and a torn one at its end.
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
            os.write(self._file, b"\n")  # else the first entry would continue the torn one before it

    def write(self, kind: EntryKind, step: int, **data: object) -> None:
        """Append an entry.

        Raises:
            BrokenPipeError: if the watcher is gone; the entry in the file stays.
        """
        line = encode_entry(RecordedLine(kind, step, os.getpid(), round(self._clock() - self._start, 6), data))
        os.write(self._file, line)
        if self._watcher is not None:
            os.write(self._watcher, line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
