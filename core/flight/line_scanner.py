"""`LineScanner`: reads the lines of a flight log piece by piece, and distinguishes damaged lines from a torn end; `decode_lines` reads it at once."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

import attrs

from trainfold.core.flight.damage import Damage
from trainfold.core.flight.log_lines import LINE_BYTES, MARK, decode_line
from trainfold.core.flight.step_record import LogLine

T = TypeVar("T")


@final
class LineScanner(Generic[T]):
    """Reads the lines of a log piece by piece, and distinguishes damaged lines from the torn end.

    Args:
        decode: reads one line; None for one that cannot be read.

    Attributes:
        offset: one past the last byte of the last line that was read.
        last: the bytes of that line.
    """

    def __init__(self, decode: Callable[[bytes], T | None]) -> None:
        self._decode = decode
        self._damaged: list[int] = []  # where damaged lines begin before the offset
        self._is_other = False
        self.offset, self.last = 0, b""
        self.go_on()

    def go_on(self) -> None:
        """Read on from the offset, as a log that has grown: what was its torn end may be lines by now."""
        self._place = self.offset
        self._unsure: list[int] = []  # damaged lines, or a torn end: the next line that can be read decides
        self._ends = 0  # a torn end may be full of zeros

    def take(self, data: bytes) -> Iterator[T]:
        """The lines of the next piece, which has whole lines unless it is the last one."""
        bare = data.rstrip(b"\0")  # a checksum may end with zeros
        self._ends = self._place + len(bare) if bare else self._ends
        if not self._place:
            self._is_other = not MARK.startswith(bare[: len(MARK)])
        for start in range(0, len(data) - LINE_BYTES + 1, LINE_BYTES):
            line = data[start : start + LINE_BYTES]
            found = self._decode(line)
            if found is None:
                self._unsure.append(self._place + start)
                continue
            if self._unsure:
                self._damaged += self._unsure
                self._unsure = []
            self.offset, self.last = self._place + start + LINE_BYTES, line
            yield found
        self._place += len(data)

    @property
    def damage(self) -> Damage:
        """What cannot be read so far."""
        found = [*self._damaged, *(at for at in self._unsure if at < self._ends)]
        if not found and not self.offset and self._is_other:
            found = [0]
        return Damage(len(found), found[0], not self.offset) if found else Damage()


@final
@attrs.frozen
class DecodedLog:
    """What is read of a log: its lines in order, and what could not be read."""

    lines: tuple[LogLine, ...]
    damage: Damage


def decode_lines(data: bytes) -> DecodedLog:
    """The lines of a log: all that can be read, up to its torn end, which a kill leaves incomplete, and a power cut full of zeros.

    Law: a log that is cut anywhere gives the first of its lines, whole ones; one of which lines are damaged gives the others.
    """
    scanner: LineScanner[LogLine] = LineScanner(decode_line)
    lines = tuple(scanner.take(data))
    return DecodedLog(lines, scanner.damage)


def other_file(data: bytes) -> Damage | None:
    """The damage of bytes none of which is a log's; None for a log, whole or damaged."""
    if decode_line(data[:LINE_BYTES]) is not None:
        return None
    damage = decode_lines(data).damage
    return damage if damage.is_all else None
