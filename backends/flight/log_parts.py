"""`LogParts`: a log that grows in a store that cannot append: the last part is put again, whole, until it is full."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, TypeVar, final

from trainfold.backends.job import Job
from trainfold.backends.stores.protocol import Store, read_version, swap
from trainfold.core.digest import digest_of
from trainfold.core.errors import SaveFailed, TrainfoldError

T = TypeVar("T")
PART_BYTES: Final = 2**20
PUT_SECS: Final = 60.0  # a kill without a save loses no more of a log
_MOST_BYTES: Final = 2**24  # of a log in memory, while the store takes none of it: hundreds of thousands of steps
_ENTRY_BYTES: Final = 64  # of what is added at once, about
_MOST_ROUNDS: Final = 8  # of reading again what another process has put
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


class PartChanged(Exception):
    """Another process has written the part of a log since this one has read or put it."""


@final
class LogTail:
    """The last part of a log, as it will be put. In a store that `SwapsFiles` a put replaces nothing that another process has put since.

    Parts are numbered without a gap, and a part is asked for by its name, so that a list that lags hides none.

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
        self._number = 0
        self._version: object | None = None  # of the last part; None if there is none yet
        self._before = ""  # digest of the part before, if this object has filled it
        self._tried: list[str] = []  # digests of what may have been put
        self._is_read = self._is_new = False
        self.data = bytearray()
        self.found_at: float | None = None

    def read(self) -> None:
        """Read the last part, once: before anything is changed."""
        if self._is_read:
            return
        self._find(part_numbers(self._name, self._store.list())[-1:] or [0])
        while (
            self._version is not None
            and (after := read_version(self._store, part_name(self._name, self._number + 1))) is not None
        ):
            self._take(self._number + 1, after)  # the list lags
        self.found_at = None if self._version is None else self._store.committed_at(self._part)
        self._is_read = True

    def _find(self, numbers: Iterable[int]) -> None:
        """Take the part of this number, or the last one before it that there is."""
        (number,) = numbers
        while (found := read_version(self._store, part_name(self._name, number))) is None and number:
            number -= 1
        self._take(number, found)

    def _take(self, number: int, found: tuple[bytes, object] | None) -> None:
        self._number = number
        self.data, self._version = (bytearray(), None) if found is None else (bytearray(found[0]), found[1])

    def go_back(self) -> bool:
        """Delete the last part, and go on in the one before; False if it is the first. Parts go from the last one on, so that a kill leaves no hole."""
        if not self._number:
            return False
        self._check_before()
        if self._version is not None:
            self._put(b"")  # no other process puts it any more, and would find it deleted
            self._store.delete(self._part)
        self._find([self._number - 1])
        self._is_new = False
        return True

    def keep(self, size_bytes: int) -> None:
        """Cut what follows so many bytes."""
        self._is_new |= size_bytes < len(self.data)
        del self.data[size_bytes:]

    def extend(self, data: bytes) -> None:
        """Add bytes."""
        self._is_new |= bool(data)
        self.data += data

    def put(self) -> bool:
        """Put what is new, a full part after the other; whether there was anything.

        Raises:
            PartChanged: if another process has put the part since.
        """
        had_some = self._is_new
        while self._is_new:
            part = bytes(self.data[:PART_BYTES])
            self._check_before()
            self._put(part)
            if len(part) == PART_BYTES:
                self._number += 1
                self._version, self._before = None, digest_of(part)
                del self.data[:PART_BYTES]
            self._is_new = bool(self.data) and len(part) == PART_BYTES
        return had_some

    def _put(self, part: bytes) -> None:
        tried = tuple(self._tried)
        self._tried.append(digest_of(part))
        version = swap(self._store, self._part, part, self._version)
        if (
            version is None
            and tried
            and (found := read_version(self._store, self._part)) is not None
            and digest_of(found[0]) in tried
        ):
            version = swap(
                self._store, self._part, part, found[1]
            )  # that was a put of this process, whose answer was lost
        self._tried.clear()
        if version is None:
            raise PartChanged
        self._version = version

    def _check_before(self) -> None:
        """Look, before there is a new part, whether the part before is as this object has filled it."""
        if not self._before:
            return
        found = read_version(self._store, part_name(self._name, self._number - 1))
        if found is None or digest_of(found[0]) != self._before:
            raise PartChanged
        self._before = ""

    @property
    def _part(self) -> str:
        return part_name(self._name, self._number)


Entry: TypeAlias = bytes | Callable[[LogTail], bytes]
"""What is added: bytes, or what makes them when it is put, and may cut the log before."""


@final
class LogParts:
    """Keeps what is added in memory, and puts it in other threads: each minute, and where `put` is called.

    Law: what was added before a `put` that succeeds is in the store after it, and a kill leaves the log as one of the puts made it.

    A put that fails is a warning, and the next one puts the same again: a log must not end a run. While puts fail, about 16 MiB are kept; then nothing is added,
    with a warning, until a put of what is kept succeeds. What is left at the end is a warning too.

    Of two processes that write one log, the one that began to put later goes on; the other one stops, with a warning. No lock is needed for that: only rank 0 has
    that of a run, and a process that was taken for dead may wake.

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
        self._store, self._name = store, name
        self._where = f"{store.url}/{name}"
        self._every_secs = every_secs
        self._tail = LogTail(store, name)
        self._waiting: deque[Entry] = deque()  # the loop appends; the thread that puts takes from the other end
        self._taken: list[Entry] = []  # what the tail has, while the log is not `_is_ours`
        self._is_ours = False  # whether this process has put something, so that another writer is a later one
        self._is_over = self._is_full = False
        self._putting = threading.Lock()
        self._due_at = 0.0
        self._job: Job[None] | None = None
        self._has_failed = False

    def append(self, entry: Entry) -> None:
        """Add something. It makes no request here."""
        if self._is_over:
            return
        if not self._is_full or callable(entry):  # what cuts the log must not be left out: others follow it
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
                if not self._is_over:
                    self._send()
            except PartChanged:
                self._is_over = True
                self._waiting.clear()
                _LOG.warning(
                    "%s: another process has continued this log; this one adds nothing to it any more", self._where
                )
            except (TrainfoldError, OSError) as error:
                if not self._has_failed:
                    _LOG.warning("%s: the log is not in the store yet: %s", self._where, error)
                self._has_failed = True
                self._check_room()
            else:
                if self._is_full:
                    _LOG.warning(
                        "%s: the store takes this log again, which goes on; it lacks what was not added", self._where
                    )
                self._has_failed = self._is_full = False
                self._due_at = time.monotonic() + self._every_secs

    def _check_room(self) -> None:
        """Add nothing any more, while the store takes nothing, if as much is kept as may be."""
        if not self._is_full and len(self._waiting) * _ENTRY_BYTES + len(self._tail.data) > _MOST_BYTES:
            self._is_full = True
            _LOG.warning("%s: no more lines are added to this log for now: the store has taken none for so long that %d MiB wait, which are put when it does; "
                         "see which of its policies denies this name", self._where, _MOST_BYTES // 2**20)  # fmt: skip

    def _send(self) -> None:
        """Put what waits. Until this process has put something, another one may, whose lines this one then goes on after.

        Raises:
            PartChanged: if another process has gone on after what this one has put.
        """
        for left in reversed(range(_MOST_ROUNDS)):
            try:
                if self._waiting:
                    self._tail.read()
                while self._waiting:
                    entry = self._waiting[0]
                    self._tail.extend(entry if isinstance(entry, bytes) else entry(self._tail))
                    self._taken.append(self._waiting.popleft())
                self._is_ours |= self._tail.put()
            except PartChanged:
                if self._is_ours:
                    raise
                self._waiting.extendleft(reversed(self._taken))
                self._taken.clear()
                self._tail = LogTail(self._store, self._name)
                if not left:
                    raise SaveFailed(self._where, expected="a store that takes a log over the version that it shows", found=f"{_MOST_ROUNDS} refusals",
                                     fix="see what else writes there, and which policies the store has") from None  # fmt: skip
            else:
                break
            finally:
                if self._is_ours:
                    self._taken.clear()

    def close(self) -> None:
        """Put the rest."""
        if self._job is not None:
            self._job.wait()
        self.put()
        if self._has_failed and not self._is_over:
            _LOG.warning(
                "%s: the log ends here, and its last lines are lost: the store has not taken them", self._where
            )
