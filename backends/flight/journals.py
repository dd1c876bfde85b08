"""`read_journal` reads the journal of a run, wherever it is; `journal_writer` writes it."""

from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from trainfold.backends.flight.flights import file_for_log
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journal_parts import JournalParts, written_here
from trainfold.backends.flight.log_parts import part_name, part_numbers
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.local import local_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError
from trainfold.core.flight.journal_line import JournalLine, decode_journal

JournalWriter: TypeAlias = JournalFile | JournalParts
JOURNAL: Final = "journal.jsonl"
MOST_READ: Final = 2**26  # bytes, from its end


def journal_writer(store: Store) -> JournalWriter:
    """What appends to the journal of a run."""
    path = file_for_log(store, JOURNAL)
    return JournalParts(store, JOURNAL) if path is None else JournalFile(path)


def read_journal(store: Store) -> tuple[JournalLine, ...]:
    """The journal of a run; empty for a run without one, or with one that cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> read_journal(MemoryStore())
        ()
    """
    try:
        left, found = MOST_READ, []
        for number in reversed(part_numbers(JOURNAL, store.list())):
            name = part_name(JOURNAL, number)
            size = store.size(name) or 0
            found.append(partial(store.read, name, start=max(0, size - left), stop=size))
            left -= size
            if left <= 0:
                break
        return decode_journal(b"".join(side_by_side(found[::-1])))
    except (TrainfoldError, OSError):
        return ()


def note_in_journal(store: Store, line: JournalLine) -> None:
    """Append a line to the journal of a run that has one; in a bucket, to one that this process writes."""
    if (open_here := written_here(store)) is not None:
        open_here.append([line])
    elif (near := local_store(store)) is not None:
        path = Path(near.url) / JOURNAL
        if path.is_file() and not path.is_symlink():
            JournalFile(path).append([line])
