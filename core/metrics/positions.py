"""`PositionAccuracy` and `AcceptanceLength`: a ratio for each position of drafts or sequences of any length."""

import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import (
    Exact,
    ExactSum,
    exact_add_columns,
    exact_merge,
    exact_values,
    exact_zero,
    ratio_of,
    rounded,
)
from trainfold.core.metrics.arguments import real, same_shape
from trainfold.core.metrics.counts import beside

__all__ = ["AcceptanceLength", "PositionAccuracy", "Positions"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Positions:
    """The accumulator of `PositionAccuracy` and `AcceptanceLength`: as many positions as the longest batch had.

    Attributes:
        num: a sum of numerators for each position.
        den: a sum of denominators for each position.
    """

    num: ExactSum
    den: ExactSum


@attrs.frozen
class _OfPositions:
    additive: ClassVar[bool] = True

    def zero(self) -> Positions:
        """The empty accumulator."""
        return Positions(exact_zero(0), exact_zero(0))

    def merge(self, one: Positions, other: Positions) -> Positions:
        """The accumulator of both."""
        return Positions(exact_merge(one.num, other.num), exact_merge(one.den, other.den))


@final
@attrs.frozen
class PositionAccuracy(_OfPositions):
    """The accuracy at each position: a list with a float, or None if nothing counted, for each position.

    Batches may have different lengths. The list ends with the last position at which something counted, so padding changes
    nothing; the result is None if nothing counted anywhere.

    Raises:
        InvalidArgument: from ``result``, if a numerator exceeds its denominator.

    Examples:
        >>> metric = PositionAccuracy()
        >>> acc = metric.observe(metric.zero(), torch.tensor([[True, False]]), torch.tensor([[True, True]]))
        >>> correct, valid = torch.tensor([[True, True, True]]), torch.tensor([[True, True, False]])
        >>> metric.result(metric.observe(acc, correct, valid))
        [1.0, 0.5]
    """

    def observe(self, acc: Positions, correct: Any, valid: Any) -> Positions:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            correct: tensor [..., L]; the numerators, as for `Ratio`: counts or weights; or booleans, which mean all or nothing
                of ``valid``.
            valid: tensor of the same shape; the denominators: booleans, counts or weights. Where it is 0, ``correct`` is
                ignored.

        Raises:
            InvalidArgument: for shapes that differ.
        """
        return _with_positions("PositionAccuracy", acc, ("correct", correct), valid)

    def result(self, acc: Positions) -> list[float | None] | None:
        """The accuracies."""
        ratios = _ratios(acc)
        _check_shares("PositionAccuracy.correct", ratios)
        while ratios and ratios[-1] is None:
            ratios.pop()
        return [None if ratio is None else rounded(ratio) for ratio in ratios] or None


@final
@attrs.frozen
class AcceptanceLength(_OfPositions):
    """The simulated acceptance length of speculative decoding: how many draft tokens are accepted, ``a0 + a0 * a1 + ...``.

    ``a_i`` is the acceptance at position i over all batches and ranks, an exact fraction. The products are of these fractions,
    never of those of one batch: the mean of products is not the product of means. The result is rounded once, at the end.

    None if nothing counted at position 0. The series ends before the first position at which nothing counted, since
    no draft is known to reach beyond it.

    Raises:
        InvalidArgument: from ``result``, if a numerator exceeds its denominator.

    Examples:
        >>> metric = AcceptanceLength()
        >>> accepted = torch.tensor([[True, True], [True, False]])
        >>> metric.result(metric.observe(metric.zero(), accepted, torch.ones(2, 2, dtype=torch.bool)))
        1.5

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), section 3.1,
    with an acceptance for each position in place of one for all; the token that the target model adds is not counted.
    """

    def observe(self, acc: Positions, accepted: Any, valid: Any) -> Positions:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            accepted: tensor [..., K]; how many draft tokens at each position would be accepted if they were reached:
                numerators, or booleans, as for `PositionAccuracy`.
            valid: tensor of the same shape; the denominators: booleans, counts or weights.

        Raises:
            InvalidArgument: for shapes that differ.
        """
        return _with_positions("AcceptanceLength", acc, ("accepted", accepted), valid)

    def result(self, acc: Positions) -> float | None:
        """The expected length."""
        known = _until_none(_ratios(acc))
        if not known:
            return None
        _check_shares("AcceptanceLength.accepted", known)
        if not all(isinstance(ratio, Fraction) for ratio in known):  # a NaN or an infinity has no exact product
            known = [rounded(ratio) for ratio in known]
        return rounded(sum(itertools.accumulate(known, operator.mul)))


def _with_positions(metric: str, acc: Positions, named: tuple[str, Any], valid: Any) -> Positions:
    name, given = named
    valid, correct = real(f"{metric}.valid", valid), real(f"{metric}.{name}", given)
    if valid.dim() == 0:
        raise InvalidArgument(
            f"{metric}.valid",
            expected="shape [..., L]",
            found="a scalar",
            fix="put the positions in the last dimension",
        )
    same_shape(f"{metric}.{name}", correct, "valid", valid.shape)
    correct, valid = beside(correct, valid)
    counts, num = (correct, valid) if correct.dtype == torch.bool else (valid != 0, correct)
    num = torch.where(counts, num, torch.zeros_like(num))
    return Positions(exact_add_columns(acc.num, num), exact_add_columns(acc.den, valid))


def _ratios(acc: Positions) -> list[Exact | None]:
    return [ratio_of(num, den) for num, den in zip(exact_values(acc.num), exact_values(acc.den), strict=True)]


def _check_shares(where: str, ratios: Sequence[Exact | None]) -> None:
    for position, ratio in enumerate(ratios):
        if isinstance(ratio, Fraction) and not 0 <= ratio <= 1:
            raise InvalidArgument(
                where,
                expected="numerators from 0 to what `valid` counts",
                found=f"{rounded(ratio)} of 1 at position {position}",
                fix="weigh both alike, as in (correct * weights, weights), or pass booleans first",
            )


def _until_none(ratios: list[Exact | None]) -> list[Exact]:
    known: list[Exact] = []
    for ratio in ratios:
        if ratio is None:
            break
        known.append(ratio)
    return known
