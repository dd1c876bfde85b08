"""`TopK`: how often the target is among the k largest logits; ties are decided by index, not by a kernel."""

from fractions import Fraction
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact import rounded
from trainfold.core.metrics.arguments import integers, real, same_shape
from trainfold.core.metrics.counts import add_counts, beside, merge_counts, no_counts

__all__ = ["Hits", "TopK"]

_CPU_CHUNK = 1 << 18  # logits that are compared at a time
_DEVICE_CHUNK = 1 << 26


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Hits:
    """What a `TopK` has seen.

    Attributes:
        correct: int64[]; targets among the k largest.
        total: int64[]; targets that count, those with a NaN among their logits included.
        outside: int64[]; targets that are no class and not ``ignore_index``.
        special: int64[3]; in the first place, targets with a NaN among their logits.
    """

    correct: torch.Tensor
    total: torch.Tensor
    outside: torch.Tensor
    special: torch.Tensor


@final
@attrs.frozen
class TopK:
    """The share of targets that are among the k largest logits: ``correct / total``, rounded once.

    The rank of a target is the number of larger logits, and of equal ones with a smaller index: `torch.topk` promises nothing
    for ties, and they are common in bf16. A row with a NaN is wrong, and counted in ``special``.

    Attributes:
        k: how many are looked at, >= 1.
        ignore_index: targets with this number do not count; None where all do.

    Raises:
        InvalidArgument: if k is not an int >= 1.

    Examples:
        >>> metric = TopK(2)
        >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1], [0.3, 0.3, 0.3]])
        >>> metric.result(metric.observe(metric.zero(), logits, torch.tensor([2, 0, 2])))
        0.6666666666666666
    """

    additive: ClassVar[bool] = True
    k: int
    ignore_index: int | None = attrs.field(default=-100, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if type(self.k) is not int or self.k < 1:
            raise InvalidArgument("TopK.k", expected="an int >= 1", found=self.k, mend="say how many may be right")

    def zero(self) -> Hits:
        """Nothing seen."""
        return Hits(no_counts(), no_counts(), no_counts(), no_counts(3))

    def observe(self, acc: Hits, logits: Any, targets: Any) -> Hits:
        """Add a batch.

        Args:
            acc: what was seen before.
            logits: real tensor [..., C], C >= k.
            targets: integer tensor [...]; class indices in 0..C-1, or ``ignore_index``.

        Raises:
            InvalidArgument: for other shapes or dtypes.
        """
        logits = real("TopK.logits", logits)
        targets = integers("TopK.targets", targets, mend="give class indices")
        if logits.dim() == 0 or logits.shape[-1] < self.k:
            raise InvalidArgument(
                "TopK.logits",
                expected=f"[..., C] with C >= k = {self.k}",
                found=tuple(logits.shape),
                mend="the last dimension has the classes",
            )
        same_shape("TopK.targets", targets, "logits without their last dimension", logits.shape[:-1])
        logits, targets = beside(logits, targets)
        counts = (
            torch.ones_like(targets, dtype=torch.bool) if self.ignore_index is None else targets != self.ignore_index
        )
        is_class = counts & (targets >= 0) & (targets < logits.shape[-1])
        place = torch.where(is_class, targets, 0).reshape(-1, 1)
        rank, has_nan = (found.view(targets.shape) for found in _ranks(logits.reshape(-1, logits.shape[-1]), place))
        spoiled = is_class & has_nan
        correct = is_class & ~spoiled & (rank < self.k)
        nothing = no_counts().to(targets.device, non_blocking=True)
        return Hits(
            add_counts(acc.correct, correct.sum()),
            add_counts(acc.total, is_class.sum()),
            add_counts(acc.outside, (counts & ~is_class).sum()),
            add_counts(acc.special, torch.stack([spoiled.sum(), nothing, nothing])),
        )

    def merge(self, one: Hits, other: Hits) -> Hits:
        """All that both have seen."""
        merged: Hits = tree.map(merge_counts, one, other)
        return merged

    def result(self, acc: Hits) -> float | None:
        """The share; None where no target counted.

        Raises:
            InvalidArgument: if there were targets that are no class.
        """
        if outside := int(acc.outside):
            raise InvalidArgument(
                "TopK.targets",
                expected=f"indices of classes, or ignore_index = {self.ignore_index}",
                found=f"{outside} others",
                mend="mend the targets, or give ignore_index",
            )
        total = int(acc.total)
        return rounded(Fraction(int(acc.correct), total)) if total else None


def _ranks(logits: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, how many logits come before the one at its place, and whether one is NaN.

    Some rows at a time: comparisons need as much memory as logits do, and on a CPU fit into its cache.
    """
    classes = logits.shape[-1]
    each = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // classes)
    index = torch.arange(classes, device=logits.device)
    ranks, spoiled = [], []
    for rows, places in zip(torch.split(logits, each), torch.split(place, each), strict=True):
        target = rows.gather(-1, places)
        ranks.append(((rows > target) | ((rows == target) & (index < places))).sum(-1))
        spoiled.append(rows.amax(-1).isnan())
    return torch.cat(ranks), torch.cat(spoiled)
