"""Durations as users type them: `12h`, `0.2s`, `1h30m`. Always with a unit, because a bare number could be seconds or minutes."""

import re
from typing import Final

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|d)\s*", re.ASCII)


def seconds_of(text: str) -> float:
    """The seconds of a duration.

    Raises:
        ValueError: for a text that is not a duration with a unit.

    Examples:
        >>> seconds_of("12h"), seconds_of("0.25s"), seconds_of("1h30m"), seconds_of("500ms")
        (43200.0, 0.25, 5400.0, 0.5)
    """
    seconds, place = 0.0, 0
    while (part := _PART.match(text, place)) is not None:
        seconds, place = seconds + float(part[1]) * _UNITS[part[2]], part.end()
    if place == 0 or place < len(text):
        raise ValueError(f'"{text}" is not a duration with a unit, such as 12h, 90s, 500ms or 1h30m')
    return seconds


def duration_text(seconds: float) -> str:
    """A duration as text, with about three digits.

    Examples:
        >>> duration_text(0.25), duration_text(131.7), duration_text(5400), duration_text(1e6)
        ('0.25 s', '132 s', '1.5 h', '11.6 d')
    """
    for unit, size in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
