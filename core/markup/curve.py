"""`Curve`: the values of many steps, in so few points that a page stays small: the least and the largest of each bucket."""

import math
from collections.abc import Sequence
from typing import Final, final

import attrs

MOST_POINTS: Final = 1600


@final
@attrs.frozen
class Curve:
    """Points of a line, by their steps.

    Attributes:
        points: (step, value), in order; values are finite.
        count: how many values there were.
        per_bucket: how many steps share a least and a largest value; 1 if each value is a point.
        not_finite: the first steps whose value is a NaN or an infinity.
        not_finite_count: how many there are.
        last: the last step and its value, whatever that is; None without a value.
        not_finite_since: the step from which on no value is finite; None if the last one is.
    """

    points: tuple[tuple[int, float], ...] = ()
    count: int = 0
    per_bucket: int = 1
    not_finite: tuple[int, ...] = ()
    not_finite_count: int = 0
    last: tuple[int, float] | None = None
    not_finite_since: int | None = None


def curve_of(steps: Sequence[int], values: Sequence[float], *, most: int = MOST_POINTS) -> Curve:
    """The curve of these values.

    Laws: the points are some of the values, in their order; the first and the last, the least and the largest finite one are among them; there are at most
    ``most`` points; up to ``most`` values all of them are there.

    Args:
        steps: in order.
        values: as many.
        most: points, at least 4.

    Examples:
        >>> found = curve_of(range(1000), [abs(step - 500.0) for step in range(1000)], most=10)
        >>> len(found.points) <= 10, min(value for _, value in found.points), found.per_bucket
        (True, 0.0, 250)
        >>> curve_of([1, 2, 3], [0.5, math.nan, math.inf]).not_finite_since
        2
    """
    finite = [at for at, value in enumerate(values) if math.isfinite(value)]
    bad = len(values) - len(finite)
    first_bad: list[int] = []
    if bad:
        for at, value in enumerate(values):
            if not math.isfinite(value):
                first_bad.append(steps[at])
                if len(first_bad) == 100:
                    break
    size = 1
    chosen = finite
    if len(finite) > most:
        size = -(-len(finite) // max(1, (most - 2) // 2))
        chosen = [finite[0]]
        for start in range(0, len(finite), size):
            bucket = finite[start : start + size]
            ends = {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
            chosen += sorted(ends - {chosen[-1]})
        chosen += [finite[-1]] * (chosen[-1] != finite[-1])
    points = tuple((steps[at], values[at]) for at in chosen)
    last = (steps[len(values) - 1], values[len(values) - 1]) if len(values) else None
    after = finite[-1] + 1 if finite else 0
    since = steps[after] if after < len(values) else None
    return Curve(points, len(values), size, tuple(first_bad), bad, last, since)
