"""`JournalFile`: the journal of a run, a file beside its checkpoints that only grows."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from trainfold.backends.stores.local import local_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError
from trainfold.core.flight.journal_line import JournalLine, decode_journal, encode_journal_line

JOURNAL: Final = "journal.jsonl"
MOST_READ: Final = 2**26  # bytes, from its end
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
        self._is_given_up = False

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Append lines."""
        if self._is_given_up:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                end = os.lseek(file, 0, os.SEEK_END)
                is_torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
                os.write(file, b"\n" * is_torn + b"".join(map(encode_journal_line, lines)))
            finally:
                os.close(file)
        except OSError as error:
            self._is_given_up = True
            _LOG.warning("%s: the journal is not continued: %s", self._path, error)


def read_journal(store: Store) -> tuple[JournalLine, ...]:
    """The journal of a run; empty for a run without one, or with one that cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> read_journal(MemoryStore())
        ()
    """
    try:
        size = store.size(JOURNAL)
        return () if size is None else decode_journal(store.read(JOURNAL, start=max(0, size - MOST_READ), stop=size))
    except (TrainfoldError, OSError):
        return ()


def note_in_journal(store: Store, line: JournalLine) -> None:
    """Append a line to the journal of a run that has one."""
    if (near := local_store(store)) is not None:
        path = Path(near.url) / JOURNAL
        if path.is_file() and not path.is_symlink():
            JournalFile(path).append([line])
