"""`JournalFile`: the journal of a run in a directory, a file beside its checkpoints that only grows."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.core.flight.journal_line import JournalLine, encode_journal_line
from trainfold.core.format.file_names import RUN_FILE

_LOG: Final = logging.getLogger("trainfold")


@final
class JournalFile:
    """Appends lines with one ``write`` each, which survives the death of the process; nothing is synced, and nothing is ever cut.

    A journal that cannot be written is given up with a warning: it must not end a run.

    Args:
        path: the file; made at the first line. It may end with a torn line of a process that died.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_given_up = self._is_made = False

    def is_in_run(self) -> bool:
        """Whether there is a run already, beside which the journal is."""
        return os.path.lexists(self._path.parent / RUN_FILE)

    def start(self, line: JournalLine, reached: Callable[[], dict[str, Any]]) -> None:
        """Append the line of a start, with how far the process before came."""
        self.append([attrs.evolve(line, data={**line.data, **reached()})])

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Append lines."""
        if self._is_given_up:
            return
        try:
            if not self._is_made:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                end = os.lseek(file, 0, os.SEEK_END)
                is_torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
                os.write(file, b"\n" * is_torn + b"".join(map(encode_journal_line, lines)))
            finally:
                os.close(file)
            self._is_made = True
        except FileNotFoundError:
            self._is_given_up = (
                True  # the run was deleted, which its saves say; the end of the process must not make it again
            )
        except OSError as error:
            self._is_given_up = True
            _LOG.warning("%s: the journal is not continued: %s", self._path, error)

    def put(self) -> None:
        """Nothing: each line is in the file already."""

    def close(self) -> None:
        """Nothing: the file is not kept open."""
