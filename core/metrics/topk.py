"""`TopK`: how often the target is among the k largest logits; ties are decided by index, not by a kernel."""

from fractions import Fraction
from typing import Any, ClassVar, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import rounded
from trainfold.core.metrics.arguments import integers, real, same_shape
from trainfold.core.metrics.counts import add_counts, beside, blocks_of, merge_counts, no_counts

__all__ = ["Hits", "TopK"]

_CPU_CHUNK = 1 << 18  # logits that are compared at a time
_DEVICE_CHUNK = 1 << 24
_COUNTED_IN_FLOAT32 = 1 << 24  # whole numbers up to here are exact
# The dtype in which logits are compared, without rounding: torch does not compare some narrow dtypes.
_COMPARED = {
    **dict.fromkeys((torch.float64, torch.int32, torch.uint32), torch.float64),
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float32),
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), torch.float32),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu), torch.float32),
    **dict.fromkeys((torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16), torch.float32),
    torch.int64: torch.int64,
}


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Hits:
    """The accumulator of `TopK`.

    Attributes:
        correct: int64[]; targets among the k largest.
        total: int64[]; targets that count, those with a NaN among their logits included.
        outside: int64[]; targets that are neither a class nor ``ignore_index``.
        special: int64[3]; the first element counts targets with a NaN among their logits.
    """

    correct: torch.Tensor
    total: torch.Tensor
    outside: torch.Tensor
    special: torch.Tensor


@final
@attrs.frozen
class TopK:
    """The share of targets that are among the k largest logits: ``correct / total``, rounded once.

    The rank of a target is the number of larger logits, plus the number of equal ones with a smaller index: `torch.topk`
    promises nothing for ties, and ties are common in bf16. A row with a NaN counts as wrong, and in ``special``.

    Attributes:
        k: how many of the largest logits are searched, >= 1.
        ignore_index: targets with this number do not count; None if all do.

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
        count("TopK.k", self.k, fix="pass how many of the largest logits may be the target's")

    def zero(self) -> Hits:
        """The empty accumulator."""
        return Hits(no_counts(), no_counts(), no_counts(), no_counts(3))

    def observe(self, acc: Hits, logits: Any, targets: Any) -> Hits:
        """Add a batch.

        Args:
            acc: the accumulator so far.
            logits: real tensor [..., C], C >= k.
            targets: integer tensor [...]; class indices in 0..C-1, or ``ignore_index``.

        Raises:
            InvalidArgument: for other shapes or dtypes.
        """
        logits = real("TopK.logits", logits)
        targets = integers("TopK.targets", targets, fix="give class indices")
        if logits.dim() == 0 or logits.shape[-1] < self.k:
            raise InvalidArgument(
                "TopK.logits",
                expected=f"[..., C] with C >= k = {self.k}",
                found=tuple(logits.shape),
                fix="put the classes in the last dimension",
            )
        if logits.dtype not in _COMPARED:
            raise InvalidArgument(
                "TopK.logits", expected="numbers that can be compared", found=logits.dtype, fix="pass them as float32"
            )
        same_shape("TopK.targets", targets, "logits without their last dimension", logits.shape[:-1])
        logits, targets = beside(logits, targets)
        counts = (
            torch.ones_like(targets, dtype=torch.bool) if self.ignore_index is None else targets != self.ignore_index
        )
        is_class = counts & (targets >= 0) & (targets < logits.shape[-1])
        place = torch.where(is_class, targets, 0).reshape(-1, 1)
        is_among, has_nan = (found.view(targets.shape) for found in _are_among(logits, place, self.k))
        spoiled = is_class & has_nan
        correct = is_class & ~spoiled & is_among
        nothing = no_counts().to(targets.device, non_blocking=True)
        return Hits(
            add_counts(acc.correct, correct.sum()),
            add_counts(acc.total, is_class.sum()),
            add_counts(acc.outside, (counts & ~is_class).sum()),
            add_counts(acc.special, torch.stack([spoiled.sum(), nothing, nothing])),
        )

    def merge(self, one: Hits, other: Hits) -> Hits:
        """The accumulator of both."""
        merged: Hits = tree.map(merge_counts, one, other)
        return merged

    def result(self, acc: Hits) -> float | None:
        """The share; None if no target counted.

        Raises:
            InvalidArgument: if a target was not a class.
        """
        if outside := int(acc.outside):
            raise InvalidArgument(
                "TopK.targets",
                expected=f"indices of classes, or ignore_index = {self.ignore_index}",
                found=f"{outside} others",
                fix="correct the targets, or pass ignore_index",
            )
        total = int(acc.total)
        return rounded(Fraction(int(acc.correct), total)) if total else None


def _are_among(logits: torch.Tensor, place: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, whether the logit at its place is one of the k largest, and whether the row has a NaN.

    Rows are compared in blocks: a comparison needs as much memory as its logits, and on a CPU a block fits into the cache.
    """
    is_on_cpu = logits.device.type == "cpu"
    each = max(1, (_CPU_CHUNK if is_on_cpu else _DEVICE_CHUNK) // logits.shape[-1])
    index = torch.arange(logits.shape[-1], device=logits.device)
    among, spoiled, start = [], [], 0
    for block in blocks_of(logits, each, keep=1):
        rows, places = block.to(_COMPARED[logits.dtype]), place[start : start + len(block)]
        start += len(block)
        target = rows.gather(-1, places)
        among.append(_looked_up(rows, target, places, k) if is_on_cpu else _rank(rows, target, index < places) < k)
        spoiled.append(rows.amax(-1).isnan())
    return torch.cat(among), torch.cat(spoiled)


def _rank(rows: torch.Tensor, target: torch.Tensor, is_before: torch.Tensor) -> torch.Tensor:
    """How many logits rank before the target."""
    return ((rows > target) | ((rows == target) & is_before)).sum(-1)


def _looked_up(rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor, k: int) -> torch.Tensor:
    """The same as ``_rank(...) < k`` on a CPU, which ranks only the rows that a tie decides.

    The results of comparisons are stored in the dtype of the logits: comparing and adding up is then several times as fast as
    with booleans.
    """
    ones = torch.empty_like(rows)
    exact = torch.float64 if rows.dtype == torch.float32 and rows.shape[-1] > _COUNTED_IN_FLOAT32 else rows.dtype
    larger = torch.gt(rows, target, out=ones).sum(-1, dtype=exact)
    as_large = torch.ge(rows, target, out=ones).sum(-1, dtype=exact)  # the target itself too
    among = larger < k
    (tied,) = torch.nonzero(among & (as_large > k), as_tuple=True)
    if len(tied):
        is_before = torch.arange(rows.shape[-1], device=rows.device) < places[tied]
        among[tied] = _rank(rows[tied], target[tied], is_before) < k
    return among
