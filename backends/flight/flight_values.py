"""`FlightValues`: the losses and norms of a flight log that may still grow, each read once."""

import os
from array import array
from pathlib import Path
from typing import Final, final

from trainfold.core.flight.damage import Damage
from trainfold.core.flight.log_lines import LINE_BYTES, line_numbers

_CHUNK: Final = LINE_BYTES * 2**14


@final
class FlightValues:
    """What the steps of a log have recorded, in order.

    A log that a resume has cut is read again from its start, unless its last line is as it was: then the run has done again what it did before.

    Args:
        path: the log.

    Attributes:
        loss: (steps, values) of the losses.
        norm: the same of the norms.
        first: the first step; None of an empty log.
        last: the last one.
        damage: what could not be read.
        written_at: when the log was written, in seconds since 1970; None without one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset, self._last_line = 0, b""
        self._damaged: list[int] = []  # where damaged lines begin before the offset
        self.damage = Damage()
        self.loss = array("Q"), array("d")
        self.norm = array("Q"), array("d")
        self.first: int | None = None
        self.last: int | None = None
        self.written_at: float | None = None

    def read(self) -> bool:
        """Read what is new, up to a torn end; whether there was anything.

        Raises:
            OSError: if the log is there and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            had_some = self._offset > 0
            self._forget()
            return had_some
        with file:
            status = os.fstat(file.fileno())
            if self._was_cut(file.fileno(), status.st_size):
                self._forget()
            began = self._offset
            self.written_at = status.st_mtime
            file.seek(self._offset)
            place, ends = self._offset, 0
            unsure: list[int] = []  # damaged lines, or a torn end: the next good line decides
            while data := file.read(_CHUNK):
                unsure = self._take(data, place, unsure)
                ends = place + len(bare) if (bare := data.rstrip(b"\0")) else ends
                place += len(data)
            self._note(unsure, ends)
        return self._offset > began

    def _was_cut(self, file: int, size: int) -> bool:
        if not self._offset:
            return False
        return size < self._offset or os.pread(file, LINE_BYTES, self._offset - LINE_BYTES) != self._last_line

    def _take(self, data: bytes, place: int, unsure: list[int]) -> list[int]:
        """Take whole lines, those at this place of the file; returns where lines begin that cannot be read, after the last good one."""
        for start in range(0, len(data) - LINE_BYTES + 1, LINE_BYTES):
            line = data[start : start + LINE_BYTES]
            found = line_numbers(line)
            if found is None:
                unsure.append(place + start)
                continue
            self._damaged += unsure
            unsure = []
            is_step, step, loss, norm = found
            if is_step:
                self.first = step if self.first is None else self.first
                self.last = step
                if loss is not None:
                    self.loss[0].append(step)
                    self.loss[1].append(loss)
                if norm is not None:
                    self.norm[0].append(step)
                    self.norm[1].append(norm)
            self._offset = place + start + LINE_BYTES
            self._last_line = line
        return unsure

    def _note(self, unsure: list[int], ends: int) -> None:
        """Note the damage: lines that cannot be read, up to the zeros of a torn end."""
        found = [*self._damaged, *(at for at in unsure if at < ends)]
        self.damage = Damage(len(found), found[0], not self._offset) if found else Damage()
