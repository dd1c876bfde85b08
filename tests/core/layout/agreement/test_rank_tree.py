"""Laws of the tree by which ranks agree."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.agreement.rank_tree import Branch, rank_tree

shapes = st.tuples(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9))


@given(shapes)
@example((1, 1, 1))
@example((300, 1, 1))
def test_each_rank_is_the_child_of_its_parent_and_speaks_for_consecutive_ranks(shape):
    """Whatever the shape, what ranks give is in rank order when each puts its own before that of its children."""
    size, node_ranks, fan_out = shape
    tree = rank_tree(size, node_ranks=node_ranks, fan_out=fan_out)
    places = list(tree.places())
    assert [place.rank for place in places] == list(range(size))
    assert places[0].parent is None
    assert places[0].branch == (0, size)
    for place in places:
        ends = [place.rank, place.rank + 1, *(child.stop for child in place.children)]
        assert [place.branch.start, *(child.start for child in place.children), place.branch.stop] == [
            *ends[:1],
            *ends[1:],
        ]
        for child in place.children:
            below = places[child.start]
            assert (below.parent, below.branch, below.level) == (place.rank, child, place.level + 1)
    assert sum(len(place.children) for place in places) == size - 1, "each rank but the first one is the child of one"


@given(shapes)
def test_no_rank_has_more_neighbours_than_its_node_and_the_fan_out_however_many_ranks_there_are(shape):
    size, node_ranks, fan_out = shape
    tree = rank_tree(size, node_ranks=node_ranks, fan_out=fan_out)
    nodes = -(-size // tree.node_ranks)
    assert tree.most_neighbours <= node_ranks - 1 + fan_out + 1
    of_leaders = nodes - 1 if fan_out == 1 else math.ceil(math.log(nodes, fan_out)) + 1
    assert tree.levels <= of_leaders + 1
    across = [place for place in tree.places() if place.parent is not None and place.parent // tree.node_ranks != place.rank // tree.node_ranks]  # fmt: skip
    assert len(across) == nodes - 1, "one edge leaves each node but the first one"


def test_a_tree_of_the_largest_runs_prints_what_it_is():
    tree = rank_tree(16_384)
    assert str(tree) == (
        "16384 ranks in 2048 nodes of 8, fan-out 8: 5 levels below rank 0, at most 16 neighbours of a rank"
    )
    assert tree.place(16_383).parent == 16_376
    assert tree.place(8).branch == Branch(8, 2048)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"node_ranks": 0}, {"fan_out": 0}])
def test_a_tree_of_nothing_is_refused(wrong):
    with pytest.raises(InvalidArgument, match="expected at least 1"):
        rank_tree(**{"size": 4, **wrong})
