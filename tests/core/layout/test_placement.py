"""Placements: boxes equal those of torch's own rule and tile the tensor; replicas, and no other ranks, have the same box."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as of_torch
from torch.distributed.tensor.placement_types import _StridedShard

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout import placement as module
from trainfold.core.layout.mesh import Mesh, make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.slices import check_cover, intersect, volume

MESH_SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 13), max_size=3).map(tuple)


@st.composite
def placed(draw):
    """A placement, and the shape of a tensor that it can cut."""
    mesh, shape = make_mesh(draw(MESH_SHAPES)), draw(SHAPES)
    cuts = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh.shape)))):
        if (dim := draw(st.integers(-1, len(shape) - 1))) >= 0:
            cuts[dim].append(axis)
    return make_placement(mesh, cuts), shape


def coordinates(mesh):
    return list(itertools.product(*map(range, mesh.shape)))


@given(placed())
def test_the_boxes_of_all_ranks_tile_a_tensor_and_each_is_held_by_exactly_the_replicas(case):
    placement, shape = case
    holders = {}
    for coordinate in coordinates(placement.mesh):
        box = placement.box(shape, coordinate)
        if volume(box) or not math.prod(shape):
            holders.setdefault(box, []).append(placement.at(coordinate))
    if math.prod(shape):
        check_cover("w", list(holders), shape)
        for found in holders.values():
            assert sorted(each.replica for each in found) == list(range(found[0].replicas))


@given(placed(), st.data())
def test_the_ranks_that_meet_a_box_are_those_whose_boxes_do(case, data):
    """X12: a rank finds those whose indexes it opens without a step for each rank."""
    placement, shape = case
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    box = tuple((low, high) for low, high in ends)
    mesh = placement.mesh
    wanted = [at for at in coordinates(mesh) if intersect(placement.box(shape, at), box) is not None]
    found = list(placement.ranks_meeting(box, shape))
    assert sorted(found) == sorted(mesh.rank_at(at) for at in wanted), "each once"


def test_finding_them_takes_as_many_steps_in_a_mesh_of_any_size(monkeypatch):
    """X12."""
    steps, meeting, rank_at = [], module._meeting, Mesh.rank_at
    monkeypatch.setattr(module, "_meeting", lambda *args: (steps.append("chunks"), meeting(*args))[1])
    monkeypatch.setattr(Mesh, "rank_at", lambda *args: (steps.append("rank"), rank_at(*args))[1])
    counts = []
    for parts in (8, 4096):
        rule = make_placement(make_mesh((parts, 3)), [[0]])
        assert len(list(rule.ranks_meeting(((3, 9),), (2 * parts,)))) == 4 * 3
        counts.append((steps.count("chunks"), steps.count("rank")))
        steps.clear()
    assert counts[0] == counts[1]
    assert counts[0][1] == 12


@given(placed())
def test_cuts_from_the_outer_axis_to_the_inner_one_are_those_of_shard(case):
    placement, shape = case
    inwards = make_placement(placement.mesh, [sorted(axes) for axes in placement.cuts])
    dims = {axis: dim for dim, axes in enumerate(inwards.cuts) for axis in axes}
    torchs = [Shard(dims[axis]) if axis in dims else Replicate() for axis in range(len(placement.mesh.shape))]
    for coordinate in coordinates(placement.mesh):
        sizes, starts = of_torch(shape, placement.mesh.shape, list(coordinate), torchs)
        box = inwards.box(shape, coordinate)
        assert tuple(stop - start for start, stop in box) == tuple(sizes)
        if math.prod(sizes):
            assert tuple(start for start, _ in box) == tuple(starts)


@given(size=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(1, 5))
def test_an_axis_that_cuts_later_chunks_the_chunks_of_an_earlier_one(size, outer, inner):
    """FSDP2 shards what tensor parallelism has sharded: the inner axis of the mesh cuts first."""
    mesh = make_mesh((outer, inner))
    for at_outer, at_inner in coordinates(mesh):
        held = chunk(chunk(torch.arange(size), inner, at_inner), outer, at_outer)
        ((start, stop),) = make_placement(mesh, [[1, 0]]).box((size,), (at_outer, at_inner))
        assert list(range(start, stop)) == held.tolist()


def chunk(values, parts, index):
    found = values.chunk(parts) if len(values) else ()
    return found[index] if index < len(found) else values[:0]


@given(rows=st.integers(0, 4), outer=st.integers(1, 5), inner=st.integers(1, 5), replicas=st.integers(1, 2))
def test_even_strided_shards_are_those_of_torch(rows, outer, inner, replicas):
    """For uneven ones torch's function says other rows than a rank holds; the tests of DTensors have such."""
    size, mesh = rows * outer * inner, make_mesh((replicas, outer, inner))
    torchs = [Replicate(), _StridedShard(0, split_factor=inner), Shard(0)]
    for coordinate in coordinates(mesh):
        (length,), (first,) = of_torch((size,), mesh.shape, list(coordinate), torchs)
        ((start, stop),) = make_placement(mesh, [[2, 1]]).box((size,), coordinate)
        assert stop - start == length
        assert start == first or not length


@given(shape=MESH_SHAPES, first=st.integers(0, 9), data=st.data())
def test_each_rank_of_a_mesh_has_one_coordinate_whether_listed_or_computed(shape, first, data):
    order = data.draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), data.draw(st.integers(1, 3))
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    mesh = make_mesh(shape, first=first, strides=strides)
    ranks = [mesh.rank_at(coordinate) for coordinate in coordinates(mesh)]
    assert len(set(ranks)) == mesh.size
    assert [mesh.coordinate_of(rank) for rank in ranks] == coordinates(mesh)
    assert [mesh.coordinate_of(rank) for rank in range(max(ranks) + 2) if rank not in ranks] == [None] * (
        max(ranks) + 2 - len(ranks)
    )
    assert make_mesh(shape, ranks=ranks) == mesh
    shuffled = data.draw(st.permutations(ranks))
    listed = make_mesh(shape, ranks=shuffled)
    assert [listed.rank_at(coordinate) for coordinate in coordinates(listed)] == shuffled
    assert [listed.coordinate_of(rank) for rank in shuffled] == coordinates(listed)


def test_tensors_of_any_number_of_dimensions_share_a_placement():
    placement = make_placement(make_mesh((2,)), [[0], [], []])
    assert placement == make_placement(make_mesh((2,)), [[0]])
    assert placement.box((4,), (1,)) == ((2, 4),)
    assert placement.box((4, 3, 2), (0,)) == ((0, 2), (0, 3), (0, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_mesh((0,)),
        lambda: make_mesh((2,), first=-1),
        lambda: make_mesh((2, 2), strides=(1,)),
        lambda: make_mesh((2, 2), strides=(1, 1)),
        lambda: make_mesh((3, 2), strides=(1, 2)),
        lambda: make_mesh((2,), ranks=[1, 1]),
        lambda: make_mesh((2,), ranks=[0, 1, 2]),
        lambda: make_mesh((2,), ranks=[0, -1]),
        lambda: make_mesh((2,)).rank_at((2,)),
        lambda: make_placement(make_mesh((2,)), [[0], [0]]),
        lambda: make_placement(make_mesh((2,)), [[1]]),
        lambda: make_placement(make_mesh((2,)), [[0]]).box((), (0,)),
        lambda: make_placement(make_mesh((2,)), [[0]]).box((4,), (2,)),
        lambda: make_placement(make_mesh((2,)), [[0]]).box((4,), (0, 0)),
    ],
)
def test_what_is_no_mesh_or_no_placement_is_refused(make):
    with pytest.raises(InvalidArgument):
        make()
