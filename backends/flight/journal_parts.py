"""`JournalParts`: the journal of a run in a store that cannot append, such as a bucket."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, final

import attrs

from trainfold.backends.flight.log_parts import LogParts, LogTail
from trainfold.backends.stores.protocol import Store
from trainfold.core.flight.journal_line import JournalLine, encode_journal_line
from trainfold.core.format.file_names import RUN_FILE

_WRITTEN: Final["weakref.WeakSet[JournalParts]"] = weakref.WeakSet()


@final
class JournalParts:
    """Keeps the lines in memory, and puts them in other threads; nothing is ever cut. A kill loses the lines after the last put.

    Args:
        store: the run.
        name: of the journal.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._parts = LogParts(store, name)
        _WRITTEN.add(self)

    def is_in_run(self) -> bool:
        """Whether there is a run already, beside which the journal is; False if the store does not answer, which would not take the journal either."""
        try:
            return self._store.size(RUN_FILE) is not None
        except Exception:  # noqa: BLE001  # of a store: a log must not end a run
            return False

    def start(self, line: JournalLine, reached: Callable[[], dict[str, Any]]) -> None:
        """Append the line of a start, with how far the process before came; that is asked for in another thread."""
        self._parts.append(partial(_begun, line, reached))

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Append lines."""
        self._parts.append(b"".join(map(encode_journal_line, lines)))

    def put(self) -> None:
        """Put what was appended, and return when it is in the store, or cannot be put now."""
        self._parts.put()

    def close(self) -> None:
        """Put the rest."""
        self._parts.close()
        _WRITTEN.discard(self)

    def is_of(self, store: Store) -> bool:
        """Whether this is the journal of a run: of this store, or of another one with the same URL."""
        return self._store is store or (self._store.url == store.url and "://" in store.url)


def written_here(store: Store) -> JournalParts | None:
    """The journal of a run that this process writes; None if it writes none."""
    return next((each for each in _WRITTEN if each.is_of(store)), None)


def _begun(line: JournalLine, reached: Callable[[], dict[str, Any]], tail: LogTail) -> bytes:
    torn = b"" if bytes(tail.data[-1:]) in (b"", b"\n") else b"\n"
    return torn + encode_journal_line(attrs.evolve(line, data={**line.data, **reached()}))
