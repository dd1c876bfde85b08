"""`Sum`, `Mean` and `Variance` of all elements, from exact sums of the numbers and of their squares."""

import math
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.exact.sum import ExactSum, exact_add, exact_merge, exact_value, exact_zero, ratio_of, rounded
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.counts import blocks_of, merge_counts, no_counts

__all__ = ["Mean", "Moments", "Sum", "Total", "Variance"]

_Squares: TypeAlias = tuple[ExactSum, ExactSum, ExactSum]

_SHIFTS = (600, 0, -600)  # small, middling and large numbers are multiplied by 2 to this power before they are squared
# The squares of the middling ones, and the parts of these squares, are multiples of 2**-1074 and below 2**1024.
_EDGE = 2.0**400
_SPLIT = 2.0**27 + 1
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_INTS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)
_PART_BITS = 26


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Total:
    """The accumulator of `Sum` and `Mean`.

    Attributes:
        sum: the sum of the numbers.
        count: int64[]; how many there were.
    """

    sum: ExactSum
    count: torch.Tensor


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Moments:
    """The accumulator of `Variance`.

    Attributes:
        total: sum and count.
        squares: three sums of squares: of numbers below 2**-400, times 2**1200; of those between; of those above 2**400,
            times 2**-1200.
    """

    total: Total
    squares: _Squares


@attrs.frozen
class _OfTotal:
    additive: ClassVar[bool] = True

    def zero(self) -> Total:
        """The empty accumulator."""
        return _nothing()

    def observe(self, acc: Total, values: Any) -> Total:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for values that are not real numbers.
        """
        return _more_of(acc, real(f"{type(self).__name__}.values", values))

    def merge(self, one: Total, other: Total) -> Total:
        """The accumulator of both."""
        return _merged(one, other)


@final
@attrs.frozen
class Sum(_OfTotal):
    """The sum of all elements, exact, rounded once; None if there was no element.

    NaN if an element was NaN, or if there were infinities of both signs.

    Examples:
        >>> metric = Sum()
        >>> acc = metric.observe(metric.zero(), torch.tensor([1e30, 1.0]))
        >>> metric.result(metric.observe(acc, torch.tensor([-1e30])))
        1.0

    Source: `trainfold.core.exact.sum`.
    """

    def result(self, acc: Total) -> float | None:
        """The sum."""
        return rounded(exact_value(acc.sum)) if int(acc.count) else None


@final
@attrs.frozen
class Mean(_OfTotal):
    """The mean of all elements: their exact sum over their number, rounded once; None if there was no element.

    Every element has the same weight, whatever batch it was in. For a weighted mean, or one over tokens, use `Ratio`.

    Examples:
        >>> metric = Mean()
        >>> acc = metric.observe(metric.zero(), torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.result(metric.observe(acc, torch.tensor([10.0])))
        4.0
    """

    def result(self, acc: Total) -> float | None:
        """The mean."""
        mean = ratio_of(exact_value(acc.sum), exact_value(exact_add(exact_zero(), int(acc.count))))
        return None if mean is None else rounded(mean)


@final
@attrs.frozen
class Variance:
    """The variance of all elements, exact, rounded once: ``(n * sum(x**2) - sum(x)**2) / (n * (n - ddof))``.

    With exact sums the textbook formula is safe: the terms that cancel were never rounded. None if ``n <= ddof``; NaN if an
    element was not finite.

    Attributes:
        ddof: 0 for the variance of the elements themselves, 1 for the unbiased estimate of the population's variance.

    Raises:
        InvalidArgument: if ``ddof`` is not an int >= 0.

    Examples:
        >>> metric = Variance(ddof=1)
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([1e8 + 8, 1e8 + 16, 1e8 + 24])))
        64.0

    Source: squares of float64 are split as in T. J. Dekker, "A floating-point technique for extending the
    available precision" (1971).
    """

    additive: ClassVar[bool] = True
    ddof: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        count("Variance.ddof", self.ddof, least=0, fix="pass 0 or 1, which are usual")

    def zero(self) -> Moments:
        """The empty accumulator."""
        return Moments(_nothing(), (exact_zero(), exact_zero(), exact_zero()))

    def observe(self, acc: Moments, values: Any) -> Moments:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for values that are not real numbers.
        """
        total, squares = acc.total, acc.squares
        for block in blocks_of(real("Variance.values", values)):
            total, squares = _more_of(total, block), _with_squares(squares, block)
        return Moments(total, squares)

    def merge(self, one: Moments, other: Moments) -> Moments:
        """The accumulator of both."""
        small, middling, large = (exact_merge(*pair) for pair in zip(one.squares, other.squares, strict=True))
        return Moments(_merged(one.total, other.total), (small, middling, large))

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


def _nothing() -> Total:
    return Total(exact_zero(), no_counts())


def _more_of(acc: Total, values: torch.Tensor) -> Total:
    return Total(exact_add(acc.sum, values), acc.count + values.numel())


def _merged(one: Total, other: Total) -> Total:
    return Total(exact_merge(one.sum, other.sum), merge_counts(one.count, other.count))


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
    """With 0 for NaN and infinities: the sum counts these."""
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
