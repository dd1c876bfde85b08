"""`Confusion` and `F1`: how often each class was predicted as each other class, and the score computed from these counts."""

from fractions import Fraction
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import choice, count
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import rounded
from trainfold.core.metrics.arguments import integers, same_shape
from trainfold.core.metrics.counts import add_counts, beside, check_counts, merge_counts, no_counts

__all__ = ["F1", "Average", "Confusion", "Pairs"]

Average: TypeAlias = Literal["macro", "micro", "none"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Pairs:
    """The accumulator of `Confusion` and `F1`: pairs of target and prediction, counted.

    Attributes:
        counts: int64[C, C]; row: target, column: prediction.
        outside: int64[]; pairs with an index that is not a class, unless the target is ``ignore_index``.
    """

    counts: torch.Tensor
    outside: torch.Tensor


@attrs.frozen
class _OfPairs:
    additive: ClassVar[bool] = True
    classes: int
    ignore_index: int | None = attrs.field(default=-100, kw_only=True)

    def __attrs_post_init__(self) -> None:
        count(f"{type(self).__name__}.classes", self.classes, fix="give the number of classes")

    def zero(self) -> Pairs:
        """The empty accumulator."""
        return Pairs(no_counts(self.classes, self.classes), no_counts())

    def observe(self, acc: Pairs, predicted: Any, targets: Any) -> Pairs:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            predicted: integer tensor [...]; class indices, such as ``logits.argmax(-1)``.
            targets: integer tensor of the same shape; class indices, or ``ignore_index``.

        Raises:
            InvalidArgument: for floats, shapes that differ, and an accumulator for another number of classes.
        """
        self._check(acc)
        metric, classes = type(self).__name__, self.classes
        predicted = integers(f"{metric}.predicted", predicted, fix="give class indices, such as logits.argmax(-1)")
        targets = integers(f"{metric}.targets", targets, fix="give class indices")
        same_shape(f"{metric}.predicted", predicted, "targets", targets.shape)
        predicted, targets = beside(predicted, targets)
        counts = (
            torch.ones_like(targets, dtype=torch.bool) if self.ignore_index is None else targets != self.ignore_index
        )
        is_pair = counts & (targets >= 0) & (targets < classes) & (predicted >= 0) & (predicted < classes)
        cell = torch.where(is_pair, targets * classes + predicted, 0).reshape(-1)
        seen = torch.zeros(classes * classes, dtype=torch.int64, device=cell.device)
        seen.index_add_(0, cell, is_pair.reshape(-1).to(torch.int64))
        outside = (counts & ~is_pair).sum()
        return Pairs(add_counts(acc.counts, seen.view(classes, classes)), add_counts(acc.outside, outside))

    def merge(self, one: Pairs, other: Pairs) -> Pairs:
        """The accumulator of both.

        Raises:
            InvalidArgument: for another number of classes.
        """
        self._check(one)
        self._check(other)
        merged: Pairs = tree.map(merge_counts, one, other)
        return merged

    def _check(self, acc: Pairs) -> None:
        check_counts(f"{type(self).__name__}({self.classes})", acc.counts, (self.classes, self.classes))

    def _table(self, acc: Pairs) -> list[list[int]] | None:
        """The counts as ints; None if all are 0."""
        self._check(acc)
        if outside := int(acc.outside):
            raise InvalidArgument(
                type(self).__name__,
                expected=f"predictions in 0..{self.classes - 1}, and targets there or at ignore_index",
                found=f"{outside} pairs that are not",
                fix="give the true number of classes, and the index of padding",
            )
        table: list[list[int]] = acc.counts.tolist()
        return table if any(map(any, table)) else None


@final
@attrs.frozen
class Confusion(_OfPairs):
    """The confusion matrix: a list of C lists of C ints; row: target, column: prediction.

    Attributes:
        classes: C, their number, >= 1.
        ignore_index: targets with this number do not count; None if all do.

    Raises:
        InvalidArgument: if ``classes`` is not an int >= 1.

    Examples:
        >>> metric = Confusion(2)
        >>> acc = metric.observe(metric.zero(), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> metric.result(acc)
        [[1, 1], [0, 1]]
    """

    def result(self, acc: Pairs) -> list[list[int]] | None:
        """The matrix; None if no pair counted.

        Raises:
            InvalidArgument: if an index was not a class, and for another number of classes.
        """
        return self._table(acc)


@final
@attrs.frozen
class F1(_OfPairs):
    """The F1 score: for each class ``2 TP / (2 TP + FP + FN)``, an exact fraction, rounded once.

    A class that is neither a target nor predicted has the fraction 0 / 0: it is absent, and the macro mean is over the others.
    (If it counted as 0, the score would depend on classes that never occurred.)

    Attributes:
        classes: C, their number, >= 1.
        average: ``"macro"``, the mean over classes; ``"micro"``, of the sums over classes, which is the accuracy where each
            sample has one class; ``"none"``, a list with a number or None for each class.
        ignore_index: targets with this number do not count; None if all do.

    Raises:
        InvalidArgument: if ``classes`` is not an int >= 1, or for another average.

    Examples:
        >>> import torch
        >>> metric = F1(3)
        >>> acc = metric.observe(metric.zero(), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> metric.result(acc), F1(3, average="none").result(acc)
        (0.6666666666666666, [0.6666666666666666, 0.6666666666666666, None])

    Source: C. J. van Rijsbergen, "Information Retrieval" (1979), chapter 7: E = 1 - F, with equal weights.
    """

    average: Average = attrs.field(default="macro", kw_only=True)

    def __attrs_post_init__(self) -> None:
        _OfPairs.__attrs_post_init__(self)
        choice("F1.average", self.average, get_args(Average), fix="choose one of these")

    def result(self, acc: Pairs) -> float | list[float | None] | None:
        """The score, or with ``average="none"`` one for each class; None if no pair counted.

        Raises:
            InvalidArgument: if an index was not a class, and for another number of classes.
        """
        table = self._table(acc)
        if table is None:
            return None
        true = [row[i] for i, row in enumerate(table)]
        either = [sum(row) + sum(column) for row, column in zip(table, zip(*table, strict=True), strict=True)]
        if self.average == "micro":
            return rounded(Fraction(2 * sum(true), sum(either)))
        each = [
            Fraction(2 * hits, all_of_it) if all_of_it else None for hits, all_of_it in zip(true, either, strict=True)
        ]
        if self.average == "none":
            return [None if score is None else rounded(score) for score in each]
        present = [score for score in each if score is not None]
        return rounded(sum(present, Fraction(0)) / len(present))
