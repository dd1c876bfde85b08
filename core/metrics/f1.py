"""`F1`: the harmonic mean of precision and recall, from exact counts."""

from fractions import Fraction
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import rounded
from trainfold.core.metrics.arguments import check_classes
from trainfold.core.metrics.confusion import Pairs, count_pairs, merge_pairs, no_pairs, table_of
from trainfold.core.metrics.counts import check_counts

__all__ = ["F1", "Average"]

Average: TypeAlias = Literal["macro", "micro", "none"]


@final
@attrs.frozen
class F1:
    """The F1 score: for each class ``2 TP / (2 TP + FP + FN)``, an exact fraction, rounded once.

    A class that is neither a target nor predicted has the fraction 0 / 0: it is absent, and the macro mean is that of the others.
    (Where it would count as 0, the score would depend on classes that nobody has seen.)

    Attributes:
        classes: C, their number, >= 1.
        average: ``"macro"``, the mean over classes; ``"micro"``, of the sums over classes, which is the accuracy where each
            sample has one class; ``"none"``, a list with a number or None for each class.
        ignore_index: targets with this number do not count; None where all do.

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

    additive: ClassVar[bool] = True
    classes: int
    average: Average = attrs.field(default="macro", kw_only=True)
    ignore_index: int | None = attrs.field(default=-100, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_classes("F1.classes", self.classes)
        if self.average not in get_args(Average):
            raise InvalidArgument(
                "F1.average", expected=f"one of {get_args(Average)}", found=self.average, fix="choose one of these"
            )

    def zero(self) -> Pairs:
        """Nothing seen."""
        return no_pairs(self.classes)

    def observe(self, acc: Pairs, predicted: Any, targets: Any) -> Pairs:
        """Add a batch.

        Args:
            acc: what was seen before.
            predicted: integer tensor [...]; class indices, such as ``logits.argmax(-1)``.
            targets: integer tensor of the same shape; class indices, or ``ignore_index``.

        Raises:
            InvalidArgument: for floats, shapes that differ, and what was seen of another number of classes.
        """
        check_counts(f"F1({self.classes})", acc.counts, (self.classes, self.classes))
        return count_pairs("F1", acc, predicted, targets, self.ignore_index)

    def merge(self, one: Pairs, other: Pairs) -> Pairs:
        """All that both have seen.

        Raises:
            InvalidArgument: for another number of classes.
        """
        return merge_pairs(f"F1({self.classes})", self.classes, one, other)

    def result(self, acc: Pairs) -> float | list[float | None] | None:
        """The score, or with ``average="none"`` one for each class; None where no pair counted.

        Raises:
            InvalidArgument: if there were pairs that are not of classes, or another number of classes.
        """
        check_counts(f"F1({self.classes})", acc.counts, (self.classes, self.classes))
        table = table_of("F1", acc)
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
