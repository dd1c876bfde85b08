"""Boxes: intersections and overlaps equal those of their points; many slices take about one comparison each."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidState
from trainfold.core.layout import slices as boxes
from trainfold.core.layout.slices import check_cover, intersect, overlap, volume

INTERVAL = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))


def boxes_of(dims):
    return st.tuples(*[INTERVAL] * dims)


def points_of(box):
    points = {()}
    for start, stop in box:
        points = {(*point, i) for point in points for i in range(start, stop)}
    return points


@given(boxes_of(2), boxes_of(2))
def test_the_common_part_of_two_boxes_is_their_common_points(one, other):
    common = intersect(one, other)
    assert (points_of(common) if common else set()) == points_of(one) & points_of(other)


@given(st.integers(0, 3).flatmap(lambda dims: st.lists(boxes_of(dims), max_size=6)))
def test_boxes_overlap_if_and_only_if_a_point_is_in_two(held):
    assert overlap(held) == (len(set().union(*map(points_of, held))) < sum(map(volume, held)))


@given(st.integers(0, 6), st.integers(1, 4))
def test_even_rows_cover_a_tensor(rows, parts):
    cuts = torch.arange(rows).tensor_split(parts)
    held = [((int(cut[0]), int(cut[-1]) + 1), (0, 3)) for cut in cuts if len(cut)] or [((0, 0), (0, 3))]
    check_cover("w", held, (rows, 3))


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([((0, 2),)], "2 of 3 elements"),
        ([((0, 2),), ((1, 2),)], "overlapping"),
        ([((0, 2),), ((1, 3),)], "overlapping"),
        ([], "0 slices"),
    ],
)
def test_a_hole_and_an_overlap_are_named(held, said):
    with pytest.raises(InvalidState, match=said):
        check_cover("w", held, (3,))


@pytest.mark.parametrize("grid", [(4096, 1), (1, 4096), (64, 64)])
def test_thousands_of_ranks_are_not_compared_each_with_each(grid, monkeypatch):
    """Comparisons are counted: slices along one dimension need one each, slices of a grid one per box of a row."""
    rows, columns = grid
    held = [((i, i + 1), (j, j + 1)) for i in range(rows) for j in range(columns)]
    calls = []
    monkeypatch.setattr(boxes, "intersect", lambda one, other: calls.append(1))
    check_cover("w", held, grid)
    assert len(calls) <= len(held) * min(grid)


@st.composite
def cut_up(draw, dims):
    """Boxes that tile a shape, cut again and again; and perhaps one of them in another place, or twice in the place of another one."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
    held = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6)) if dims else 0):
        box = held.pop(draw(st.integers(0, len(held) - 1)))
        axis = draw(st.integers(0, dims - 1))
        at = draw(st.integers(*box[axis]))
        start, stop = box[axis]
        held += [(*box[:axis], side, *box[axis + 1 :]) for side in ((start, at), (at, stop))]
    if dims and draw(st.booleans()):
        number, axis = draw(st.integers(0, len(held) - 1)), draw(st.integers(0, dims - 1))
        by = draw(st.integers(-1, 1))
        box = held[draw(st.integers(0, len(held) - 1))]
        start, stop = box[axis]
        if start + by >= 0 and stop + by <= shape[axis]:
            held[number] = (*box[:axis], (start + by, stop + by), *box[axis + 1 :])
    return shape, held


@given(st.integers(0, 3).flatmap(cut_up), st.sampled_from([1, 4, 64]))
def test_boxes_cover_a_shape_if_and_only_if_each_point_is_in_one(case, corners):
    """Whether corners are counted, or boxes are compared."""
    shape, held = case
    points = [point for box in held for point in points_of(box)]
    is_tiled = sorted(points) == sorted(points_of(tuple((0, size) for size in shape)))
    with pytest.MonkeyPatch.context() as patched, nullcontext() if is_tiled else pytest.raises(InvalidState):
        patched.setattr(boxes, "_CORNERS", corners)
        check_cover("w", held, shape)


def test_strips_in_two_directions_are_not_compared_each_with_each(monkeypatch):
    """U02: as a hostile file may have them; 100,000 took minutes."""
    n = 500
    held = [((0, n), (i, i + 1)) for i in range(n)] + [((i, i + 1), (n, 2 * n)) for i in range(n)]
    calls = []
    monkeypatch.setattr(boxes, "intersect", lambda one, other: calls.append(1))
    check_cover("w", held, (n, 2 * n))
    assert not calls


@pytest.mark.parametrize("dims", [2, 3])
def test_strips_in_two_directions_with_a_hole_are_not_compared_each_with_each(dims, monkeypatch):
    """U02: of the files that a rank has opened, so that the rest of the tensor is missing: a hostile manifest of 100,000 strips took hours."""
    n = 500
    held = [((0, n), (i, i + 1)) for i in range(n)] + [((i, i + 1), (n, 2 * n)) for i in range(1, n)]
    held = [((3, 5), *box)[-dims:] for box in held]
    calls = []
    compare = boxes.intersect
    monkeypatch.setattr(boxes, "intersect", lambda one, other: calls.append(1) or compare(one, other))
    assert not overlap(held)
    for twice in (held[7], held[-7]):
        assert overlap([*held, twice])
    assert overlap([*held, (*held[0][:-2], (n - 1, n), (n - 1, n + 1))])
    assert len(calls) <= 4 * len(held)
