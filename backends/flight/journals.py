"""`read_journal` reads the journal of a run, wherever it is; `journal_writer` writes it."""

from pathlib import Path
from typing import Final, TypeAlias

from trainfold.backends.flight.flights import file_for_log
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journal_parts import JournalParts, written_here
from trainfold.backends.flight.log_pieces import read_pieces, sizes_of
from trainfold.backends.stores.local import local_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.flight.journal_line import JournalLine, JournalLines, decode_journal

JournalWriter: TypeAlias = JournalFile | JournalParts
JOURNAL: Final = "journal.jsonl"


def journal_writer(store: Store) -> JournalWriter:
    """What appends to the journal of a run."""
    path = file_for_log(store, JOURNAL)
    return JournalParts(store, JOURNAL) if path is None else JournalFile(path)


def read_journal(store: Store) -> JournalLines:
    """The journal of a run; empty for a run without one.

    Raises:
        CheckpointError: the matching subclass, if it is there and cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> read_journal(MemoryStore())
        JournalLines(lines=(), left_out=0, unreadable=0)
    """
    return decode_journal(read_pieces(store, sizes_of(store, JOURNAL, store.list())))


def note_in_journal(store: Store, line: JournalLine) -> None:
    """Append a line to the journal of a run that has one; in a bucket, to one that this process writes."""
    if (open_here := written_here(store)) is not None:
        open_here.append([line])
    elif (near := local_store(store)) is not None:
        path = Path(near.url) / JOURNAL
        if path.is_file() and not path.is_symlink():
            JournalFile(path).append([line])
