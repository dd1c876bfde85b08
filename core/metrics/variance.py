"""`Variance`: from the exact sums of the numbers and of their squares, so that nothing cancels and nothing overflows."""

import math
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import ExactSum, exact_add, exact_merge, exact_value, exact_zero, rounded
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.blocks import blocks_of
from trainfold.core.metrics.total import Total, merge_totals, more_of, nothing

__all__ = ["Moments", "Variance"]

_Squares: TypeAlias = tuple[ExactSum, ExactSum, ExactSum]

_SHIFTS = (600, 0, -600)  # small, middling and large numbers are multiplied by 2 to this power before they are squared
# Of the middling ones: their squares, and the parts of these, are multiples of 2**-1074 and below 2**1024.
_EDGE = 2.0**400
_SPLIT = 2.0**27 + 1
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_INTS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)
_PART_BITS = 26


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Moments:
    """Numbers, added up, counted, and their squares added up.

    Attributes:
        total: sum and count.
        squares: sums of squares: of numbers below 2**-400, times 2**1200; of those between; of those above 2**400, times 2**-1200.
    """

    total: Total
    squares: _Squares


@final
@attrs.frozen
class Variance:
    """The variance of all elements, exact, rounded once: ``(n * sum(x**2) - sum(x)**2) / (n * (n - ddof))``.

    With exact sums the textbook formula is right: what cancels was never rounded. None where ``n <= ddof``; NaN if an element
    was not finite.

    Attributes:
        ddof: 0 for the variance of what was seen, 1 for the unbiased estimate of that of where it comes from.

    Raises:
        InvalidArgument: if ``ddof`` is not an int >= 0.

    Examples:
        >>> metric = Variance(ddof=1)
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([1e8 + 8, 1e8 + 16, 1e8 + 24])))
        64.0

    Source: the squares of float64 are taken apart after T. J. Dekker, "A floating-point technique for extending the
    available precision" (1971).
    """

    additive: ClassVar[bool] = True
    ddof: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if type(self.ddof) is not int or self.ddof < 0:
            raise InvalidArgument("Variance.ddof", expected="an int >= 0", found=self.ddof, fix="0 and 1 are usual")

    def zero(self) -> Moments:
        """Nothing seen."""
        return Moments(nothing(), (exact_zero(), exact_zero(), exact_zero()))

    def observe(self, acc: Moments, values: Any) -> Moments:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real.
        """
        total, squares = acc.total, acc.squares
        for block in blocks_of(real("Variance.values", values)):
            total, squares = more_of(total, block), _with_squares(squares, block)
        return Moments(total, squares)

    def merge(self, one: Moments, other: Moments) -> Moments:
        """All that both have seen."""
        small, middling, large = (exact_merge(*pair) for pair in zip(one.squares, other.squares, strict=True))
        return Moments(merge_totals(one.total, other.total), (small, middling, large))

    def result(self, acc: Moments) -> float | None:
        """The variance."""
        count, total = int(acc.total.count), exact_value(acc.total.sum)
        if count <= self.ddof:
            return None
        if not isinstance(total, Fraction):
            return math.nan
        squares = sum(
            (
                Fraction(exact_value(part)) / Fraction(2) ** (2 * shift)
                for part, shift in zip(acc.squares, _SHIFTS, strict=True)
            ),
            Fraction(0),
        )
        return rounded((count * squares - total * total) / (count * (count - self.ddof)))


def _with_squares(squares: _Squares, values: torch.Tensor) -> _Squares:
    small, middling, large = squares
    if values.dtype in _SMALL_INTS or values.dtype in _NARROW:
        return small, exact_add(middling, _finite(values.double()).square()), large
    if not values.is_floating_point():
        return small, exact_add(middling, _squares_of_ints(values.to(torch.int64))), large
    values = _finite(values.double())
    size = values.abs()
    is_small, is_large = size < 1 / _EDGE, size > _EDGE
    if values.device.type != "cpu" or bool((is_small & (values != 0)).any()):
        small = exact_add(small, _squares_of_doubles(torch.where(is_small, values, 0) * 2.0**600))
    if values.device.type != "cpu" or bool(is_large.any()):
        large = exact_add(large, _squares_of_doubles(torch.where(is_large, values, 0) * 2.0**-600))
    return small, exact_add(middling, _squares_of_doubles(torch.where(is_small | is_large, 0, values))), large


def _finite(values: torch.Tensor) -> torch.Tensor:
    """What is not finite is counted with the sum; here it is 0."""
    return torch.where(values.isfinite(), values, 0)


def _squares_of_doubles(values: torch.Tensor) -> torch.Tensor:
    """Terms that add up to the squares: with halves of 26 bits each, no product is rounded."""
    scaled = values * _SPLIT
    upper = scaled - (scaled - values)
    lower = values - upper
    return torch.cat([upper * upper, 2 * upper * lower, lower * lower])


def _squares_of_ints(values: torch.Tensor) -> torch.Tensor:
    """Terms that add up to the squares: with parts of 26, 26 and 12 bits, no product is rounded in float64."""
    mask = (1 << _PART_BITS) - 1
    low, middle = (values & mask).double(), ((values >> _PART_BITS) & mask).double()
    high = (values >> 2 * _PART_BITS).double()
    unit = 2.0**_PART_BITS
    products = (
        high * high * unit**4,
        2 * high * middle * unit**3,
        2 * high * low * unit**2,
        middle * middle * unit**2,
        2 * middle * low * unit,
        low * low,
    )
    return torch.cat(products)
