"""`Min` and `Max`: the smallest and the largest number, as keys in the order of the numbers."""

import math
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.blocks import blocks_of
from trainfold.core.metrics.counts import add_counts, beside, no_counts

__all__ = ["Extreme", "Max", "Min"]

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Extreme:
    """The extreme of what was seen.

    Attributes:
        key: int64[]; a key is the bits of a float64, those after the sign inverted where it is set: keys as integers have the order
            of the numbers, with -0.0 before 0.0.
        seen: int64[]; how many numbers, NaN not counted.
        special: int64[3]; how many were NaN, infinity, minus infinity.
    """

    key: torch.Tensor
    seen: torch.Tensor
    special: torch.Tensor


@final
@attrs.frozen
class Min:
    """The smallest element; NaN if one was NaN; None if there was none. -0.0 is smaller than 0.0.

    Integers are rounded to float64, which keeps their order.

    Examples:
        >>> metric = Min()
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([2.5, -1.0])))
        -1.0
    """

    additive: ClassVar[bool] = False

    def zero(self) -> Extreme:
        """Nothing seen."""
        return Extreme(torch.tensor(_MOST, device="cpu"), no_counts(), no_counts(3))

    def observe(self, acc: Extreme, values: Any) -> Extreme:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real.
        """
        return _more_of(acc, real("Min.values", values), least=True)

    def merge(self, one: Extreme, other: Extreme) -> Extreme:
        """All that both have seen."""
        return _merged(_on_cpu(one), _on_cpu(other), least=True)

    def result(self, acc: Extreme) -> float | None:
        """The smallest."""
        return _number(acc)


@final
@attrs.frozen
class Max:
    """The largest element; NaN if one was NaN; None if there was none. 0.0 is larger than -0.0.

    Integers are rounded to float64, which keeps their order.

    Examples:
        >>> metric = Max()
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([2, -1])))
        2.0
    """

    additive: ClassVar[bool] = False

    def zero(self) -> Extreme:
        """Nothing seen."""
        return Extreme(torch.tensor(_LEAST, device="cpu"), no_counts(), no_counts(3))

    def observe(self, acc: Extreme, values: Any) -> Extreme:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real.
        """
        return _more_of(acc, real("Max.values", values), least=False)

    def merge(self, one: Extreme, other: Extreme) -> Extreme:
        """All that both have seen."""
        return _merged(_on_cpu(one), _on_cpu(other), least=False)

    def result(self, acc: Extreme) -> float | None:
        """The largest."""
        return _number(acc)


def _more_of(acc: Extreme, values: torch.Tensor, *, least: bool) -> Extreme:
    if values.numel():
        for block in blocks_of(values):
            acc = _merged(acc, _extreme_of(block, least=least), least=least)
    return acc


def _extreme_of(values: torch.Tensor, *, least: bool) -> Extreme:
    numbers = values.double()
    is_nan = numbers.isnan()
    bits = numbers.view(torch.int64)
    keys = torch.where(is_nan, _MOST if least else _LEAST, _flipped(bits))
    special = torch.stack([is_nan.sum(), (numbers == math.inf).sum(), (numbers == -math.inf).sum()])
    return Extreme(keys.amin() if least else keys.amax(), (~is_nan).sum(), special)


def _merged(one: Extreme, other: Extreme, *, least: bool) -> Extreme:
    keys = beside(one.key, other.key)
    return Extreme(
        torch.minimum(*keys) if least else torch.maximum(*keys),
        add_counts(one.seen, other.seen),
        add_counts(one.special, other.special),
    )


def _on_cpu(acc: Extreme) -> Extreme:
    there: Extreme = tree.map_tensors(torch.Tensor.cpu, acc)
    return there


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Bits to key and key to bits: it is its own inverse."""
    return bits ^ ((bits >> 63) & _MOST)


def _number(acc: Extreme) -> float | None:
    if int(acc.special[0]):
        return math.nan
    return _flipped(acc.key.cpu()).view(torch.float64).item() if int(acc.seen) else None
