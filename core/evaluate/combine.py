"""A tally as one vector of integers. One collective call adds up the vectors of all ranks.

Each rank first sends the lengths of its leaves. The vector's layout follows from those of all ranks, so a rank without data, or with
data of other lengths, takes part in the same call. Additive accumulators are added in place. For any other accumulator each rank has
its own part of the vector, with zeros elsewhere, and every rank merges the parts in rank order. The same holds for accumulators
whose structure depends on the data, such as dicts by the name of a source, additive or not.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch.nn.functional import pad

from trainfold.core import tree
from trainfold.core.errors import InvalidState, RanksDisagree
from trainfold.core.evaluate.suite import Suite, Tally
from trainfold.core.metrics.metric import Metric

Shape = tuple[int, ...]


@final
@attrs.frozen
class Extent:
    """One leaf of an accumulator: its shape, and the part ``[start, stop)`` of its last dimension that holds all its nonzeros."""

    shape: Shape
    start: int
    stop: int


@final
@attrs.frozen
class MetricLayout:
    """One metric's part of a rank's tally.

    Attributes:
        name: its name in the suite.
        metric: the metric as text, the same on every rank.
        adds: whether accumulators of several ranks are added, or merged one by one.
        extents: of the leaves of its accumulator.
        skeleton: the accumulator with 0 for each leaf; None if its structure is that of ``zero()``.
    """

    name: str
    metric: str
    adds: bool
    extents: tuple[Extent, ...]
    skeleton: Any


Layout = tuple[MetricLayout, ...]


def layout_of(suite: Suite, tally: Tally, *, world_size: int) -> Layout:
    """The layout of this rank's tally, which it sends to the others before the vector.

    Raises:
        InvalidState: if an accumulator has leaves other than int64 tensors, or integers so large that a sum over the ranks
            could overflow.
    """
    return tuple(
        MetricLayout(
            name,
            tally.metrics[name],
            _adds(metric),
            _extents(name, tally.accumulators[name], summands=world_size if _adds(metric) else 1),
            _skeleton(metric, tally.accumulators[name]),
        )
        for name, metric in suite.items()
    )


def check_same_suite(layouts: Sequence[Layout]) -> None:
    """Refuse ranks that measure different things.

    Raises:
        RanksDisagree: the same on every rank.
    """
    for rank, layout in enumerate(layouts):
        here, there = _what(layouts[0]), _what(layout)
        if here != there:
            raise RanksDisagree(
                "suite",
                expected=f"the same metrics on every rank; rank 0 has {_listed(here - there) or 'no more'}",
                found=f"rank {rank} has {_listed(there - here) or 'fewer'}",
                fix="pass the same suite on every rank; forward may leave out what a rank did not observe",
            )


def vector_of(tally: Tally, layouts: Sequence[Layout], rank: int) -> torch.Tensor:
    """This rank's vector, int64, of the same length on every rank; `tally_of` takes the sum over the ranks."""
    parts: list[torch.Tensor] = []
    for ranks in zip(*layouts, strict=True):
        leaves = [leaf.cpu() for leaf in tree.leaves(tally.accumulators[ranks[0].name])]
        if _are_added(ranks):
            for leaf, wide in zip(leaves, _widest_of(ranks), strict=True):
                parts.append(_padded(leaf, wide.shape)[..., wide.start : wide.stop].reshape(-1))
        else:
            for each, part in enumerate(ranks):
                mine = leaves if each == rank else [torch.zeros(_size(part), dtype=torch.int64, device="cpu")]
                parts += [leaf.reshape(-1) for leaf in mine]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")


def tally_of(suite: Suite, tally: Tally, layouts: Sequence[Layout], summed: torch.Tensor, *, batches: int) -> Tally:
    """The tally of all ranks.

    Args:
        suite: the metrics.
        tally: this rank's.
        layouts: those of all ranks.
        summed: the sum of the vectors of all ranks.
        batches: how many batches all ranks observed.
    """
    merged = {}
    rest = summed
    for ranks in zip(*layouts, strict=True):
        metric = suite[ranks[0].name]
        zero = metric.zero()
        accumulators = []
        if _are_added(ranks):
            leaves = []
            for wide in _widest_of(ranks):
                leaf, rest = _added(rest, wide)
                leaves.append(leaf)
            accumulators.append(tree.unflatten(tree.structure(zero), leaves))
        else:
            for part in ranks:
                leaves = []
                for extent in part.extents:
                    slot, rest = rest[: math.prod(extent.shape)], rest[math.prod(extent.shape) :]
                    leaves.append(slot.view(extent.shape).clone())
                structure = tree.structure(zero if part.skeleton is None else part.skeleton)
                accumulators.append(tree.unflatten(structure, leaves))
        merged[ranks[0].name] = functools.reduce(metric.merge, accumulators, zero)
    return attrs.evolve(tally, accumulators=merged, batches=batches)


def _adds(metric: Metric) -> bool:
    return bool(getattr(metric, "additive", False))


def _skeleton(metric: Metric, accumulator: Any) -> Any:
    leaves, structure = tree.flatten(accumulator)
    return None if structure == tree.structure(metric.zero()) else tree.unflatten(structure, [0] * len(leaves))


def _are_added(ranks: Sequence[MetricLayout]) -> bool:
    """Whether the leaves of a metric's accumulators mean the same on all ranks, so that they can be added."""
    dims = {tuple(len(extent.shape) for extent in part.extents) for part in ranks}
    return len(dims) == 1 and all(part.adds and part.skeleton is None for part in ranks)


def _extents(name: str, accumulator: Any, *, summands: int) -> tuple[Extent, ...]:
    extents = []
    for path, leaf in tree.named_leaves(accumulator, f"accumulators[{name!r}]"):
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.int64:
            raise InvalidState(
                path,
                expected="int64 tensors: integers add up exactly, in any order",
                found=str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__,
                fix="accumulate with exact_add, or count in int64",
            )
        if summands > 1 and leaf.numel() and max(int(leaf.max()), -int(leaf.min())) > (2**63 - 1) // summands:
            raise InvalidState(
                path,
                expected=f"integers that {summands} ranks can add up in 63 bits",
                found=f"from {int(leaf.min())} to {int(leaf.max())}",
                fix="carry in observe, as exact_add does",
            )
        extents.append(Extent(tuple(leaf.shape), *_used(leaf.cpu())))
    return tuple(extents)


def _used(leaf: torch.Tensor) -> tuple[int, int]:
    if leaf.dim() == 0:
        return 0, 1
    if leaf.numel() == 0:
        return 0, 0
    used = leaf.reshape(-1, leaf.shape[-1]).any(0).nonzero()
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def _what(layout: Layout) -> set[tuple[str, str, bool]]:
    return {(part.name, part.metric, part.adds) for part in layout}


def _listed(parts: set[tuple[str, str, bool]]) -> str:
    return ", ".join(f"{name}: {metric}" for name, metric, _ in sorted(parts))


def _size(part: MetricLayout) -> int:
    return sum(math.prod(extent.shape) for extent in part.extents)


def _widest_of(ranks: Sequence[MetricLayout]) -> list[Extent]:
    """For each leaf of an accumulator, the extent that covers those of all ranks."""
    return [_widest(extents) for extents in zip(*(part.extents for part in ranks), strict=True)]


def _widest(extents: Sequence[Extent]) -> Extent:
    shape = tuple(max(sides) for sides in zip(*(extent.shape for extent in extents), strict=True))
    used = [extent for extent in extents if extent.stop > extent.start]
    return Extent(shape, min((part.start for part in used), default=0), max((part.stop for part in used), default=0))


def _padded(leaf: torch.Tensor, shape: Shape) -> torch.Tensor:
    if not shape:
        return leaf.view(1)
    missing = [side for length, wanted in zip(leaf.shape, shape, strict=True) for side in (wanted - length, 0)]
    return pad(leaf, missing[::-1])


def _added(rest: torch.Tensor, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
    width = extent.stop - extent.start
    if not extent.shape:
        return rest[0].clone(), rest[1:]
    size = math.prod(extent.shape[:-1]) * width
    used = rest[:size].view(*extent.shape[:-1], width)
    return pad(used, (extent.start, extent.shape[-1] - extent.stop)), rest[size:]
