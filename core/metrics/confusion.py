"""`Confusion`: how often each class was taken for each other one, counted."""

from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.arguments import check_classes, integers, same_shape
from trainfold.core.metrics.counts import add_counts, beside, check_counts, merge_counts, no_counts

__all__ = ["Confusion", "Pairs", "count_pairs", "merge_pairs", "no_pairs", "table_of"]


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Pairs:
    """Pairs of target and prediction, counted.

    Attributes:
        counts: int64[C, C]; row: target, column: prediction.
        outside: int64[]; pairs in which one is no class, and the target is not ``ignore_index``.
    """

    counts: torch.Tensor
    outside: torch.Tensor


@final
@attrs.frozen
class Confusion:
    """The confusion matrix: a list of C lists of C ints; row: target, column: prediction.

    Attributes:
        classes: C, their number, >= 1.
        ignore_index: targets with this number do not count; None where all do.

    Raises:
        InvalidArgument: if ``classes`` is not an int >= 1.

    Examples:
        >>> metric = Confusion(2)
        >>> acc = metric.observe(metric.zero(), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> metric.result(acc)
        [[1, 1], [0, 1]]
    """

    additive: ClassVar[bool] = True
    classes: int
    ignore_index: int | None = attrs.field(default=-100, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_classes("Confusion.classes", self.classes)

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
        check_counts(f"Confusion({self.classes})", acc.counts, (self.classes, self.classes))
        return count_pairs("Confusion", acc, predicted, targets, self.ignore_index)

    def merge(self, one: Pairs, other: Pairs) -> Pairs:
        """All that both have seen.

        Raises:
            InvalidArgument: for another number of classes.
        """
        return merge_pairs(f"Confusion({self.classes})", self.classes, one, other)

    def result(self, acc: Pairs) -> list[list[int]] | None:
        """The matrix; None where no pair counted.

        Raises:
            InvalidArgument: if there were pairs that are not of classes, or another number of classes.
        """
        check_counts(f"Confusion({self.classes})", acc.counts, (self.classes, self.classes))
        return table_of("Confusion", acc)


def no_pairs(classes: int) -> Pairs:
    """No pair of so many classes."""
    return Pairs(no_counts(classes, classes), no_counts())


def count_pairs(metric: str, acc: Pairs, predicted: Any, targets: Any, ignore_index: int | None) -> Pairs:
    """Pairs and more of them; ``metric`` is its name, for messages.

    Raises:
        InvalidArgument: for floats, and shapes that differ.
    """
    predicted = integers(f"{metric}.predicted", predicted, fix="give class indices, such as logits.argmax(-1)")
    targets = integers(f"{metric}.targets", targets, fix="give class indices")
    same_shape(f"{metric}.predicted", predicted, "targets", targets.shape)
    predicted, targets = beside(predicted, targets)
    classes = acc.counts.shape[0]
    counts = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
    is_pair = counts & (targets >= 0) & (targets < classes) & (predicted >= 0) & (predicted < classes)
    cell = torch.where(is_pair, targets * classes + predicted, 0).reshape(-1)
    seen = torch.zeros(classes * classes, dtype=torch.int64, device=cell.device)
    seen.index_add_(0, cell, is_pair.reshape(-1).to(torch.int64))
    return Pairs(
        add_counts(acc.counts, seen.view(classes, classes)), add_counts(acc.outside, (counts & ~is_pair).sum())
    )


def merge_pairs(metric: str, classes: int, one: Pairs, other: Pairs) -> Pairs:
    """The pairs of both.

    Raises:
        InvalidArgument: for another number of classes.
    """
    for acc in (one, other):
        check_counts(metric, acc.counts, (classes, classes))
    merged: Pairs = tree.map(merge_counts, one, other)
    return merged


def table_of(metric: str, acc: Pairs) -> list[list[int]] | None:
    """The counts as ints; None where there is none.

    Raises:
        InvalidArgument: if there were pairs that are not of classes.
    """
    classes = acc.counts.shape[0]
    if outside := int(acc.outside):
        raise InvalidArgument(
            metric,
            expected=f"predictions in 0..{classes - 1}, and targets there or at ignore_index",
            found=f"{outside} pairs that are not",
            fix="give the number of classes that there are, and the index of padding",
        )
    table: list[list[int]] = acc.counts.tolist()
    return table if any(map(any, table)) else None
