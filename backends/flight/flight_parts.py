"""`FlightParts`: the flight log of one rank in a store that cannot append, such as a bucket."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

from trainfold.backends.flight.log_parts import LogParts, LogTail
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError
from trainfold.core.flight.line_scanner import other_file
from trainfold.core.flight.log_lines import LINE_BYTES, decode_line, encode_lines, goes_back, last_line, lines_before
from trainfold.core.flight.step_record import LogLine

_LOG: Final = logging.getLogger("trainfold")


@final
class FlightParts:
    """Keeps the lines in memory, and puts them in other threads.

    Law: once `put` has returned, the log has the lines of the run that was never killed, up to its last line.

    A kill loses the lines after the last put: those of the last minute, and, as each save puts them before it is committed, only lines of
    steps that are trained again.

    Args:
        store: the run.
        name: of the log.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._where = f"{store.url}/{name}"
        self._parts = LogParts(store, name)
        self._last: int | None = None
        self._found: dict[str, Any] | None = None  # how far the log came before it was cut

    def append(self, lines: Sequence[LogLine]) -> None:
        """Append the lines of one step."""
        if lines:
            data = encode_lines(lines)
            self._parts.append(partial(self._cut, lines[0].step, data) if goes_back(self._last, lines[0]) else data)
            self._last = lines[-1].step

    def reached(self) -> dict[str, Any]:
        """The last step that the log had before this process, which came at least as far, and when it was put; with requests. Empty without one."""
        try:
            return self._parts.look(self._find)
        except (TrainfoldError, OSError):
            return {}

    def put(self) -> None:
        """Put what was appended, and return when it is in the store, or cannot be put now."""
        self._parts.put()

    def close(self) -> None:
        """Put the rest."""
        self._parts.close()

    def _cut(self, step: int, data: bytes, tail: LogTail) -> bytes:
        """Cut the log before a step, and return what follows there."""
        self._find(tail)
        while not (kept := lines_before(step, len(tail.data) // LINE_BYTES, _reader(tail.data))) and tail.go_back():
            pass
        if not kept and (damage := other_file(bytes(tail.data))):
            _LOG.warning("%s; it is begun again", damage.text_of(self._where))
        tail.keep(kept * LINE_BYTES)
        return data

    def _find(self, tail: LogTail) -> dict[str, Any]:
        if self._found is None:
            line = last_line(len(tail.data) // LINE_BYTES, _reader(tail.data))
            at = {} if tail.found_at is None else {"reached_at": tail.found_at}
            self._found = {} if line is None else {"reached": line.step, "is_least": True, **at}
        return self._found


def _reader(data: bytes | bytearray) -> Callable[[int], LogLine | None]:
    return lambda at: decode_line(bytes(data[at * LINE_BYTES : (at + 1) * LINE_BYTES]))
