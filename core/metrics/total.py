"""`Sum` and `Mean` of all elements, exact."""

from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.exact.sum import ExactSum, exact_add, exact_merge, exact_value, exact_zero, ratio_of, rounded
from trainfold.core.metrics.arguments import real
from trainfold.core.metrics.counts import merge_counts, no_counts

__all__ = ["Mean", "Sum", "Total", "merge_totals", "more_of", "nothing"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Total:
    """Numbers, added up and counted.

    Attributes:
        sum: their sum.
        count: int64[]; how many.
    """

    sum: ExactSum
    count: torch.Tensor


def nothing() -> Total:
    """No number."""
    return Total(exact_zero(), no_counts())


def more_of(acc: Total, values: torch.Tensor) -> Total:
    """Numbers and more of them."""
    return Total(exact_add(acc.sum, values), acc.count + values.numel())


def merge_totals(one: Total, other: Total) -> Total:
    """The numbers of both."""
    return Total(exact_merge(one.sum, other.sum), merge_counts(one.count, other.count))


@final
@attrs.frozen
class Sum:
    """The sum of all elements, exact, rounded once; None where there was no element.

    NaN if an element was NaN, or if both infinities were there.

    Examples:
        >>> metric = Sum()
        >>> acc = metric.observe(metric.zero(), torch.tensor([1e30, 1.0]))
        >>> metric.result(metric.observe(acc, torch.tensor([-1e30])))
        1.0

    Source: `trainfold.core.exact.sum`.
    """

    additive: ClassVar[bool] = True

    def zero(self) -> Total:
        """Nothing seen."""
        return nothing()

    def observe(self, acc: Total, values: Any) -> Total:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real.
        """
        return more_of(acc, real("Sum.values", values))

    def merge(self, one: Total, other: Total) -> Total:
        """All that both have seen."""
        return merge_totals(one, other)

    def result(self, acc: Total) -> float | None:
        """The sum."""
        return rounded(exact_value(acc.sum)) if int(acc.count) else None


@final
@attrs.frozen
class Mean:
    """The mean of all elements: their exact sum over their number, rounded once; None where there was no element.

    Every element counts the same, whatever batch it was in. For a mean with weights, or over tokens, take `Ratio`.

    Examples:
        >>> metric = Mean()
        >>> acc = metric.observe(metric.zero(), torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.result(metric.observe(acc, torch.tensor([10.0])))
        4.0
    """

    additive: ClassVar[bool] = True

    def zero(self) -> Total:
        """Nothing seen."""
        return nothing()

    def observe(self, acc: Total, values: Any) -> Total:
        """Add a batch.

        Args:
            acc: what was seen before.
            values: real tensor of any shape, or a number.

        Raises:
            InvalidArgument: for what is not real.
        """
        return more_of(acc, real("Mean.values", values))

    def merge(self, one: Total, other: Total) -> Total:
        """All that both have seen."""
        return merge_totals(one, other)

    def result(self, acc: Total) -> float | None:
        """The mean."""
        count = int(acc.count)
        mean = ratio_of(exact_value(acc.sum), exact_value(exact_add(exact_zero(), count)))
        return None if mean is None else rounded(mean)
