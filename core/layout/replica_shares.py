"""What one rank writes of leaves that are whole or cut by a rule, in as many steps as it has leaves. Imports no torch.

Ranks that hold the same boxes are replicas, and share them: the boxes of all leaves are laid end to end, and replica i of k writes those whose
middle lies between T * i / k and T * (i + 1) / k of their T bytes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import attrs

from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.placement import LocalPlacement, Placement
from trainfold.core.layout.slices import Box, volume, whole_box

Piece: TypeAlias = tuple[str, LeafSpec, Box]
"""Leaf path, spec, and the box of it that is written."""


def box_of(spec: LeafSpec, rank: int) -> Box:
    """The box of a tensor that a rank holds, by the rule of its spec.

    Examples:
        >>> box_of(LeafSpec("int8", (4, 2)), 3)
        ((0, 4), (0, 2))
    """
    return whole_box(spec.shape) if spec.placement is None else _local(spec.placement, rank).box(spec.shape)


def written_by(
    rank: int,
    world_size: int,
    tensors: Mapping[str, LeafSpec],
    *,
    item_bytes: Callable[[str], int],
    of_rank_zero: Collection[str] = (),
) -> list[Piece]:
    """What a rank writes of leaves that are whole or cut by a rule.

    Laws: the pieces of all ranks tile each tensor; no replica writes more than its share plus the largest leaf.

    Args:
        rank: the rank.
        world_size: the number of ranks.
        tensors: leaf path -> spec, the same on all ranks, without slices.
        item_bytes: the size of an element, by the name of its dtype.
        of_rank_zero: paths of leaves that rank 0 writes, because its value counts.

    Examples:
        >>> tensors = {name: LeafSpec("int8", (2,)) for name in "abcd"}
        >>> [[path for path, _, _ in written_by(rank, 2, tensors, item_bytes=lambda _: 1)] for rank in range(2)]
        [['a', 'b'], ['c', 'd']]
    """
    everywhere = _Replicas(rank, world_size)
    groups: dict[object, _Replicas] = {None: everywhere}
    parts: dict[int, tuple[_Replicas, Box, int]] = {}
    for spec in {id(spec): spec for spec in tensors.values()}.values():  # there are many leaves, and few specs
        rule, group, box = spec.placement, everywhere, whole_box(spec.shape)
        if not volume(box):
            group = _Replicas(rank, world_size)  # nothing to share: rank 0 writes it
        elif rule is not None:
            local = _local(rule, rank)
            group = groups.setdefault((rule.mesh, rule.replica_axes), _Replicas(local.replica, local.replicas))
            box = local.box(spec.shape)
        parts[id(spec)] = group, box, volume(box) * item_bytes(spec.dtype)
    laid = [(path, spec, *parts[id(spec)]) for path, spec in tensors.items()]
    for _, _, group, _, nbytes in laid:
        group.total_bytes += nbytes
    found = []
    for path, spec, group, box, nbytes in laid:
        is_mine = group.has_next(nbytes) if group.count > 1 else nbytes or not volume(whole_box(spec.shape))
        if path in of_rank_zero and spec.placement is None:
            is_mine = rank == 0
        if is_mine:
            found.append((path, spec, box))
    return found


@attrs.define
class _Replicas:
    """The ranks that hold the same boxes, while these are laid end to end."""

    index: int
    count: int
    total_bytes: int = 0
    laid_bytes: int = 0

    def has_next(self, nbytes: int) -> bool:
        """Whether this replica writes the next box."""
        twice_middle = 2 * self.laid_bytes + nbytes
        self.laid_bytes += nbytes
        return self.index == (
            max(twice_middle * self.count - 1, 0) // (2 * self.total_bytes) if self.total_bytes else 0
        )


def _local(rule: Placement, rank: int) -> LocalPlacement:
    coordinate = rule.mesh.coordinate_of(rank)
    assert coordinate is not None, "a rule without slices is over all ranks of the save"
    return rule.at(coordinate)
