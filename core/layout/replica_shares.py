"""What one rank writes of leaves that are whole or cut by a rule, in as many steps as it has leaves. Imports no torch.

Ranks that hold the same boxes are replicas, and share their bytes: the boxes of all leaves are laid end to end, T bytes, and replica i of k writes
what is between the places T * i / k and T * (i + 1) / k. A place moves to the end of a leaf that is near, so that few leaves are divided and no
small one is; otherwise to the start of a row that is near, of the largest rows that have one. Where the share of a replica is less than a unit, leaves
are divided into units at most; and where many replicas have less than half of one, the first of them fill a unit each, and the others write nothing
(ADR-0035).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple

import attrs

from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.placement import LocalPlacement, Placement
from trainfold.core.layout.slices import Box, run_blocks, volume, whole_box

UNIT_BYTES: Final = 2**16
"""A leaf has at most one writer for each so many bytes, so none up to this size is divided."""
_MANY: Final = 64  # replicas: a load may have to open the index of each that writes of a leaf without a rule
_NEAR: Final = 200  # a place moves by no more than this part of a share, or by half a unit


class Piece(NamedTuple):
    """What a rank writes of a leaf, or a box of it: the elements between two places are at most two boxes for each dimension.

    Attributes:
        path: the leaf path.
        spec: of the leaf.
        box: what is written; its elements follow one another in the box that the rank holds.
        held: that box, if other replicas write the rest of it; None if the rank writes all that it holds.
    """

    path: str
    spec: LeafSpec
    box: Box
    held: Box | None = None


def box_of(spec: LeafSpec, rank: int) -> Box:
    """The box of a tensor that a rank holds, by the rule of its spec.

    Examples:
        >>> box_of(LeafSpec("int8", (4, 2)), 3)
        ((0, 4), (0, 2))
    """
    return whole_box(spec.shape) if spec.placement is None else _local(spec.placement, rank).box(spec.shape)


def written_by(  # noqa: PLR0913 - keywords
    rank: int,
    world_size: int,
    tensors: Mapping[str, LeafSpec],
    *,
    item_bytes: Callable[[str], int],
    of_rank_zero: Collection[str] = (),
    prefers: FilePreference = NO_PREFERENCE,
) -> list[Piece]:
    """What a rank writes of leaves that are whole or cut by a rule.

    Laws: the pieces of all ranks tile each tensor. The bytes of a replica differ from its share by at most 1 % or `UNIT_BYTES`, so by at most 2 % if
    the share is 3.2 MB or more; the leaves that rank 0 writes must fit into its share for that. Of a leaf, at most one replica for each
    `UNIT_BYTES` writes something. If more than 64 have less than half a unit each, the first of them write it.

    Args:
        rank: the rank.
        world_size: the number of ranks.
        tensors: leaf path -> spec, the same on all ranks, without slices. A rule may be over some of the ranks: the others have none of it.
        item_bytes: the size of an element, by the name of its dtype.
        of_rank_zero: paths of leaves that rank 0 writes, because its value counts, or the first rank that has them. They are a part of its share. So
            are whole leaves without dimensions, such as the step of a parameter, so that a rank finds them in one place.
        prefers: how many replicas write: the first ones of those that there are. Then the laws are those of a world with so many replicas.

    Examples:
        >>> tensors = {name: LeafSpec("int8", (2,)) for name in "abcd"}
        >>> [[piece.path for piece in written_by(rank, 2, tensors, item_bytes=lambda _: 1)] for rank in range(2)]
        [['a', 'b'], ['c', 'd']]
        >>> tensors = {"w": LeafSpec("float32", (1000, 100))}
        >>> [piece.box for rank in range(2) for piece in written_by(rank, 2, tensors, item_bytes=lambda _: 4)]
        [((0, 500), (0, 100)), ((500, 1000), (0, 100))]
        >>> tensors = {"experts": LeafSpec("float32", (3, 1000, 100))}
        >>> [piece.box for piece in written_by(0, 2, tensors, item_bytes=lambda _: 4)]
        [((0, 1), (0, 1000), (0, 100)), ((1, 2), (0, 500), (0, 100))]
    """
    groups: dict[object, _Replicas] = {None: _Replicas(rank, world_size)}
    few = {id(spec): spec for spec in tensors.values()}  # there are many leaves, and few specs
    counts = Counter(map(id, tensors.values()))
    parts = {key: _part(spec, rank, world_size, groups, item_bytes) for key, spec in few.items()}
    chosen: dict[str, int] = {}
    for path in of_rank_zero:
        if path in tensors and (writer := _sole_writer(tensors[path])) is not None:
            chosen[path] = writer
    for key, part in parts.items():
        if part is not None:
            part.group.total_bytes += part.nbytes * counts[key]
            part.group.laid_bytes += part.nbytes * counts[key] if part.writer is not None else 0
    for path in chosen:
        if (part := parts[id(tensors[path])]) is not None and part.writer is None:
            part.group.laid_bytes += part.nbytes
    for group in groups.values():
        group.count = prefers.writers(group.count, group.total_bytes)
    return [*_pieces(rank, tensors, parts, chosen)]


def _pieces(
    rank: int, tensors: Mapping[str, LeafSpec], parts: "Mapping[int, _Part | None]", chosen: Mapping[str, int]
) -> Iterator[Piece]:
    """What the rank writes: ``chosen`` are leaves that one rank writes, each with that rank."""
    for path, spec in tensors.items():
        part = parts[id(spec)]
        if part is None:
            continue
        group, box, nbytes, writer, is_alone = part
        writer = chosen.get(path, writer)
        if writer is not None:
            if writer == rank:
                yield Piece(path, spec, box)
        elif is_alone or not nbytes:
            # of an empty leaf the first of the ranks has the record, and of an empty part of one no rank
            if is_alone or (group.index == 0 and not volume(whole_box(spec.shape))):
                yield Piece(path, spec, box)
        elif (run := group.next_run(nbytes, box)) is None:
            yield Piece(path, spec, box)
        elif run[0] < run[1]:
            for each in _boxes(*run, box):
                yield Piece(path, spec, each, box)


class _Part(NamedTuple):
    """What a rank holds of a leaf of some spec.

    Attributes:
        group: the ranks that hold the same.
        box: what it is.
        nbytes: its size.
        writer: the one of them that writes it, if it is a whole leaf without dimensions.
        is_alone: whether no other rank holds it, and there is something to write.
    """

    group: "_Replicas"
    box: Box
    nbytes: int
    writer: int | None
    is_alone: bool


def _part(
    spec: LeafSpec, rank: int, world_size: int, groups: dict[object, "_Replicas"], item_bytes: Callable[[str], int]
) -> _Part | None:
    """None if the rank has none of it."""
    found = _held(spec, rank, world_size, groups)
    if found is None:
        return None
    group, box = found
    nbytes = volume(box) * item_bytes(spec.dtype)
    writer = None if spec.shape else _sole_writer(spec)
    return _Part(group, box, nbytes, writer, group.count == 1 and nbytes > 0)


def _held(
    spec: LeafSpec, rank: int, world_size: int, groups: dict[object, "_Replicas"]
) -> "tuple[_Replicas, Box] | None":
    """The ranks that have the same box of a leaf as this one, and the box; None if this rank has none of it."""
    rule, box = spec.placement, whole_box(spec.shape)
    if rule is None and volume(box):
        return groups[None], box
    if rule is not None and rule.mesh.coordinate_of(rank) is None:
        return None
    if rule is None or not volume(box):
        # nothing to share: rank 0 writes its part, or the first rank of the mesh
        first = 0 if rule is None or rule.mesh.coordinate_of(0) is not None else rule.mesh.first
        return _Replicas(rank - first, world_size), box_of(spec, rank)
    local = _local(rule, rank)
    group = groups.setdefault((rule.mesh, rule.replica_axes), _Replicas(local.replica, local.replicas))
    return group, local.box(spec.shape)


def _sole_writer(spec: LeafSpec) -> int | None:
    """The rank that writes a leaf alone, if one is to; None for a leaf that is cut."""
    if spec.placement is None:
        return 0
    return None if spec.placement.cuts else spec.placement.mesh.first


@attrs.define
class _Replicas:
    """The ranks that hold the same boxes, while these are laid end to end; ``count`` are those that write."""

    index: int
    count: int
    total_bytes: int = 0
    laid_bytes: int = 0
    share: tuple[int, int] | None = None  # from place to place; found when all boxes are counted
    filled: int = 0  # the replica that the next box goes to, if it has room

    def next_run(self, nbytes: int, box: Box) -> tuple[int, int] | None:
        """The first element of the next box that this replica writes, and the end; they are equal for nothing. None for all of the box."""
        if self.count > _MANY and 2 * self.total_bytes <= (self.count - 1) * UNIT_BYTES:
            return self._next_filled(nbytes, box)
        start, self.laid_bytes = self.laid_bytes, self.laid_bytes + nbytes
        if self.share is None:
            self.share = self.total_bytes * self.index // self.count, self.total_bytes * (self.index + 1) // self.count
        low, high = self.share
        if low <= start and self.laid_bytes <= high:
            return None
        if high <= start or self.laid_bytes <= low:
            return 0, 0
        run = self._elements_before(low - start, nbytes, box), self._elements_before(high - start, nbytes, box)
        return None if run == (0, volume(box)) else run

    def _next_filled(self, nbytes: int, box: Box) -> tuple[int, int] | None:
        """The same where the replicas are filled one after the other: two neighbours have more than a unit, so there are enough of them."""
        units = -(-nbytes // UNIT_BYTES)
        if self.laid_bytes and (units > 1 or self.laid_bytes + nbytes > UNIT_BYTES):
            self.filled, self.laid_bytes = self.filled + 1, 0
        unit = self.index - self.filled
        self.filled += units - 1
        self.laid_bytes += -(-nbytes // units)
        if not 0 <= unit < units:
            return 0, 0
        return None if units == 1 else (unit * volume(box) // units, (unit + 1) * volume(box) // units)

    def _elements_before(self, offset: int, nbytes: int, box: Box) -> int:
        """How many elements of a box lie before a place, after it has moved."""
        offset = min(max(offset, 0), nbytes)
        if self.total_bytes < self.count * UNIT_BYTES:  # in the largest rows there may be more places than units
            units = -(-nbytes // UNIT_BYTES)
            return (2 * offset * units + nbytes) // (2 * nbytes) * volume(box) // units
        near = max(UNIT_BYTES, 2 * self.total_bytes // (_NEAR * self.count))
        rows = 1  # the box as one row; then its rows, and theirs, down to its elements
        for begin, end in (*box, (0, 1)):
            nearest = (2 * offset * rows + nbytes) // (2 * nbytes)
            if 2 * abs(nearest * nbytes - offset * rows) <= near * rows:
                break
            rows *= end - begin
        return nearest * volume(box) // rows


def _boxes(first: int, stop: int, box: Box) -> Iterator[Box]:
    """A run of elements of a box, as boxes."""
    for block in run_blocks(first, stop, tuple(end - begin for begin, end in box)):
        yield tuple((low + begin, high + begin) for (low, high), (begin, _) in zip(block, box, strict=True))


def _local(rule: Placement, rank: int) -> LocalPlacement:
    coordinate = rule.mesh.coordinate_of(rank)
    assert coordinate is not None, "a rule without slices is over all ranks of the save"
    return rule.at(coordinate)
