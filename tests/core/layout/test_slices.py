"""Boxes: intersections and overlaps equal those of their points; many slices take about one comparison each."""

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
