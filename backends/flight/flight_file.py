"""`FlightFile`: the flight log of one rank in a directory, a file that only grows, except where a run goes back."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from trainfold.core.flight.line_scanner import other_file
from trainfold.core.flight.log_lines import LINE_BYTES, decode_line, encode_lines, goes_back, last_line, lines_before
from trainfold.core.flight.step_record import LogLine

_LOG: Final = logging.getLogger("trainfold")


@final
class FlightFile:
    """Appends the lines of each step with one ``write``, which survives the death of the process; nothing is synced.

    Law: the log of a run that was killed and resumed has the lines of the run that was never killed.

    A run that goes back to an earlier step, by a resume or a load, repeats steps: the first line that comes cuts what the log has from its step
    on. A log that cannot be written, such as on a full disk, is given up with a warning: it must not end a run.

    Args:
        path: the file; made at the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._last: int | None = None  # the step of the last line; None where the file was not looked at
        self._is_given_up = False

    def append(self, lines: Sequence[LogLine]) -> None:
        """Append the lines of one step."""
        if self._is_given_up or not lines:
            return
        try:
            file = self._opened(lines[0])
            data = encode_lines(lines)
            left = len(data) - os.write(file, data)
        except OSError as error:
            self._give_up(error)
        else:
            self._last = lines[-1].step
            if left:
                self._give_up(f"the disk took all but {left} bytes of a step")

    def reached(self) -> dict[str, Any]:
        """The last step that the log has, and when it was written: how far the process before came. Empty without one."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                found = last_line(status.st_size // LINE_BYTES, lambda at: decode_line(os.pread(file.fileno(), LINE_BYTES, at * LINE_BYTES)))  # fmt: skip
                return {} if found is None else {"reached": found.step, "reached_at": status.st_mtime}
        except OSError:
            return {}

    def put(self) -> None:
        """Nothing: each line is in the file already."""

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = self._last = None

    def _give_up(self, why: object) -> None:
        self._is_given_up = True
        _LOG.warning("%s: no more steps are recorded: %s", self._path, why)

    def _opened(self, line: LogLine) -> int:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        file = self._file
        if goes_back(self._last, line):
            kept = lines_before(line.step, os.fstat(file).st_size // LINE_BYTES,
                                lambda at: decode_line(os.pread(file, LINE_BYTES, at * LINE_BYTES)))  # fmt: skip
            if not kept and (size := os.fstat(file).st_size):
                self._warn_of(os.pread(file, size, 0))
            os.ftruncate(file, kept * LINE_BYTES)
        return file

    def _warn_of(self, data: bytes) -> None:
        """Warn of a file that goes, if it is another one than a log."""
        if damage := other_file(data):
            _LOG.warning("%s; it is begun again", damage.text_of(str(self._path)))
