"""`SentLogs`: the flight logs and the journal of a run on a disk, kept in the far tier too, as the parts that a bucket has."""

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Final, TypeAlias, final

from trainfold.backends.flight.flights import flight_name, ranks_with_log
from trainfold.backends.flight.journals import JOURNAL
from trainfold.backends.flight.log_parts import PART_BYTES, part_name, part_numbers
from trainfold.backends.flight.log_pieces import Sizes, read_log, read_pieces, sizes_of
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import TrainfoldError
from trainfold.core.flight.merged_journals import has_lines, merged_journals

_FIRST_BYTES: Final = 64
_AT_ONCE: Final = 8  # logs; each has two parts in memory
_LOG: Final = logging.getLogger("trainfold")


@final
class SentLogs:
    """Sends what is new of the logs, and fetches them where the disk is lost. The caller holds the locks of both tiers.

    Law: after a `send` that logs no warning, the far tier has the bytes of each log.

    A log that cannot be sent, or fetched, is a warning: it ends no run.

    Args:
        near: the tier that is read, and written by `fetch`.
        far: the tier that is written, and read by `fetch`.
    """

    def __init__(self, near: Store, far: Store) -> None:
        self._near, self._far = near, far
        self._mutex = threading.Lock()
        self._sent: dict[str, dict[int, str]] = {}  # log -> number of a part -> its digest; "" if it is not known
        self._seen: dict[str, _State] = {}  # log -> how the near tier had it when it was sent
        self._left: set[str] = set()
        self._has_failed = False

    def compare(self) -> None:
        """Compare the logs of both tiers before this process writes any: one that it cuts itself later, as where a run starts over, is sent all the same."""
        with self._mutex:
            try:
                there = self._far.list()
                at_once([partial(self._compare, name, there) for name in _logs_in(there)], threads=_AT_ONCE)
            except (TrainfoldError, OSError) as error:
                _LOG.warning("%s: the logs are compared when they are sent: %s", self._far.url, error)

    def _compare(self, name: str, there: list[str], *, missing: bool = True) -> None:
        """Note what the far tier has of a log; one that is not that of the disk, or that the disk has not got, stays as it is."""
        is_other = self._begins_otherwise(name, missing=missing)
        self._sent[name] = dict.fromkeys(part_numbers(name, there), "")
        if is_other:
            self._left.add(name)
            _LOG.warning("%s/%s: the log there begins otherwise than that of the disk, and stays as it is: the lines from here on are on the disk alone; "
                         "copy the log from there before a start to go on with it", self._far.url, name)  # fmt: skip

    def send(self) -> None:
        """Send what the far tier has otherwise, or not. A log that has its size and its time since it was sent is not read."""
        with self._mutex:
            try:
                names = self._near.list()
                states = {name: self._state(name, names) for name in _logs_in(names) if name not in self._left}
                changed = {name: state for name, state in states.items() if state != self._seen.get(name)}
                there = [] if changed.keys() <= self._sent.keys() else self._far.list()
                calls = [partial(self._sent_or_why, name, state, there) for name, state in changed.items()]
                refused = [error for error in at_once(calls, threads=_AT_ONCE) if error is not None]
                if refused:
                    raise refused[0]
            except (TrainfoldError, OSError) as error:
                if not self._has_failed:
                    _LOG.warning("%s: a log of this run is not in the far tier yet: %s", self._far.url, error)
                self._has_failed = True
            else:
                self._has_failed = False

    def _state(self, name: str, names: list[str]) -> "_State":
        return [(part, size, self._near.committed_at(part)) for part, size in sizes_of(self._near, name, names)]

    def _sent_or_why(self, name: str, state: "_State", there_names: list[str]) -> TrainfoldError | OSError | None:
        """Send a log; why not, if it was refused: an error here would keep those from being sent that no thread has begun."""
        try:
            self._send(name, state, there_names)
        except (TrainfoldError, OSError) as error:
            return error
        return None

    def _send(self, name: str, state: "_State", there_names: list[str]) -> None:
        if name not in self._sent:
            self._compare(name, there_names, missing=False)
        if name in self._left:
            return
        there, sizes = self._sent[name], [(part, size) for part, size, _ in state]
        parts = -(-sum(size for _, size in sizes) // PART_BYTES)
        for number in sorted(there, reverse=True):
            if number >= parts:
                self._far.delete(part_name(name, number))
                del there[number]
        for number, data in enumerate(_parts(self._near, sizes)):
            part, digest = part_name(name, number), digest_of(data)
            if there.get(number) == "" and self._far.size(part) == len(data):
                there[number] = digest_of(self._far.read(part))
            if there.get(number) != digest:
                self._far.write(part, [data], size_bytes=len(data))
                there[number] = digest
        self._seen[name] = state

    def _begins_otherwise(self, name: str, *, missing: bool) -> bool:
        """Whether the far tier has a log that does not begin as that of the disk, such as one that could not be fetched."""
        sizes = self._far.size(name), self._near.size(name)
        if not sizes[0] or not sizes[1]:
            return bool(sizes[0]) and missing
        if name == JOURNAL:
            far, near = (read_log(store, name, store.list()) for store in (self._far, self._near))
            return not has_lines(near, far)
        stop = min(_FIRST_BYTES, *sizes)  # type: ignore[type-var]
        return self._far.read(name, start=0, stop=stop) != self._near.read(name, start=0, stop=stop)

    def fetch(self, *, missing: bool = False) -> None:
        """Put the flight logs of the far tier in the place of other ones, or only of those that are not there, and add what its journal alone has.

        One that could not be fetched now is not sent either. Where a checkpoint was fetched, the far tier has the log of the steps before it: the disk may have been left behind with steps that the run did not go on from.
        """
        with self._mutex:
            names, mine = self._far.list(), self._near.list()
            for name in _logs_in(names):
                try:
                    there, here = sizes_of(self._far, name, names), sizes_of(self._near, name, mine)
                    if name == JOURNAL and here:
                        self._merge(
                            name, *(b"".join(read_pieces(*each)) for each in ((self._near, here), (self._far, there)))
                        )
                    elif not here or not (missing or self._has_all(there, here)):
                        for part, _ in reversed(here[1:]):
                            self._near.delete(part)
                        self._near.write(name, read_pieces(self._far, there), size_bytes=_total(there))
                except (TrainfoldError, OSError) as error:
                    self._left.add(name)
                    _LOG.warning(
                        "%s/%s: the log is not fetched, and stays as it is: the lines from here on are on the disk alone: %s",
                        self._far.url,
                        name,
                        error,
                    )

    def _has_all(self, there: Sizes, here: Sizes) -> bool:
        """Whether a log of the near tier begins with all of that of the far one."""
        if _total(here) < _total(there):
            return False
        pairs = zip(_parts(self._far, there), _parts(self._near, here), strict=False)
        return all(mine.startswith(other) for other, mine in pairs)

    def _merge(self, name: str, near: bytes, far: bytes) -> None:
        """Put the lines of both tiers into the journal of the near one, of which nothing is ever cut."""
        merged = merged_journals(near, far)
        if merged != near:
            self._near.write(name, [merged], size_bytes=len(merged))


_State: TypeAlias = list[tuple[str, int, float | None]]
"""The parts of a log, each with its size and the time of its last change."""


def _logs_in(names: list[str]) -> list[str]:
    """The logs among the names of a run."""
    flights = [flight_name(rank) for rank in ranks_with_log(names)]
    return [*flights, JOURNAL] if part_numbers(JOURNAL, names) else flights


def _total(sizes: Sizes) -> int:
    return sum(size for _, size in sizes)


def _parts(store: Store, sizes: Sizes) -> Iterator[bytes]:
    """The bytes of a log in parts that are full, but for the last one, whatever parts the store has."""
    waiting = bytearray()
    places = [(name, at, min(size, at + PART_BYTES)) for name, size in sizes for at in range(0, size, PART_BYTES)]
    for name, start, stop in places:
        waiting += store.read(name, start=start, stop=stop)
        while len(waiting) >= PART_BYTES:
            yield bytes(waiting[:PART_BYTES])
            del waiting[:PART_BYTES]
    if waiting:
        yield bytes(waiting)
