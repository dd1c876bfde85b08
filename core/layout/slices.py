"""Boxes: rectangular slices of a tensor, one (start, stop) pair per dimension, and whether boxes tile a shape."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import groupby, pairwise, product
from math import prod
from operator import itemgetter
from typing import Final, TypeAlias

from trainfold.core.errors import InvalidState

Box: TypeAlias = tuple[tuple[int, int], ...]

_CORNERS: Final = 64  # of a box that are counted: as many as one has that is cut along 6 dimensions
_PLANE: Final = 2
_COMPARED: Final = 1000  # boxes that are compared with each other, so that an error says more


@lru_cache(maxsize=4096)
def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a shape.

    Examples:
        >>> whole_box((3, 2))
        ((0, 3), (0, 2))
    """
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Return the number of elements of a box; 1 for the box of a scalar.

    Examples:
        >>> volume(((0, 3), (4, 6))), volume(())
        (6, 1)
    """
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


def row_blocks(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many bytes, in the order of its bytes; an element is never cut.

    Examples:
        >>> list(row_blocks(((0, 3), (4, 6)), 1, 4))
        [((0, 2), (4, 6)), ((2, 3), (4, 6))]
        >>> list(row_blocks(((0, 2), (0, 3)), 8, 16))
        [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    if not box or volume(box) * item_bytes <= limit_bytes:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    row_bytes = volume(inner) * item_bytes
    step = max(1, limit_bytes // row_bytes)
    for low in range(start, stop, step):
        side = (low, min(low + step, stop))
        if row_bytes <= limit_bytes or not inner:
            yield (side, *inner)
        else:
            yield from ((side, *rest) for rest in row_blocks(inner, item_bytes, limit_bytes))


def run_blocks(first: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut a run of elements into boxes, in the order of the elements: a box of whole rows, and what is before and after it.

    Law: the boxes hold the elements of the run, each once and in their order. There are at most 2 * len(shape) of them.

    Args:
        first: the first element, counted row by row.
        stop: one past the last.
        shape: of the tensor.

    Examples:
        >>> list(run_blocks(2, 7, (3, 3)))
        [((0, 1), (2, 3)), ((1, 2), (0, 3)), ((2, 3), (0, 1))]
    """
    if len(shape) <= 1:
        if first < stop:
            yield ((first, stop),) if shape else ()
        return
    row = volume(whole_box(shape[1:]))
    if first < stop and first % row:
        index = first // row
        last = min(stop, (index + 1) * row)
        for block in run_blocks(first - index * row, last - index * row, shape[1:]):
            yield ((index, index + 1), *block)
        first = last
    if first < stop // row * row:
        yield ((first // row, stop // row), *whole_box(shape[1:]))
        first = stop // row * row
    if first < stop:
        for block in run_blocks(0, stop - first, shape[1:]):
            yield ((first // row, first // row + 1), *block)


def intersect(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty.

    Examples:
        >>> intersect(((0, 4), (0, 2)), ((2, 6), (0, 2)))
        ((2, 4), (0, 2))
    """
    common = []
    for (low, high), (begin, end) in zip(one, other, strict=True):  # a load does this for each shard that it knows
        start, stop = max(low, begin), min(high, end)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes have an element in common; empty boxes are ignored.

    Boxes that are cut along one or two dimensions, as nearly all are, cost about one comparison each. Others are compared with those that they meet along the
    dimension with the most cuts: of a grid of n boxes, each with those of one row.

    Examples:
        >>> overlap([((0, 2),), ((2, 3),)]), overlap([((0, 2),), ((1, 3),)])
        (False, True)
    """
    filled = [box for box in boxes if volume(box)]
    if len(filled) <= 1:
        return False
    cut = [axis for axis, side in enumerate(filled[0]) if any(box[axis] != side for box in filled)]
    if not cut:
        return True
    if len(cut) <= _PLANE:
        return _overlap_in_plane([(box[cut[0]], box[cut[-1]]) for box in filled])
    most = max(cut, key=lambda axis: len({box[axis][0] for box in filled}))
    open_boxes: list[Box] = []
    for box in sorted(filled, key=lambda box: box[most][0]):
        open_boxes = [other for other in open_boxes if other[most][1] > box[most][0]]
        if any(intersect(box, other) is not None for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _overlap_in_plane(boxes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    """Whether two boxes have a point in common. Those that a line meets are disjoint along it until one overlaps, so a new one is compared with its two neighbours there."""
    met: list[tuple[int, int]] = []  # along the line, in order
    ends: list[tuple[int, int]] = []  # where the line leaves a box, and where that begins along the line
    for (low, high), (start, stop) in sorted(boxes):
        while ends and ends[0][0] <= low:
            del met[bisect_left(met, (heappop(ends)[1],))]
        at = bisect_left(met, (start,))
        if (at < len(met) and met[at][0] < stop) or (at and met[at - 1][1] > start):
            return True
        met.insert(at, (start, stop))
        heappush(ends, (high, start))
    return False


def check_cover(path: str, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
    """Check that boxes tile a shape: that they are disjoint and cover it.

    Raises:
        InvalidState: naming the leaf, with the number of elements covered and whether slices overlap.

    Examples:
        >>> check_cover("w", [((0, 2),), ((2, 3),)], (3,))
    """
    sizes = list(map(volume, boxes))
    filled = boxes if 0 not in sizes else [box for box, size in zip(boxes, sizes, strict=True) if size]
    covered, whole = sum(sizes), volume(whole_box(shape))
    if boxes and covered == whole and (not filled or _tile(filled, shape)):
        return
    twice = covered >= whole or (len(filled) <= _COMPARED and overlap(filled))
    raise InvalidState(
        path,
        expected=f"slices that cover {list(shape)} once",
        found=f"{len(boxes)} slices with {covered} of {whole} elements{', overlapping' if twice and filled else ''}",
        fix="give each rank its own slice of the global tensor",
    )


def _tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes with as many elements as a shape are disjoint parts of it. No box is compared with each other one, whatever a file says of them.

    How many boxes are at a point is a function that changes at the corners of the boxes alone. It is that of the shape if the changes are. So the
    corners are counted, with signs: inside, those of neighbours cancel out. Of more than 1,000 boxes that are cut along more than 6 dimensions, as no
    program makes them, it says no.
    """
    cut = [axis for axis, size in enumerate(shape) if any(box[axis] != (0, size) for box in boxes)]
    if len(cut) == 1:  # nearly always
        sides = sorted([box[cut[0]] for box in boxes])
        return sides[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(sides))
    if 2 ** len(cut) > _CORNERS:
        return len(boxes) <= _COMPARED and not overlap(boxes)
    corners = [
        (tuple([side[0] for side in corner]), prod([side[1] for side in corner]) * sign)
        for box, sign in (*((box, 1) for box in boxes), (whole_box(shape), -1))
        for corner in product(*[((box[axis][0], 1), (box[axis][1], -1)) for axis in cut])
    ]
    corners.sort()  # and no dict: the writer of a file can choose numbers that all have one hash
    return all(not sum(sign for _, sign in same) for _, same in groupby(corners, key=itemgetter(0)))
