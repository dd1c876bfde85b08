"""`FlightFile`: the flight log of one rank, a file that only grows, except where a run goes back."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from trainfold.backends.stores.local import local_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointMissing, InvalidArgument
from trainfold.core.flight.flight import Flight, flight_of
from trainfold.core.flight.log_lines import LINE_BYTES, decode_line, decode_lines, encode_lines, lines_before
from trainfold.core.flight.step_record import LogLine, StateDigest

_LOG: Final = logging.getLogger("trainfold")
_NAME: Final = re.compile(r"flight-(\d{5,})\.log")


def flight_name(rank: int) -> str:
    """The name of a rank's flight log in the run's directory.

    Examples:
        >>> flight_name(3)
        'flight-00003.log'
    """
    return f"flight-{rank:05d}.log"


def directory_for_log(store: Store) -> Path:
    """The directory of a run that can hold a flight log.

    Raises:
        InvalidArgument: if it has no directory, where a file cannot grow.
    """
    if (near := local_store(store)) is not None:
        return Path(near.url).absolute()
    raise InvalidArgument(
        "record",
        expected="None, or a run in a directory, where a file can grow",
        found=store.url,
        fix="leave record out",
    )


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
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        file = self._file
        is_more = line.step == self._last and isinstance(line, StateDigest)  # about a step that is there
        if self._last is None or (line.step <= self._last and not is_more):
            kept = lines_before(line.step, os.fstat(file).st_size // LINE_BYTES,
                                lambda at: decode_line(os.pread(file, LINE_BYTES, at * LINE_BYTES)))  # fmt: skip
            if not kept and (size := os.fstat(file).st_size):
                self._warn_of(os.pread(file, size, 0))
            os.ftruncate(file, kept * LINE_BYTES)
        return file

    def _warn_of(self, data: bytes) -> None:
        """Warn of a file that goes, if it is another one than a log."""
        if decode_line(data[:LINE_BYTES]) is None and (damage := decode_lines(data).damage).is_all:
            _LOG.warning("%s; it is begun again", damage.text_of(str(self._path)))


def read_flights(run: Path) -> dict[int, Flight]:
    """The flight logs of a run by rank, each up to its torn end. `Flight.damage` has what could not be read before that.

    Args:
        run: its directory.

    Raises:
        CheckpointMissing: if it has none.
    """
    found = {int(name[1]): path for path in sorted(run.glob("flight-*.log")) if (name := _NAME.fullmatch(path.name))}
    if not found:
        raise CheckpointMissing(
            str(run),
            expected=f"a flight log, such as {flight_name(0)}",
            found="none",
            fix="record the steps of a run with CheckpointManager(..., record=100)",
        )
    logs = {rank: decode_lines(path.read_bytes()) for rank, path in sorted(found.items())}
    return {rank: flight_of(log.lines, log.damage) for rank, log in logs.items()}
