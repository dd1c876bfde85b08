"""`Mesh`: ranks in a grid, as a rule and not as a list: the rank of a coordinate and the coordinate of a rank are computed."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument

Coordinate = tuple[int, ...]


@final
@attrs.frozen(cache_hash=True)
class Mesh:
    """Ranks in a grid. Make it with `make_mesh`; equal meshes are equal values.

    Attributes:
        shape: the number of ranks along each axis.
        first: the rank at the origin.
        strides: how far the ranks of neighbours are apart, for each axis; 0 for an axis of one rank.
        ranks: all ranks in row-major order, if no strides describe them; else None.
    """

    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]
    ranks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return _product(self.shape)

    def covers(self, world_size: int) -> bool:
        """Whether the ranks of the mesh are those of a world, each once.

        Examples:
            >>> make_mesh((2, 2)).covers(4), make_mesh((2, 2)).covers(8), make_mesh((2,), first=2).covers(2)
            (True, False, False)
        """
        last = max(self.ranks) if self.ranks else self.rank_at(tuple(size - 1 for size in self.shape))
        return self.size == world_size == last + 1

    def rank_at(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate.

        Raises:
            InvalidArgument: if the coordinate is outside the mesh.

        Examples:
            >>> make_mesh((2, 4)).rank_at((1, 2))
            6
        """
        check_coordinate(self, coordinate)
        if self.ranks is None:
            return self.first + sum(index * stride for index, stride in zip(coordinate, self.strides, strict=True))
        place = 0
        for index, size in zip(coordinate, self.shape, strict=True):
            place = place * size + index
        return self.ranks[place]

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """The coordinate of a rank, or None for a rank outside the mesh.

        Law: ``mesh.coordinate_of(mesh.rank_at(c)) == c``.

        Examples:
            >>> make_mesh((2, 4)).coordinate_of(6), make_mesh((2, 2), first=4).coordinate_of(3)
            ((1, 2), None)
        """
        if self.ranks is not None:
            return None if rank not in self.ranks else _unravel(self.ranks.index(rank), self.shape)
        found = [0] * len(self.shape)
        rest = rank - self.first
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis]:
                found[axis] = min(rest // self.strides[axis], self.shape[axis] - 1)
                rest -= found[axis] * self.strides[axis]
        return None if rest or min(found, default=0) < 0 else tuple(found)


def make_mesh(
    shape: Sequence[int],
    *,
    first: int = 0,
    strides: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> Mesh:
    """Return a checked mesh.

    Args:
        shape: the number of ranks along each axis, each >= 1; empty for one rank.
        first: the rank at the origin.
        strides: how far the ranks of neighbours are apart, for each axis; None for row-major order without gaps. A larger stride steps over
            everything that the smaller ones reach.
        ranks: all ranks in row-major order, in place of ``first`` and ``strides``.

    Raises:
        InvalidArgument: for a size below 1, a negative or repeated rank, or lengths that do not fit.

    Examples:
        >>> make_mesh((2, 2), ranks=[0, 2, 4, 6])
        Mesh(shape=(2, 2), first=0, strides=(4, 2), ranks=None)
        >>> make_mesh((2, 2), ranks=[0, 1, 3, 2]).ranks
        (0, 1, 3, 2)
    """
    shape = tuple(shape)
    if any(size < 1 for size in shape) or first < 0:
        raise _bad(f"shape {shape}, first rank {first}", "at least one rank along each axis, and ranks from 0")
    if ranks is not None:
        return _of_ranks(shape, tuple(ranks))
    steps = _row_major(shape) if strides is None else tuple(strides)
    if len(steps) != len(shape):
        raise _bad(f"strides {steps} for shape {shape}", "one stride for each axis")
    mesh = Mesh(shape, first, tuple(step if size > 1 else 0 for step, size in zip(steps, shape, strict=True)))
    if not _nested(mesh):
        raise _bad(
            f"strides {steps} for shape {shape}", "strides that reach each rank once; list other ranks in ranks="
        )
    return mesh


def check_coordinate(mesh: Mesh, coordinate: Coordinate) -> None:
    """Check that a coordinate lies in a mesh.

    Raises:
        InvalidArgument: if it does not.
    """
    inside = len(coordinate) == len(mesh.shape) and all(
        0 <= index < size for index, size in zip(coordinate, mesh.shape, strict=True)
    )
    if not inside:
        raise InvalidArgument(
            "coordinate",
            expected=f"an index below each of {mesh.shape}",
            found=coordinate,
            fix="count from 0 along each axis",
        )


def _of_ranks(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
    """The mesh of listed ranks: strides if some describe them, else the list."""
    if len(ranks) != _product(shape) or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise _bad(f"{len(ranks)} ranks, {len(set(ranks))} different, for shape {shape}", "each rank once, from 0")
    inner = _row_major(shape)
    strides = tuple(ranks[step] - ranks[0] if size > 1 else 0 for step, size in zip(inner, shape, strict=True))
    mesh = Mesh(shape, ranks[0], strides)
    if _nested(mesh) and all(mesh.rank_at(_unravel(place, shape)) == rank for place, rank in enumerate(ranks)):
        return mesh
    return Mesh(shape, ranks[0], (0,) * len(shape), ranks)


def _nested(mesh: Mesh) -> bool:
    """Whether each stride steps over all that the smaller ones reach, so that a rank has one coordinate."""
    reach = 0
    for stride, size in sorted(zip(mesh.strides, mesh.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_product(shape[axis + 1 :]) for axis in range(len(shape)))


def _unravel(place: int, shape: tuple[int, ...]) -> Coordinate:
    found = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _bad(found: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        "mesh", expected=expected, found=found, fix="pass the shape and the ranks of the device mesh"
    )
