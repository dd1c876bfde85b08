"""`LogParts`: a log that grows in a store that cannot append: the last part is put again, whole, until it is full."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, TypeVar, final

from trainfold.backends.job import Job
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError

T = TypeVar("T")
PART_BYTES: Final = 2**20
PUT_SECS: Final = 60.0  # a kill without a save loses no more of a log
_LOG: Final = logging.getLogger("trainfold")


def part_name(name: str, number: int) -> str:
    """The name of a part of a log. That of the first is that of the log, so that a log of one file is a log of one part.

    Examples:
        >>> part_name("journal.jsonl", 0), part_name("flight-00003.log", 12)
        ('journal.jsonl', 'flight-00003-00012.log')
    """
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number:05d}.{ending}" if number else name


def part_numbers(name: str, names: Iterable[str]) -> list[int]:
    """The numbers of the parts of a log among the names of a run, in order.

    Examples:
        >>> part_numbers("flight-00003.log", ["flight-00003-00012.log", "flight-00003.log", "flight-00004.log"])
        [0, 12]
    """
    stem, _, ending = name.rpartition(".")
    wanted = re.compile(rf"{re.escape(stem)}-(\d{{5,}})\.{re.escape(ending)}")
    found = {int(match[1]) for each in names if (match := wanted.fullmatch(each))}
    return sorted(found | ({0} if name in names else set()))


@final
class LogTail:
    """The last part of a log, as it will be put.

    Args:
        store: the run.
        name: of the log.

    Attributes:
        data: the bytes of the last part, and those that follow it.
        found_at: when the last part was put by a process before, in seconds since 1970; None if that is not known.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._before: list[int] = []  # numbers of the parts before the last one
        self._number = 0
        self._is_read = self._is_new = False
        self.data = bytearray()
        self.found_at: float | None = None

    def read(self) -> None:
        """Read the last part, once: before anything is changed."""
        if not self._is_read:
            numbers = part_numbers(self._name, self._store.list())
            if numbers:
                *self._before, self._number = numbers
                self.data = bytearray(self._store.read(self._part))
                self.found_at = self._store.committed_at(self._part)
            self._is_read = True

    def go_back(self) -> bool:
        """Delete the last part, and go on in the one before; False if it is the first. Parts go from the last one on, so that a kill leaves no hole."""
        if not self._before:
            return False
        data = bytearray(self._store.read(part_name(self._name, self._before[-1])))
        self._store.delete(self._part)
        self._number, self.data, self._is_new = self._before.pop(), data, False
        return True

    def keep(self, size_bytes: int) -> None:
        """Cut what follows so many bytes."""
        self._is_new |= size_bytes < len(self.data)
        del self.data[size_bytes:]

    def extend(self, data: bytes) -> None:
        """Add bytes."""
        self._is_new |= bool(data)
        self.data += data

    def put(self) -> None:
        """Put what is new, a full part after the other."""
        while self._is_new:
            part = bytes(self.data[:PART_BYTES])
            self._store.write(self._part, [part], size_bytes=len(part))
            if len(part) == PART_BYTES:
                self._before.append(self._number)
                self._number += 1
                del self.data[:PART_BYTES]
            self._is_new = bool(self.data) and len(part) == PART_BYTES

    @property
    def _part(self) -> str:
        return part_name(self._name, self._number)


Entry: TypeAlias = bytes | Callable[[LogTail], bytes]
"""What is added: bytes, or what makes them when it is put, and may cut the log before."""


@final
class LogParts:
    """Keeps what is added in memory, and puts it in other threads: each minute, and where `put` is called.

    Law: what was added before a `put` that succeeds is in the store after it, and a kill leaves the log as one of the puts made it.

    A put that fails is a warning, and the next one puts the same again: a log must not end a run.

    Args:
        store: the run.
        name: of the log.
        every_secs: the longest time between two puts while something is added.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> log = LogParts(store, "a.log")
        >>> log.append(b"one")
        >>> log.close()
        >>> store.read("a.log")
        b'one'
    """

    def __init__(self, store: Store, name: str, *, every_secs: float = PUT_SECS) -> None:
        self._where = f"{store.url}/{name}"
        self._every_secs = every_secs
        self._tail = LogTail(store, name)
        self._waiting: deque[Entry] = deque()  # the loop appends; the thread that puts takes from the other end
        self._putting = threading.Lock()
        self._due_at = 0.0
        self._job: Job[None] | None = None
        self._has_failed = False

    def append(self, entry: Entry) -> None:
        """Add something. It makes no request here."""
        self._waiting.append(entry)
        now = time.monotonic()
        if now >= self._due_at and (self._job is None or self._job.is_over):
            self._due_at = now + self._every_secs
            self._job = Job(self.put, name="trainfold-log")
            self._job.start()

    def look(self, see: Callable[[LogTail], T]) -> T:
        """Look at the last part, with requests, while nothing is put."""
        with self._putting:
            self._tail.read()
            return see(self._tail)

    def put(self) -> None:
        """Put what was added, and return when it is in the store, or cannot be put now."""
        with self._putting:
            try:
                if self._waiting:
                    self._tail.read()
                while self._waiting:
                    entry = self._waiting[0]
                    self._tail.extend(entry if isinstance(entry, bytes) else entry(self._tail))
                    self._waiting.popleft()
                self._tail.put()
            except (TrainfoldError, OSError) as error:
                if not self._has_failed:
                    _LOG.warning("%s: the log is not in the store yet: %s", self._where, error)
                self._has_failed = True
            else:
                self._has_failed = False
                self._due_at = time.monotonic() + self._every_secs

    def close(self) -> None:
        """Put the rest."""
        if self._job is not None:
            self._job.wait()
        self.put()
