"""Each element of a box comes from one rank that has it, and from the lowest one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.slices import whole_box
from trainfold.core.weights.holders import Holders


def cells(box):
    """Every element of a box."""
    found = [()]
    for start, stop in box:
        found = [(*each, index) for each in found for index in range(start, stop)]
    return found


@st.composite
def cut_tensors(draw):
    """A shape, a rule that cuts it, and a box of it."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (3, 2)]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    axes, cuts = list(range(len(sizes))), [[] for _ in shape]
    for axis in draw(st.permutations(axes)):
        where = draw(st.integers(-1, len(shape) - 1))
        if where >= 0:
            cuts[where].append(axis)
    sides = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, make_placement(make_mesh(sizes), cuts), tuple(map(tuple, sides))


@given(cut_tensors(), st.booleans())
def test_the_parts_of_a_box_are_its_elements_once_each_from_the_lowest_rank_that_has_it(given_, is_listed):
    """By a rule, and by the slices that follow from it."""
    shape, rule, box = given_
    ranks = range(rule.mesh.size)
    boxes = [rule.box(shape, rule.mesh.coordinate_of(rank)) for rank in ranks]
    lowest = {cell: rank for rank in reversed(ranks) for cell in cells(boxes[rank])}
    specs = ({"w": LeafSpec("int8", shape, placement=rule)},) * len(ranks)
    if is_listed:
        specs = tuple({"w": LeafSpec("int8", shape, (each,))} for each in boxes)
    found = Holders(specs).parts("w", box)
    assert sum(len(cells(part)) for _, part in found) == len(cells(box))
    assert {cell: rank for rank, part in found for cell in cells(part)} == {cell: lowest[cell] for cell in cells(box)}


def test_slices_that_do_not_tile_their_tensor_are_refused_by_name():
    """Otherwise what no rank has would be what was in the memory before."""
    boxes = [((0, 2),), ((1, 4),)]
    with pytest.raises(InvalidState, match=r"w: expected slices that cover \[4\] once"):
        Holders(tuple({"w": LeafSpec("int8", (4,), (box,))} for box in boxes)).check()
    whole = {"w": LeafSpec("int8", (4,))}
    Holders((whole, whole)).check()
    assert Holders((whole, {"w": LeafSpec("int8", (4,))})).parts("w", whole_box((4,))) == [(0, ((0, 4),))]
