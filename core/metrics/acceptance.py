"""`AcceptanceRate`: the share of drafts accepted at each position, among the drafts that reach the position."""

import math
from fractions import Fraction
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import rounded
from trainfold.core.metrics.arguments import integers, same_shape
from trainfold.core.metrics.counts import add_counts, beside, merge_counts, no_counts

__all__ = ["AcceptanceRate", "Reached"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Reached:
    """The accumulator of `AcceptanceRate`: drafts counted at each position, as many positions as the longest batch had.

    Attributes:
        accepted: int64[K]; drafts accepted at this position and at all earlier ones.
        reached: int64[K]; drafts that have this position and were accepted at all earlier ones.
    """

    accepted: torch.Tensor
    reached: torch.Tensor


@final
@attrs.frozen
class AcceptanceRate:
    """The conditional acceptance rate at each position of drafts: a list with a float for each position that was reached.

    A draft reaches a position if the position is valid and all earlier ones were valid and accepted. The list ends before the
    first position that no draft reached; None if there was no draft.

    Examples:
        >>> metric = AcceptanceRate()
        >>> accepted = torch.tensor([[True, True, False], [True, False, True], [True, True, True]])
        >>> metric.result(metric.observe(metric.zero(), accepted, torch.ones(3, 3, dtype=torch.bool)))
        [1.0, 0.6666666666666666, 0.5]
    """

    additive: ClassVar[bool] = True

    def zero(self) -> Reached:
        """The empty accumulator."""
        return Reached(no_counts(0), no_counts(0))

    def observe(self, acc: Reached, accepted: Any, valid: Any) -> Reached:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            accepted: boolean or integer tensor [..., K]; whether each token of a draft was accepted.
            valid: boolean or integer tensor of the same shape; whether the draft has this position.

        Raises:
            InvalidArgument: for floats, and shapes that differ.
        """
        fix = "pass booleans: a rate counts drafts"
        valid = integers("AcceptanceRate.valid", valid, fix=fix) != 0
        accepted = integers("AcceptanceRate.accepted", accepted, fix=fix) != 0
        if valid.dim() == 0:
            raise InvalidArgument(
                "AcceptanceRate.valid",
                expected="shape [..., K]",
                found="a scalar",
                fix="put the positions in the last dimension",
            )
        same_shape("AcceptanceRate.accepted", accepted, "valid", valid.shape)
        valid, accepted = beside(valid, accepted)
        rows = math.prod(valid.shape[:-1])
        valid, accepted = (tensor.reshape(rows, valid.shape[-1]) for tensor in (valid, accepted))
        through = (valid & accepted).long().cumprod(-1)
        before = torch.cat([torch.ones_like(through[:, :1]), through[:, :-1]], dim=-1)
        return Reached(add_counts(acc.accepted, through.sum(0)), add_counts(acc.reached, (before * valid).sum(0)))

    def merge(self, one: Reached, other: Reached) -> Reached:
        """The accumulator of both."""
        merged: Reached = tree.map(merge_counts, one, other)
        return merged

    def result(self, acc: Reached) -> list[float] | None:
        """The rates."""
        pairs = zip(acc.accepted.tolist(), acc.reached.tolist(), strict=True)
        return [rounded(Fraction(accepted, reached)) for accepted, reached in pairs if reached] or None
