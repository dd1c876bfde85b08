"""What one rank plans for itself is what the plan of all ranks says of it, and all of it tiles every tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.outline import (
    Announcement,
    announcement_of,
    by_rule,
    described_by,
    outline_of,
    own_components,
    told_by,
    unequal,
)
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.replica_shares import UNIT_BYTES
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import check_cover, volume
from trainfold.core.layout.world import World
from trainfold.core.save.save_plan import plan_save

MESHES = st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (2, 1, 2)])
SHAPES = st.one_of(
    st.lists(st.integers(0, 9), max_size=3), st.just([300, 200]), st.just([1, 70_000]), st.just([3, 60_000])
).map(tuple)


@st.composite
def worlds(draw):
    """A mesh of all ranks, and leaves that are whole, cut by a rule, or cut in a way of their own: name -> (shape, dtype, placement)."""
    mesh = make_mesh(draw(MESHES))
    leaves = {}
    for index in range(draw(st.integers(1, 7))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from(["float32", "uint8", "bfloat16"]))
        cuts = [[] for _ in shape]
        for axis in draw(st.permutations(range(len(mesh.shape)))) if shape else ():
            if (dim := draw(st.integers(-1, len(shape) - 1))) >= 0:
                cuts[dim].append(axis)
        kind = draw(st.sampled_from(["whole", "rule", "listed"]))
        leaves[f"w{index}"] = shape, dtype, make_placement(mesh, cuts), kind
    return mesh, leaves


def of_rank(mesh, leaves, rank):
    """What `describe` and `by_rule` make of the leaves of a rank."""
    specs = {}
    for name, (shape, dtype, rule, kind) in leaves.items():
        box = rule.box(shape, mesh.coordinate_of(rank))
        specs[name] = (
            LeafSpec(dtype, shape)
            if kind == "whole"
            else LeafSpec(dtype, shape, (box,), rule if kind == "rule" else None)
        )
    node = {"dict": {name: {"t": index} for index, name in enumerate(leaves)}}
    return by_rule(Described(node, specs), World(rank, mesh.size))


@settings(deadline=None)
@given(worlds())
def test_a_rank_plans_for_itself_what_all_ranks_plan_for_it_and_each_element_is_written_once(case):
    """X02: each rank computes its own part, and the bytes of all. X01: boxes are computed by the rule, and listed only for leaves that follow none."""
    mesh, leaves = case
    ranks = [{"model": of_rank(mesh, leaves, rank)} for rank in range(mesh.size)]
    if all(each == ranks[0] for each in ranks):
        ranks = ranks[:1] * mesh.size  # as `descriptions` has it
    whole = plan_save(ranks, step=1)
    headers = sum(len(file.header) for file in whole.files)
    for rank in range(mesh.size):
        mine = plan_save(ranks, step=1, only=rank)
        assert mine.files == whole.files_of(rank)
        assert mine.whole_bytes == whole.size_bytes - headers + sum(len(file.header) for file in mine.files)
    for name, (shape, _, rule, kind) in leaves.items():
        pieces = [(file.rank, each.box) for file in whole.files for each in file.tensors if each.path == name]
        check_cover(name, [box for _, box in pieces], shape)
        assert not volume(tuple((0, size) for size in shape)) or all(volume(box) for _, box in pieces), "no empty parts"
        for rank, box in pieces:
            held = rule.box(shape, mesh.coordinate_of(rank))
            assert (
                kind == "whole"
                or not volume(box)
                or all(a <= c and d <= b for (a, b), (c, d) in zip(held, box, strict=True))
            )


@settings(deadline=None)
@given(worlds())
def test_replicas_share_the_bytes_of_what_they_hold(case):
    """N05: no replica writes more than its share and 2 %, or a unit; the first one may have a larger share of leaves without dimensions, which it writes alone."""
    mesh, leaves = case
    for axes in {rule.replica_axes for _, _, rule, _ in leaves.values()}:
        mine = {name: leaf for name, leaf in leaves.items() if leaf[2].replica_axes == axes and leaf[3] == "rule"}
        ranks = [{"model": of_rank(mesh, mine, 0)}] * mesh.size if mine else []
        for rank in range(mesh.size) if mine else ():
            plan = plan_save(ranks, step=1, only=rank)
            written = sum(each.stop - each.start for file in plan.files for each in file.tensors)
            held = [
                volume(rule.box(shape, mesh.coordinate_of(rank))) * {"float32": 4, "uint8": 1, "bfloat16": 2}[dtype]
                for shape, dtype, rule, _ in mine.values()
            ]
            share = sum(held) / next(iter(mine.values()))[2].at(mesh.coordinate_of(rank)).replicas
            alone = sum(size for size, (shape, *_) in zip(held, mine.values(), strict=True) if not shape)
            least = alone if rank == mesh.first else 0
            assert written <= max(least, share) + max(0.02 * share, min(max(held), UNIT_BYTES))


@settings(deadline=None)
@given(worlds(), st.data())
def test_an_outline_is_read_back_and_is_equal_on_ranks_whose_leaves_follow_rules(case, data):
    mesh, leaves = case
    rank = data.draw(st.integers(0, mesh.size - 1))
    mine = of_rank(mesh, leaves, rank)
    assert described_by(outline_of(mine)) == mine
    if all(kind != "listed" for *_, kind in leaves.values()):
        assert outline_of(mine) == outline_of(of_rank(mesh, leaves, 0))


@pytest.mark.parametrize("value", [0.0, -0.0, 1, True, 1.0, None])
def test_outlines_of_scalars_that_differ_in_a_bit_or_a_type_differ(value):
    texts = [outline_of(describe({"x": each}, "ema")[0]) for each in (0.0, -0.0, 1, True, 1.0, None)]
    assert texts.count(outline_of(describe({"x": value}, "ema")[0])) == 1


def test_a_rule_that_does_not_hold_on_a_rank_becomes_a_list_of_its_slices():
    """A mesh of other ranks than those of the save, such as those of one stage of a pipeline."""
    rule = make_placement(make_mesh((2,)), [[0]])
    leaf = Shard(torch.zeros(2), (4,), (0,), placement=rule)
    described = describe({"w": leaf}, "ema")[0]
    for world in (World(0, 4), World(1, 2)):
        assert by_rule(described, world).tensors["ema['w']"] == LeafSpec("float32", (4,), (((0, 2),),))
    assert by_rule(described, World(0, 2)).tensors["ema['w']"] == LeafSpec("float32", (4,), (), rule)


def test_ranks_tell_a_text_once_and_only_where_digests_differ():
    ranks = [
        Announcement({"model": "a", "ema": digest, "rng": digest}, frozenset({"rng"}))
        for digest in ("b", "c", "c", "b")
    ]
    assert unequal(ranks) == ("ema",)
    assert [told_by(ranks, rank) for rank in range(4)] == [("ema",), ("ema",), (), ()]
    assert ranks[0].without({"rng", "ema"}).digests == {"model": "a"}


def test_what_each_rank_has_of_its_own_is_not_told():
    ranks = [Announcement({"rng": digest, "dataset": "c"}, frozenset({"rng", "dataset"})) for digest in ("a", "b")]
    mine = {name: describe({"x": 1}, name)[0] for name in ("rng", "dataset")}
    assert own_components(ranks, mine) == {"rng"}  # the same on all ranks, without tensors, is shared
    assert unequal(ranks) == ()
    mine = {"dataset": describe({"x": torch.ones(1)}, "dataset")[0]}
    assert own_components(ranks, mine) == {"dataset"}  # equal structures may hold unequal tensors
    assert own_components(ranks[:1], mine) == frozenset()


def test_an_announcement_says_whose_a_component_is():
    both = {name: describe({"x": 1}, name)[0] for name in ("rng", "ema")}
    assert announcement_of(both).own == {"rng"}
