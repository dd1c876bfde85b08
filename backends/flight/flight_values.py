"""`FlightValues`: the losses and norms of a flight log that may still grow, each read once."""

import os
import struct
import zlib
from array import array
from pathlib import Path
from typing import Final, final

from trainfold.core.flight.log_lines import LINE_BYTES

_CHUNK: Final = LINE_BYTES * 2**14
_LINE: Final = struct.Struct("<2sBBQdd32xI")  # mark, kind, which are known, step, loss, norm, the rest, checksum
_STEP, _STATE = 1, 2  # kinds of lines


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
        written_at: when the log was written, in seconds since 1970; None without one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset, self._last_line = 0, b""
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
            while (data := file.read(_CHUNK)) and self._take(data):
                pass
        return self._offset > began

    def _was_cut(self, file: int, size: int) -> bool:
        if not self._offset:
            return False
        return size < self._offset or os.pread(file, LINE_BYTES, self._offset - LINE_BYTES) != self._last_line

    def _take(self, data: bytes) -> bool:
        """Take whole lines; whether all of the bytes were."""
        for start in range(0, len(data) - LINE_BYTES + 1, LINE_BYTES):
            mark, kind, known, step, loss, norm, checksum = _LINE.unpack_from(data, start)
            line = data[start : start + LINE_BYTES]
            if mark != b"TF" or zlib.crc32(line[:-4]) != checksum or kind not in (_STEP, _STATE):
                return False
            if kind == _STEP:
                self.first = step if self.first is None else self.first
                self.last = step
                if known & 1:
                    self.loss[0].append(step)
                    self.loss[1].append(loss)
                if known & 2:
                    self.norm[0].append(step)
                    self.norm[1].append(norm)
            self._offset += LINE_BYTES
            self._last_line = line
        return len(data) % LINE_BYTES == 0
