"""Scores: one finite number each, an explicit direction, and an exact comparison."""

import math
from fractions import Fraction
from typing import Literal, TypeAlias

from trainfold.core.checks import count, real_given
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

Direction: TypeAlias = Literal["min", "max"]


def finite_given(value: object) -> float | None:
    """A number as a float; None if it is not finite, or too large for a float.

    Raises:
        TypeError: if it is not one number.

    Examples:
        >>> finite_given(3), finite_given(10**400), finite_given(float("nan"))
        (3.0, None, None)
    """
    try:
        number = real_given(value)
    except OverflowError:
        return None
    if number is None:
        raise TypeError(shown(value))
    return number if math.isfinite(number) else None


def beats(score: float, best: float, *, direction: Direction, min_delta: float = 0.0) -> bool:
    """Whether one finite score is better than another by more than ``min_delta``, compared exactly.

    Examples:
        >>> beats(0.2, 0.3, direction="min", min_delta=0.1), 0.2 < 0.3 - 0.1  # 0.3 is a little less than 3/10
        (False, False)
        >>> beats(1.0, 1.0 + 2**-52, direction="min", min_delta=2**-53), beats(0.0, 0.1, direction="max")
        (True, False)
    """
    gain = Fraction(best) - Fraction(score) if direction == "min" else Fraction(score) - Fraction(best)
    return gain > Fraction(min_delta)


def checked_direction(direction: object) -> Direction:
    """Check a direction.

    Raises:
        InvalidArgument: for anything else.
    """
    if direction == "min" or direction == "max":  # noqa: PLR1714 - the form that narrows the type
        return direction
    raise InvalidArgument("direction", expected="'min' or 'max'", found=shown(direction),
                          fix="pass 'min' if less is better, as for a loss, or 'max' if more is")  # fmt: skip


def checked_step(step: object) -> int:
    """Check an optimizer step.

    Raises:
        InvalidArgument: for anything else than an int >= 0.
    """
    return count("step", step, least=0, fix="pass state.trainer.step")
