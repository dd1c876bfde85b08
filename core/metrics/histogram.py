"""`Histogram` and `Quantiles`: values counted in bins that are fixed beforehand."""

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
from trainfold.core.metrics.blocks import blocks_of
from trainfold.core.metrics.counts import add_counts, check_counts, merge_counts, no_counts

__all__ = ["Bins", "Histogram", "Quantiles"]

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def _numbers(values: Sequence[float] | float) -> tuple[Any, ...]:
    """A tuple of what are numbers, of tensors and arrays too; the checks come after it."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    listed = plain if isinstance(plain, Sequence) and not isinstance(plain, str) else (plain,)
    return tuple(_exact(value) if is_number(value) else value for value in listed)


def _exact(value: Any) -> Any:
    """The same number as a float; an integer that no float64 is stays one."""
    nearest = rounded(Fraction(value))
    return nearest if nearest == value else value


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Bins:
    """Values counted.

    Attributes:
        counts: int64[n + 2] for n bins; below the first edge, in each bin, above the last edge; infinities included.
        special: int64[3]; how many were NaN, infinity, minus infinity.
    """

    counts: torch.Tensor
    special: torch.Tensor


@final
@attrs.frozen
class Histogram:
    """How many values lie in each bin: a dict with ``below``, ``counts`` (a list), ``above`` and ``nan``.

    Attributes:
        edges: ascending, at least two; bin i is ``[edges[i], edges[i + 1])``, and the last one has its upper edge too, as in
            `numpy.histogram`. They are compared exactly, with integers as well; integers that no float64 is are edges too.

    Raises:
        InvalidArgument: for edges that are not finite and ascending.

    Examples:
        >>> metric = Histogram((0.0, 0.5, 1.0))
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([0.1, 0.5, 1.0, 1.5])))
        {'below': 0, 'counts': [1, 2], 'above': 1, 'nan': 0}
    """

    additive: ClassVar[bool] = True
    edges: tuple[float, ...] = attrs.field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        _check_edges("Histogram.edges", self.edges)

    def zero(self) -> Bins:
        """Nothing seen."""
        return _no_bins(self.edges)

    def observe(self, acc: Bins, values: Any) -> Bins:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real, and what was seen with another number of bins.
        """
        return _count("Histogram", acc, real("Histogram.values", values), self.edges)

    def merge(self, one: Bins, other: Bins) -> Bins:
        """All that both have seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        return _merged("Histogram", one, other, self.edges)

    def result(self, acc: Bins) -> dict[str, int | list[int]] | None:
        """The counts; None where nothing was seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        _check_bins("Histogram", acc, self.edges)
        below, *counts, above = acc.counts.tolist()
        nan = int(acc.special[0])
        found: dict[str, int | list[int]] = {"below": below, "counts": counts, "above": above, "nan": nan}
        return found if below or above or nan or any(counts) else None


@final
@attrs.frozen
class Quantiles:
    """Quantiles of what a `Histogram` counts: a list with a number, or None, for each q.

    The quantile q of N values is where their cumulative count reaches ``q * N``; within a bin it is interpolated linearly,
    as an exact fraction that is rounded once. A q such as 0.9 is the decimal number as it is written. The error is at most
    the width of the bin.

    Where the quantile lies below the first edge or above the last one, nobody knows how far: it is None, and not the edge.
    With a NaN among the values every quantile is NaN.

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

    additive: ClassVar[bool] = True
    edges: tuple[float, ...] = attrs.field(converter=_numbers)
    q: tuple[float, ...] = attrs.field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        _check_edges("Quantiles.edges", self.edges)
        if not self.q or not all(is_number(q) and 0 <= q <= 1 for q in self.q):
            raise InvalidArgument("Quantiles.q", expected="numbers in 0..1", found=self.q, fix="0.5 is the median")

    def zero(self) -> Bins:
        """Nothing seen."""
        return _no_bins(self.edges)

    def observe(self, acc: Bins, values: Any) -> Bins:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real, and what was seen with another number of bins.
        """
        return _count("Quantiles", acc, real("Quantiles.values", values), self.edges)

    def merge(self, one: Bins, other: Bins) -> Bins:
        """All that both have seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        return _merged("Quantiles", one, other, self.edges)

    def result(self, acc: Bins) -> list[float | None] | None:
        """The quantiles; None where nothing was seen.

        Raises:
            InvalidArgument: for another number of bins.
        """
        _check_bins("Quantiles", acc, self.edges)
        counts = acc.counts.tolist()
        if int(acc.special[0]):
            return [math.nan] * len(self.q)
        return [_quantile(counts, self.edges, q) for q in self.q] if any(counts) else None


def _check_edges(where: str, edges: tuple[Any, ...]) -> None:
    is_fine = len(edges) > 1 and all(map(is_number, edges))
    if not is_fine or any(low >= high for low, high in itertools.pairwise(edges)):
        raise InvalidArgument(
            where, expected="two or more finite numbers, ascending", found=edges, fix="sort them, without duplicates"
        )


def _no_bins(edges: tuple[float, ...]) -> Bins:
    return Bins(no_counts(len(edges) + 1), no_counts(3))


def _check_bins(metric: str, acc: Bins, edges: tuple[float, ...]) -> None:
    check_counts(f"{metric} of {len(edges) - 1} bins", acc.counts, (len(edges) + 1,))


def _merged(metric: str, one: Bins, other: Bins, edges: tuple[float, ...]) -> Bins:
    for acc in (one, other):
        _check_bins(metric, acc, edges)
    merged: Bins = tree.map(merge_counts, one, other)
    return merged


def _count(metric: str, acc: Bins, values: torch.Tensor, edges: tuple[float, ...]) -> Bins:
    _check_bins(metric, acc, edges)
    bounds = _bounds(edges, is_float=values.is_floating_point()).to(values.device, non_blocking=True)
    for block in blocks_of(values):
        counted = _bins_of_floats if values.is_floating_point() else _bins_of_ints
        counts, special = counted(block, bounds, edges)
        acc = Bins(add_counts(acc.counts, counts), add_counts(acc.special, special))
    return acc


def _bounds(edges: tuple[float, ...], *, is_float: bool) -> torch.Tensor:
    """For each edge the smallest value of the dtype that is not below it: values are below both or neither."""
    if is_float:
        return torch.tensor([_ceil_to_float(edge) for edge in edges], dtype=torch.float64, device="cpu")
    whole = [math.ceil(edge) for edge in edges]  # no integer reaches the edges that are left out
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
    """Of what in float64 could be rounded up to an edge."""
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
