"""Numbers, sizes, durations and moments as short texts, the same wherever a page shows them."""

import math
from typing import Final

_MONTHS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DAY_SECS: Final = 86_400


def moment_text(secs: float, *, with_secs: bool = False) -> str:
    """A moment, in UTC.

    Args:
        secs: since 1970, 0 or later.
        with_secs: whether the seconds are shown.

    Examples:
        >>> moment_text(0), moment_text(1_709_251_199.9, with_secs=True), moment_text(1_709_251_200)
        ('1970-01-01 00:00', '2024-02-29 23:59:59', '2024-03-01 00:00')
    """
    days, left = divmod(int(secs), _DAY_SECS)
    year = 1970
    while days >= (length := 365 + _is_leap(year)):
        if days >= 146_097:  # the calendar repeats each 400 years
            year, days = year + 400, days - 146_097
        else:
            year, days = year + 1, days - length
    month = 0
    while days >= (length := _MONTHS[month] + (month == 1 and _is_leap(year))):
        month, days = month + 1, days - length
    clock = f"{left // 3600:02}:{left // 60 % 60:02}" + (f":{left % 60:02}" if with_secs else "")
    return f"{year:04}-{month + 1:02}-{days + 1:02} {clock}"


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def steps_text(first: int, last: int) -> str:
    """Some steps, in words.

    Examples:
        >>> steps_text(16, 20), steps_text(4, 4)
        ('steps 16 to 20', 'step 4')
    """
    return f"step {first}" if first == last else f"steps {first} to {last}"


def steps_are(first: int, last: int) -> str:
    """Some steps, in words that begin a sentence about them.

    Examples:
        >>> steps_are(16, 20), steps_are(4, 4)
        ('steps 16 to 20 are', 'step 4 is')
    """
    return f"{steps_text(first, last)} {'is' if first == last else 'are'}"


def secs_text(secs: float) -> str:
    """A duration in the unit that suits it.

    Examples:
        >>> [secs_text(each) for each in (0, 0.00042, 0.5, 12.34, 200, 9000, 300_000)]
        ['0 s', '0.42 ms', '500 ms', '12.3 s', '3 min 20 s', '2 h 30 min', '3 d 11 h']
    """
    if secs < 0:
        return f"-{secs_text(-secs)}"
    if secs < 1:
        return "0 s" if secs == 0 else f"{secs * 1000:.3g} ms"
    if secs < 60:
        return f"{secs:.3g} s"
    whole = round(secs)
    for unit, size, below, part in (("d", _DAY_SECS, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def number_text(number: float) -> str:
    """A measured number in four digits, or a count in full.

    Examples:
        >>> number_text(1234567), number_text(0.123456), number_text(float("nan"))
        ('1,234,567', '0.1235', 'nan')
    """
    if isinstance(number, int) or (math.isfinite(number) and number == int(number) and abs(number) < 1e15):
        return f"{int(number):,}"
    return f"{number:.4g}"


def count_text(count: int, noun: str) -> str:
    """A count and its noun.

    Examples:
        >>> count_text(1, "step"), count_text(2000, "step")
        ('1 step', '2,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers between two numbers, at most so many and at least one.

    Examples:
        >>> ticks(0, 97), ticks(0.31, 0.34), ticks(5, 5)
        ([0.0, 20.0, 40.0, 60.0, 80.0], [0.31, 0.32, 0.33, 0.34], [5.0])
    """
    if not high > low:
        return [float(low)]
    size = 10.0 ** math.floor(math.log10((high - low) / most)) if (high - low) / most > 0 else high - low
    for factor in (1, 2, 5, 10, 20):
        step = size * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [round(at * step, digits) for at in range(first, last + 1)] or [float(low)]
