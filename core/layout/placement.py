"""`Placement`: which box of a tensor each rank of a mesh holds. The rule is stored; boxes are computed, never listed.

Each dimension of a tensor is cut along axes of the mesh, one after the other, outermost first, by torch's chunk rule: equal parts of
``ceil(n / parts)``, of which the last may be shorter and later ones empty. `FSDP2` under tensor parallelism cuts along the inner axis
of the mesh first, so its placement is an order of axes. Ranks that differ only along axes that cut nothing are replicas.
"""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.mesh import Coordinate, Mesh, check_coordinate
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


def _chunk(size: int, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    start, stop = 0, size
    for parts, index in pairs:
        length = -(-(stop - start) // parts)
        low = min(start + index * length, stop)
        start, stop = low, min(low + length, stop)
    return start, stop
