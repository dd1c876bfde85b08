"""`Placement`: which box of a tensor each rank of a mesh holds. The rule is stored; boxes are computed, never listed.

Each dimension of a tensor is cut along axes of the mesh, one after the other, outermost first, by torch's chunk rule: equal parts of
``ceil(n / parts)``, of which the last may be shorter and later ones empty. `FSDP2` under tensor parallelism cuts along the inner axis
of the mesh first, so its placement is an order of axes. Ranks that differ only along axes that cut nothing are replicas.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.mesh import Coordinate, Mesh, check_coordinate, make_mesh
from trainfold.core.layout.slices import Box


@final
@attrs.frozen(cache_hash=True)
class Placement:
    """How a tensor lies on the ranks of a mesh. Make it with `make_placement`; equal placements are equal values.

    Attributes:
        mesh: the ranks.
        cuts: for each dimension of the tensor the axes of the mesh that cut it, outermost first; dimensions at the end that are not cut are
            left out, so that tensors with different numbers of dimensions share a placement.
    """

    mesh: Mesh
    cuts: tuple[tuple[int, ...], ...]

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The axes that cut nothing."""
        cutting = {axis for axes in self.cuts for axis in axes}
        return tuple(axis for axis in range(len(self.mesh.shape)) if axis not in cutting)

    @property
    def row(self) -> list[Any]:
        """The placement as plain values, which `placement_of` reads: shape, first, strides and ranks of the mesh, and the cuts."""
        mesh = self.mesh
        return [mesh.shape, mesh.first, mesh.strides, mesh.ranks, self.cuts]

    def at(self, coordinate: Coordinate) -> "LocalPlacement":
        """What the rank at a coordinate needs to know of the placement.

        Raises:
            InvalidArgument: if the coordinate is outside the mesh.
        """
        check_coordinate(self.mesh, coordinate)
        chunks = tuple(tuple((self.mesh.shape[axis], coordinate[axis]) for axis in axes) for axes in self.cuts)
        replica, replicas = 0, 1
        for axis in self.replica_axes:
            replica = replica * self.mesh.shape[axis] + coordinate[axis]
            replicas *= self.mesh.shape[axis]
        return LocalPlacement(chunks, replica, replicas)

    def box(self, shape: Sequence[int], coordinate: Coordinate) -> Box:
        """The part of a tensor that the rank at a coordinate holds.

        Laws: the boxes of all coordinates tile the shape, and every replica has its box and no other rank has it, unless it is empty.

        Args:
            shape: the shape of the tensor.
            coordinate: of the rank, in the mesh.

        Returns:
            One (start, stop) pair for each dimension; empty parts begin and end at the end of what is cut.

        Raises:
            InvalidArgument: if the tensor has fewer dimensions than are cut, or the coordinate is outside the mesh.

        Examples:
            >>> from trainfold.core.layout.mesh import make_mesh
            >>> fsdp = make_placement(make_mesh((4,)), [[0]])
            >>> [fsdp.box((6, 2), (i,)) for i in range(4)]
            [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 6), (0, 2)), ((6, 6), (0, 2))]
        """
        return self.at(coordinate).box(tuple(shape))

    def ranks_meeting(self, box: Box, shape: tuple[int, ...]) -> Iterator[int]:
        """The ranks whose boxes have an element in common with a box, in as many steps as there are such ranks, and not as there are ranks.

        Law: they are the ranks of the coordinates at which `intersect` of that box and of `Placement.box` is not None.

        Args:
            box: one (start, stop) pair for each dimension.
            shape: of the tensor.

        Examples:
            >>> from trainfold.core.layout.mesh import make_mesh
            >>> rule = make_placement(make_mesh((2, 4)), [[1]])
            >>> sorted(rule.ranks_meeting(((1, 4), (0, 2)), (6, 2)))
            [0, 1, 4, 5]
        """
        if any(max(low, 0) >= min(high, size) for (low, high), size in zip(box, shape, strict=True)):
            return
        sizes = self.mesh.shape
        cut = [
            tuple(_meeting(0, size, side, [sizes[axis] for axis in axes]))
            for axes, size, side in zip(self.cuts, shape, box, strict=False)
        ]
        copied = [[(index,) for index in range(sizes[axis])] for axis in self.replica_axes]
        order = [*chain.from_iterable(self.cuts), *self.replica_axes]
        for found in product(*cut, *copied):
            at = dict(zip(order, chain.from_iterable(found), strict=True))
            yield self.mesh.rank_at(tuple(at[axis] for axis in range(len(sizes))))


@final
@attrs.frozen
class LocalPlacement:
    """A placement as one rank sees it.

    Attributes:
        chunks: for each dimension (parts, index) pairs, outermost first.
        replica: which of the ranks that hold the same boxes this one is.
        replicas: how many ranks hold the same boxes.
    """

    chunks: tuple[tuple[tuple[int, int], ...], ...]
    replica: int
    replicas: int

    def box(self, shape: tuple[int, ...]) -> Box:
        """The part of a tensor that this rank holds; see `Placement.box`.

        Raises:
            InvalidArgument: if the tensor has fewer dimensions than are cut.
        """
        if len(self.chunks) > len(shape):
            raise InvalidArgument(
                "placement", expected=f"a tensor of at least {len(self.chunks)} dimensions", found=f"the shape {list(shape)}",
                fix="cut only dimensions that the tensor has",
            )  # fmt: skip
        cut = [_chunk(size, pairs) for size, pairs in zip(shape, self.chunks, strict=False)]
        return (*cut, *((0, size) for size in shape[len(cut) :]))


def make_placement(mesh: Mesh, cuts: Sequence[Sequence[int]]) -> Placement:
    """Return a checked placement.

    Args:
        mesh: the ranks.
        cuts: for each dimension of the tensor the axes of the mesh that cut it, outermost first. Axes in no dimension hold replicas.

    Raises:
        InvalidArgument: for an axis that the mesh lacks, or that cuts twice.

    Examples:
        >>> from trainfold.core.layout.mesh import make_mesh
        >>> hsdp = make_placement(make_mesh((2, 4)), [[1], []])
        >>> hsdp.cuts, hsdp.replica_axes
        (((1,),), (0,))
    """
    found = [tuple(axes) for axes in cuts]
    used = [axis for axes in found for axis in axes]
    if len(set(used)) != len(used) or any(not 0 <= axis < len(mesh.shape) for axis in used):
        raise InvalidArgument(
            "cuts", expected=f"axes of a mesh of shape {mesh.shape}, each once", found=found,
            fix="name each axis of the mesh in at most one dimension, counted from 0",
        )  # fmt: skip
    while found and not found[-1]:
        found.pop()
    return Placement(mesh, tuple(found))


def placement_of(row: Sequence[Any]) -> Placement:
    """The placement whose `Placement.row` is given.

    Raises:
        InvalidArgument: if the values make no mesh, or no placement on it.

    Examples:
        >>> from trainfold.core.layout.mesh import make_mesh
        >>> rule = make_placement(make_mesh((2, 2), ranks=[0, 1, 3, 2]), [[1]])
        >>> placement_of(rule.row) == rule
        True
    """
    shape, first, strides, ranks, cuts = row
    mesh = make_mesh(shape, first=first, **({"strides": strides} if ranks is None else {"ranks": ranks}))
    return make_placement(mesh, cuts)


def _meeting(start: int, stop: int, side: tuple[int, int], parts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices, outermost first, of the chunks of a dimension that have something in common with one side of a box."""
    if not parts:
        yield ()
        return
    length = -(-(stop - start) // parts[0])
    low, high = max(start, side[0]), min(stop, side[1])
    for index in range((low - start) // length, -(-(high - start) // length)) if low < high else ():
        first = start + index * length
        for rest in _meeting(first, min(first + length, stop), side, parts[1:]):
            yield (index, *rest)


def _chunk(size: int, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    start, stop = 0, size
    for parts, index in pairs:
        length = -(-(stop - start) // parts)
        low = min(start + index * length, stop)
        start, stop = low, min(low + length, stop)
    return start, stop
