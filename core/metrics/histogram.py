"""`Histogram` and `Quantiles`: values counted in bins with fixed edges."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import rounded
from trainfold.core.metrics.arguments import is_number, real
from trainfold.core.metrics.counts import add_counts, blocks_of, check_counts, merge_counts, no_counts

__all__ = ["Bins", "Histogram", "Quantiles"]

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def _numbers(values: Sequence[float] | float) -> tuple[Any, ...]:
    """A tuple of numbers, from a tensor or an array too; the metric checks them afterwards."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    listed = plain if isinstance(plain, Sequence) and not isinstance(plain, str) else (plain,)
    return tuple(_exact(value) if is_number(value) else value for value in listed)


def _exact(value: Any) -> Any:
    """The number as a float, unless it is an integer that no float64 equals."""
    nearest = rounded(Fraction(value))
    return nearest if nearest == value else value


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Bins:
    """The accumulator of `Histogram` and `Quantiles`.

    Attributes:
        counts: int64[n + 2] for n bins: values below the first edge, in each bin, above the last edge; infinities included.
        special: int64[3]; how many were NaN, infinity, minus infinity.
    """

    counts: torch.Tensor
    special: torch.Tensor


@attrs.frozen
class _OfBins:
    additive: ClassVar[bool] = True
    edges: tuple[float, ...] = attrs.field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        is_fine = len(self.edges) > 1 and all(map(is_number, self.edges))
        if not is_fine or any(low >= high for low, high in itertools.pairwise(self.edges)):
            raise InvalidArgument(
                f"{type(self).__name__}.edges",
                expected="two or more finite numbers, ascending",
                found=self.edges,
                fix="sort them, without duplicates",
            )

    def zero(self) -> Bins:
        """The empty accumulator."""
        return Bins(no_counts(len(self.edges) + 1), no_counts(3))

    def observe(self, acc: Bins, values: Any) -> Bins:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for values that are not real numbers, and an accumulator for another number of bins.
        """
        given = real(f"{type(self).__name__}.values", values)
        self._check(acc)
        is_float = given.is_floating_point()
        bounds = _bounds(self.edges, is_float=is_float).to(given.device, non_blocking=True)
        for block in blocks_of(given):
            counts, special = (_bins_of_floats if is_float else _bins_of_ints)(block, bounds, self.edges)
            acc = Bins(add_counts(acc.counts, counts), add_counts(acc.special, special))
        return acc

    def merge(self, one: Bins, other: Bins) -> Bins:
        """The accumulator of both.

        Raises:
            InvalidArgument: for another number of bins.
        """
        self._check(one)
        self._check(other)
        merged: Bins = tree.map(merge_counts, one, other)
        return merged

    def _check(self, acc: Bins) -> None:
        check_counts(f"{type(self).__name__} of {len(self.edges) - 1} bins", acc.counts, (len(self.edges) + 1,))


@final
@attrs.frozen
class Histogram(_OfBins):
    """How many values lie in each bin: a dict with ``below``, ``counts`` (a list), ``above`` and ``nan``.

    Attributes:
        edges: ascending, at least two; bin i is ``[edges[i], edges[i + 1])``, and the last bin includes its upper edge, as in
            `numpy.histogram`. They are compared exactly, with integers as well; an edge may be an integer that no float64 equals.

    Raises:
        InvalidArgument: for edges that are not finite and ascending.

    Examples:
        >>> metric = Histogram((0.0, 0.5, 1.0))
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([0.1, 0.5, 1.0, 1.5])))
        {'below': 0, 'counts': [1, 2], 'above': 1, 'nan': 0}
    """

    def result(self, acc: Bins) -> dict[str, int | list[int]] | None:
        """The counts; None if nothing was seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        self._check(acc)
        below, *counts, above = acc.counts.tolist()
        nan = int(acc.special[0])
        found: dict[str, int | list[int]] = {"below": below, "counts": counts, "above": above, "nan": nan}
        return found if below or above or nan or any(counts) else None


@final
@attrs.frozen
class Quantiles(_OfBins):
    """Quantiles of the values that a `Histogram` counts: a list with a number, or None, for each q.

    The quantile q of N values is where their cumulative count reaches ``q * N``; within a bin it is interpolated linearly,
    as an exact fraction that is rounded once. A q such as 0.9 means the decimal number as written. The error is at most the
    width of the bin.

    A quantile below the first edge or above the last one is None, because its distance from the edge is not known. With a NaN
    among the values every quantile is NaN.

    Attributes:
        edges: as those of `Histogram`.
        q: one number or several, each in 0..1.

    Raises:
        InvalidArgument: for edges that are not finite and ascending, and a q outside of 0..1.

    Examples:
        >>> metric = Quantiles((0, 10, 20), q=(0.5, 0.9, 1.0))
        >>> metric.result(metric.observe(metric.zero(), torch.arange(20)))
        [10.0, 18.0, 20.0]
    """

    q: tuple[float, ...] = attrs.field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        _OfBins.__attrs_post_init__(self)
        if not self.q or not all(is_number(q) and 0 <= q <= 1 for q in self.q):
            raise InvalidArgument(
                "Quantiles.q",
                expected="numbers in 0..1",
                found=self.q,
                fix="pass one or several, such as 0.5, the median",
            )

    def result(self, acc: Bins) -> list[float | None] | None:
        """The quantiles; None if nothing was seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        self._check(acc)
        counts = acc.counts.tolist()
        if int(acc.special[0]):
            return [math.nan] * len(self.q)
        return [_quantile(counts, self.edges, q) for q in self.q] if any(counts) else None


def _bounds(edges: tuple[float, ...], *, is_float: bool) -> torch.Tensor:
    """For each edge the smallest value of the dtype that is not below it: a value is below both or neither."""
    if is_float:
        return torch.tensor([_ceil_to_float(edge) for edge in edges], dtype=torch.float64, device="cpu")
    whole = [math.ceil(edge) for edge in edges]  # no int64 reaches the edges that are left out
    return torch.tensor([max(edge, _LEAST) for edge in whole if edge <= _MOST], dtype=torch.int64, device="cpu")


def _ceil_to_float(edge: float) -> float:
    if isinstance(edge, float):
        return edge
    nearest = rounded(Fraction(edge))
    return nearest if nearest >= edge else math.nextafter(nearest, math.inf)


def _bins_of_floats(
    block: torch.Tensor, bounds: torch.Tensor, edges: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    values = block.double()
    is_nan = values.isnan()
    special = torch.stack([is_nan.sum(), (values == math.inf).sum(), (values == -math.inf).sum()])
    place = torch.bucketize(values, bounds, right=True)
    if isinstance(edges[-1], float):
        place -= (values == edges[-1]).long()
    return _counted(place, (~is_nan).long(), edges), special


def _bins_of_ints(
    block: torch.Tensor, bounds: torch.Tensor, edges: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counted as integers, because in float64 a value could be rounded up to an edge."""
    values, top = block.to(torch.int64), math.floor(edges[-1])
    place = torch.bucketize(values, bounds, right=True)
    if top == edges[-1] and _LEAST <= top <= _MOST:
        place -= (values == top).long()
    return _counted(place, torch.ones_like(values), edges), no_counts(3)


def _counted(place: torch.Tensor, weight: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    counts = torch.zeros(len(edges) + 1, dtype=torch.int64, device=place.device)
    return counts.index_add_(0, place.clamp(0, len(edges)), weight)


def _quantile(counts: list[int], edges: tuple[float, ...], q: float) -> float | None:
    wanted, before = Fraction(repr(q)) * sum(counts), 0
    for index, count in enumerate(counts):
        if count and before + count >= wanted:
            if index in {0, len(edges)}:
                return None
            low, high = Fraction(edges[index - 1]), Fraction(edges[index])
            return rounded(low + (high - low) * (wanted - before) / count)
        before += count
    return None  # pragma: no cover - the last count reaches all of them
