"""`Ratio`: a quotient of two sums, such as a loss per token, with the denominator that it has, rounded once."""

from typing import Any, ClassVar, final

import attrs

from trainfold.core import tree
from trainfold.core.exact.sum import Exact, ExactSum, exact_add, exact_merge, exact_value, exact_zero, ratio_of, rounded
from trainfold.core.metrics.arguments import real

__all__ = ["Quotient", "Ratio", "add_terms", "merge_quotients", "no_terms", "quotient_of"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Quotient:
    """Two sums.

    Attributes:
        num: the sum of the numerators.
        den: the sum of the denominators.
    """

    num: ExactSum
    den: ExactSum


@final
@attrs.frozen
class Ratio:
    """The sum of numerators over the sum of denominators, an exact fraction, rounded once; None where the denominator is 0.

    A loss per token: the sum of the token losses and the number of tokens. An accuracy: what was right, and what counts.
    Denominators may be fractions (weights). NaN if a numerator was NaN or a denominator was not finite; an infinity if a
    numerator was infinite. Neither is ever lost: they are the result where the denominator is 0, too.

    Examples:
        >>> import torch
        >>> metric = Ratio()
        >>> nll, mask = torch.tensor([[0.5, 1.5], [1.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> metric.result(metric.observe(metric.zero(), nll * mask, mask))
        1.0
        >>> print(metric.result(metric.observe(metric.zero(), 0.0, 0)))
        None
    """

    additive: ClassVar[bool] = True

    def zero(self) -> Quotient:
        """Nothing seen."""
        return no_terms()

    def observe(self, acc: Quotient, num: Any, den: Any) -> Quotient:
        """Add a batch.

        Args:
            acc: what was seen before.
            num: real tensor of any shape, or a number; all elements are added up.
            den: the same; the two shapes need not agree. A boolean mask is the number of its elements that are true.

        Raises:
            InvalidArgument: for what is not real.
        """
        return add_terms(acc, real("Ratio.num", num), real("Ratio.den", den))

    def merge(self, one: Quotient, other: Quotient) -> Quotient:
        """All that both have seen."""
        return merge_quotients(one, other)

    def result(self, acc: Quotient) -> float | None:
        """The ratio."""
        found = quotient_of(acc)
        return None if found is None else rounded(found)


def no_terms() -> Quotient:
    """Two sums of nothing."""
    return Quotient(exact_zero(), exact_zero())


def add_terms(acc: Quotient, num: Any, den: Any) -> Quotient:
    """Two sums with more terms."""
    return Quotient(exact_add(acc.num, num), exact_add(acc.den, den))


def merge_quotients(one: Quotient, other: Quotient) -> Quotient:
    """The terms of both."""
    return Quotient(exact_merge(one.num, other.num), exact_merge(one.den, other.den))


def quotient_of(acc: Quotient) -> Exact | None:
    """The exact quotient of two sums, as `ratio_of` has it: None for a finite sum over 0."""
    return ratio_of(exact_value(acc.num), exact_value(acc.den))
