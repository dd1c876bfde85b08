"""`Min` and `Max`: the smallest and the largest number, as integer keys in the order of the numbers."""

import math
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.counts import add_counts, beside, blocks_of, no_counts

__all__ = ["Extreme", "Max", "Min"]

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Extreme:
    """The accumulator of `Min` and `Max`.

    Attributes:
        key: int64[]; the extreme so far, as the bits of a float64 with all but the sign bit inverted where the sign is set:
            these integers order as the numbers do, with -0.0 before 0.0.
        seen: int64[]; how many numbers, NaN not counted.
        special: int64[3]; how many were NaN, infinity, minus infinity.
    """

    key: torch.Tensor
    seen: torch.Tensor
    special: torch.Tensor


@attrs.frozen
class _OneExtreme:
    additive: ClassVar[bool] = False
    _is_least: ClassVar[bool]

    def zero(self) -> Extreme:
        """The empty accumulator."""
        return Extreme(torch.tensor(_MOST if self._is_least else _LEAST, device="cpu"), no_counts(), no_counts(3))

    def observe(self, acc: Extreme, values: Any) -> Extreme:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for values that are not real numbers.
        """
        given = real(f"{type(self).__name__}.values", values)
        for block in blocks_of(given) if given.numel() else ():
            acc = self._merged(acc, self._extreme_of(block))
        return acc

    def merge(self, one: Extreme, other: Extreme) -> Extreme:
        """The accumulator of both."""
        return self._merged(_on_cpu(one), _on_cpu(other))

    def result(self, acc: Extreme) -> float | None:
        """The extreme; None if there was no number, NaN if one was NaN."""
        if int(acc.special[0]):
            return math.nan
        return _flipped(acc.key.cpu()).view(torch.float64).item() if int(acc.seen) else None

    def _extreme_of(self, values: torch.Tensor) -> Extreme:
        numbers = values.double()
        is_nan = numbers.isnan()
        bits = numbers.view(torch.int64)
        keys = torch.where(is_nan, _MOST if self._is_least else _LEAST, _flipped(bits))
        special = torch.stack([is_nan.sum(), (numbers == math.inf).sum(), (numbers == -math.inf).sum()])
        return Extreme(keys.amin() if self._is_least else keys.amax(), (~is_nan).sum(), special)

    def _merged(self, one: Extreme, other: Extreme) -> Extreme:
        keys = beside(one.key, other.key)
        return Extreme(
            torch.minimum(*keys) if self._is_least else torch.maximum(*keys),
            add_counts(one.seen, other.seen),
            add_counts(one.special, other.special),
        )


@final
@attrs.frozen
class Min(_OneExtreme):
    """The smallest element; NaN if one was NaN; None if there was none. -0.0 is smaller than 0.0.

    Integers are rounded to float64, which keeps their order.

    Examples:
        >>> metric = Min()
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([2.5, -1.0])))
        -1.0
    """

    _is_least: ClassVar[bool] = True


@final
@attrs.frozen
class Max(_OneExtreme):
    """The largest element; NaN if one was NaN; None if there was none. 0.0 is larger than -0.0.

    Integers are rounded to float64, which keeps their order.

    Examples:
        >>> metric = Max()
        >>> metric.result(metric.observe(metric.zero(), torch.tensor([2, -1])))
        2.0
    """

    _is_least: ClassVar[bool] = False


def _on_cpu(acc: Extreme) -> Extreme:
    there: Extreme = tree.map_tensors(torch.Tensor.cpu, acc)
    return there


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Bits to key and key to bits: it is its own inverse."""
    return bits ^ ((bits >> 63) & _MOST)
