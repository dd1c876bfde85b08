"""The bytes of a flight log: lines of 64 bytes, each with its own checksum, so that a damaged line costs no other."""

import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import xxhash

from trainfold.core.flight.step_record import LogLine, StateDigest, StepRecord

LINE_BYTES: Final = 64
MARK: Final = b"TF"
_STEP, _STATE = 1, 2  # kinds of lines; one of another kind counts as a line that cannot be read
_OF_STEP: Final = struct.Struct("<2sBBQ8s8s8s8s4sQI")  # mark, kind, which are known, step, `_KNOWN`, samples, epoch
_OF_STATE: Final = struct.Struct("<2sBBQ24s16s")
_NUMBERS: Final = struct.Struct(
    "<2sBBQdd32xI"
)  # with the loss and the norm, the first two of `_KNOWN`, and the checksum
_SUM: Final = struct.Struct("<I")
_KNOWN: Final = ("loss", "norm", "batch", "streams", "host_streams")
_WHOLE: Final = 1 << len(_KNOWN)  # beside the bits of what is known: `StepRecord.is_whole`
_NAME_BYTES: Final = 24
_MOST: Final = (1 << 64) - 1


LineNumbers: TypeAlias = tuple[bool, int, float | None, float | None]
"""Whether a line is of a step, and not of the state after it; the step; its loss and its norm, None if it has none."""


def encode_line(line: LogLine) -> bytes:
    """The bytes of a line.

    Law: ``decode_line(encode_line(line)) == line``.

    Examples:
        >>> len(encode_line(StepRecord(1, 0, 32))), decode_line(encode_line(StepRecord(1, 0, 32)))
        (64, StepRecord(step=1, epoch=0, samples=32, loss=None, norm=None, batch=None, streams=None, host_streams=None, is_whole=False))
    """
    if isinstance(line, StepRecord):
        fields = [getattr(line, name) for name in _KNOWN]
        known = sum(1 << at for at, field in enumerate(fields) if field is not None) | _WHOLE * line.is_whole
        packed = _OF_STEP.pack(MARK, _STEP, known, line.step, *(field or b"" for field in fields),
                               min(line.samples, _MOST), min(line.epoch, _MOST >> 32))  # fmt: skip
    else:
        packed = _OF_STATE.pack(MARK, _STATE, 0, line.step, short_name(line.component).encode(), line.digest)
    body = packed.ljust(LINE_BYTES - _SUM.size, b"\0")
    return body + _SUM.pack(zlib.crc32(body))


def decode_line(data: bytes) -> LogLine | None:
    """The line of these bytes; None if they are torn, damaged, or of a kind that this version does not know."""
    body, checksum = data[: -_SUM.size], data[-_SUM.size :]
    if len(data) != LINE_BYTES or body[:2] != MARK or _SUM.unpack(checksum)[0] != zlib.crc32(body):
        return None
    if body[2] == _STEP:
        _, _, known, step, *fields, samples, epoch = _OF_STEP.unpack(body[: _OF_STEP.size])
        given = {name: field for at, (name, field) in enumerate(zip(_KNOWN, fields, strict=True)) if known >> at & 1}
        return StepRecord(step, epoch, samples, **given, is_whole=bool(known & _WHOLE))
    if body[2] == _STATE:
        _, _, _, step, name, digest = _OF_STATE.unpack(body[: _OF_STATE.size])
        return StateDigest(step, name.rstrip(b"\0").decode(errors="replace"), digest)
    return None


def line_numbers(data: bytes) -> LineNumbers | None:
    """The numbers of a line, several times as fast as `decode_line`, for logs of millions; None where that gives None.

    Examples:
        >>> line_numbers(encode_line(StepRecord(7, loss=struct.pack("<d", 0.5))))
        (True, 7, 0.5, None)
    """
    if len(data) != LINE_BYTES:
        return None
    mark, kind, known, step, loss, norm, checksum = _NUMBERS.unpack(data)
    if mark != MARK or checksum != zlib.crc32(data[: -_SUM.size]) or kind not in (_STEP, _STATE):
        return None
    return kind == _STEP, step, loss if known & 1 else None, norm if known & 2 else None


def encode_lines(lines: Iterable[LogLine]) -> bytes:
    """The bytes of several lines."""
    return b"".join(map(encode_line, lines))


def goes_back(last: int | None, line: LogLine) -> bool:
    """Whether a line has to be looked for in its log, and cuts it: the first one of a process, and one of a step that is there.

    Args:
        last: the step of the line before; None for the first line of a process.
        line: the line. The state of a step follows it.

    Examples:
        >>> goes_back(None, StepRecord(7)), goes_back(7, StepRecord(7)), goes_back(7, StateDigest(7, "model", bytes(16)))
        (True, True, False)
    """
    return last is None or line.step < last or (line.step == last and not isinstance(line, StateDigest))


def last_line(count: int, line: Callable[[int], LogLine | None]) -> LogLine | None:
    """The last line of a log that can be read.

    Args:
        count: whole lines of the log.
        line: reads one of them by its number; None for a damaged one.
    """
    return next((found for at in reversed(range(count)) if (found := line(at)) is not None), None)


def lines_before(step: int, count: int, line: Callable[[int], LogLine | None]) -> int:
    """How many lines a log keeps when the next one is of ``step``: those of earlier steps, without a torn end.

    Lines are found by halves, as steps never fall; where that meets a damaged line, one after the other.

    Args:
        step: of the next line.
        count: whole lines of the log.
        line: reads one of them by its number; None for a damaged one.

    Examples:
        >>> log = [StepRecord(1), StepRecord(2), StepRecord(3)]
        >>> lines_before(3, 3, log.__getitem__), lines_before(9, 3, log.__getitem__)
        (2, 3)
    """
    while count and line(count - 1) is None:
        count -= 1
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        found = line(middle)
        if found is None:
            return _first_of(step, count, line)
        if found.step >= step:
            high = middle
        else:
            low = middle + 1
    return low


def _first_of(step: int, count: int, line: Callable[[int], LogLine | None]) -> int:
    found = ((at, line(at)) for at in range(count))
    return next((at for at, each in found if each is not None and each.step >= step), count)


def short_name(component: str) -> str:
    """The name of a component as a line holds it, in at most 24 bytes.

    Examples:
        >>> short_name("optimizer"), len(short_name("a_component_with_a_very_long_name").encode())
        ('optimizer', 24)
    """
    written = component.encode()
    if len(written) <= _NAME_BYTES:
        return component
    start = written[:15].decode(errors="ignore")
    return f"{start}~{xxhash.xxh3_64_hexdigest(written)[:8]}"
