"""Reshard: what any mesh saved, any other mesh loads: all parts together are the original, and a rank reads little more than it needs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged, InvalidState, ResumeRefused
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import PIECE_BYTES
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import volume
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

MESHES = [(1,), (2,), (3,), (2, 2), (1, 3)]


class Counting:
    """A store in memory that counts the bytes that are read of data files."""

    def __init__(self, store):
        self._store, self.read_bytes = store, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read_into(self, name, buffer, *, start=0):
        self.read_bytes += len(buffer)
        self._store.read_into(name, buffer, start=start)


def part_of(value, rule, rank):
    box = rule.box(tuple(value.shape), rule.mesh.coordinate_of(rank))
    part = value[tuple(slice(low, high) for low, high in box)].clone()
    return Shard(part, tuple(value.shape), tuple(low for low, _ in box), placement=rule)


def state_of(values, cuts, mesh, rank):
    """The state of a rank whose leaves are whole, or cut by axes of a mesh."""
    leaves = {
        name: value if cuts[name] is None else part_of(value, make_placement(mesh, cuts[name]), rank)
        for name, value in values.items()
    }
    return TrainState(model=ModelState(Leaves(leaves), Leaves()), trainer=Progress(step=1))


def zeros(like):
    """As `torch.zeros_like`, which cannot fill each dtype."""
    return torch.zeros((*like.shape, like.element_size()), dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def fresh(state):
    """The state with other values."""
    params = {
        name: Shard(zeros(leaf.tensor), leaf.shape, leaf.starts, placement=leaf.placement)
        if isinstance(leaf, Shard)
        else zeros(leaf)
        for name, leaf in state.model.params.items()
    }
    return state.evolve(model=ModelState(Leaves(params), Leaves()))


def made(shape, dtype, seed):
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, STORED[dtype].itemsize), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return bits.view(torch_dtype(dtype)).reshape(shape)


@st.composite
def cut_by(draw, mesh, shape):
    """None for a whole leaf; else for each dimension the axes that cut it."""
    cuts = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh.shape)))) if shape else ():
        if (dim := draw(st.integers(-1, len(shape) - 1))) >= 0:
            cuts[dim].append(axis)
    return cuts if shape and draw(st.booleans()) else None


def same_bits(one, other):
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_any_mesh_saved_any_other_mesh_loads(data):
    """X01, H02: over meshes, shapes, dtypes, uneven and empty parts; the parts of all ranks are those of the original."""
    meshes = [make_mesh(data.draw(st.sampled_from(MESHES))) for _ in range(2)]
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    values = {f"w{i}": made(shape, data.draw(st.sampled_from(sorted(STORED))), i) for i, shape in enumerate(shapes)}
    saved, wanted = (
        {name: data.draw(cut_by(mesh, tuple(value.shape))) for name, value in values.items()} for mesh in meshes
    )
    store = MemoryStore()
    before, after = meshes
    run_threads(before.size, lambda world: save(state_of(values, saved, before, world.rank), store, collectives=world))

    def restored(world):
        like = state_of(values, wanted, after, world.rank)
        return like, load(store, like=fresh(like), collectives=world, policy={"world": "adapt"})

    for like, loaded in run_threads(after.size, restored):
        for name, leaf in like.model.params.items():
            found = loaded.model.params[name]
            mine, theirs = (each.tensor if isinstance(each, Shard) else each for each in (leaf, found))
            assert mine.shape == theirs.shape
            assert same_bits(mine, theirs)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize(
    ("mesh", "cuts", "shape"),
    [((2, 2), [[1]], (1,)), ((2, 3), [[1]], (4,)), ((2, 4), [[], [1]], (3, 5)), ((2,), [[0], []], (2, 0))],
)
def test_replicas_of_which_some_hold_no_row_are_loaded_by_any_other_ranks(mesh, cuts, shape):
    """N05, X01: a bias of one number under HSDP; a tensor without elements that is cut."""
    mesh, value, store = make_mesh(mesh), made(shape, "float32", 0), MemoryStore()
    run_threads(
        mesh.size, lambda world: save(state_of({"w": value}, {"w": cuts}, mesh, world.rank), store, collectives=world)
    )
    for after, wanted in ((make_mesh((1,)), None), (make_mesh((2,)), [[0]]), (mesh, cuts)):

        def restored(world, after=after, wanted=wanted):
            like = state_of({"w": value}, {"w": wanted}, after, world.rank)
            return like, load(store, like=fresh(like), collectives=world)

        for like, loaded in run_threads(after.size, restored):
            mine, theirs = (
                getattr(each.model.params["w"], "tensor", each.model.params["w"]) for each in (like, loaded)
            )
            assert same_bits(mine, theirs)


def test_leaves_that_were_saved_as_one_tensor_are_refused_if_this_run_cuts_them_otherwise():
    """N01: one read is for both, so that one of them would have the rows of the other."""
    value, store = made((4, 2), "float32", 0), MemoryStore()
    save(TrainState(model=ModelState(Leaves({"a": value, "b": value}), Leaves()), trainer=Progress(step=1)), store)

    def loaded(world, cuts):
        like = state_of({"a": value, "b": value}, cuts, make_mesh((world.world_size,)), world.rank)
        try:
            found = load(store, like=fresh(like), collectives=world).model.params.values()
        except InvalidState as error:
            return error.where
        leaves = zip(like.model.params.values(), found, strict=True)
        return all(same_bits(*(getattr(each, "tensor", each) for each in pair)) for pair in leaves)

    for cuts in ({"a": [[0]], "b": None}, {"a": None, "b": [[0]]}, {"a": [[0]], "b": [[], [0]]}):
        assert run_threads(2, lambda world, cuts=cuts: loaded(world, cuts)) == ["model.params['b']"] * 2
        assert run_threads(1, lambda world, cuts=cuts: loaded(world, cuts)) == [True], "one rank holds all of both"
    assert run_threads(2, lambda world: loaded(world, {"a": [[0]], "b": [[0]]})) == [True, True]


LARGE = {"w": ((5_003, 700), "float32"), "experts": ((2, 3_000, 1_000), "bfloat16"), "long": ((3_000_001,), "uint8")}


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_little_more_than_it_needs(before, after, dim):
    """X03: bytes read / bytes needed <= 1.02, plus a piece a cut, where rows are cut; experts are cut in their inner dimension too."""
    values = {name: made(shape, dtype, 0) for name, (shape, dtype) in LARGE.items()}
    names = list(values) if dim == 0 else ["experts"]
    values = {name: values[name] for name in names}
    store = MemoryStore()

    def cuts():
        return {name: [[]] * dim + [[0]] for name in names}

    run_threads(
        before, lambda world: save(state_of(values, cuts(), make_mesh((before,)), world.rank), store, collectives=world)
    )

    def restored(world):
        counting = Counting(store)
        like = state_of(values, cuts(), make_mesh((after,)), world.rank)
        loaded = load(counting, like=fresh(like), collectives=world, policy={"world": "adapt"})
        return counting.read_bytes, like, loaded

    for read_bytes, like, loaded in run_threads(after, restored):
        leaves = like.model.params
        assert all(same_bits(leaf.tensor, loaded.model.params[name].tensor) for name, leaf in leaves.items())
        needed = sum(leaf.tensor.nbytes for leaf in leaves.values())
        runs = sum(math.prod(leaf.shape[:dim]) * 2 * before for leaf in leaves.values())
        assert needed <= read_bytes <= 1.02 * needed + runs * PIECE_BYTES
        assert before == after or read_bytes < sum(value.nbytes for value in values.values()) or after == 1


def test_a_bit_that_flips_in_a_piece_that_is_read_is_found_and_one_elsewhere_is_not_looked_at():
    """X03: a partial read is verified."""
    value = made((8, 1_000_000), "uint8", 0)
    for row, is_found in ((1, True), (7, False)):
        store = MemoryStore()
        save(TrainState(model=ModelState(Leaves({"w": value}), Leaves()), trainer=Progress(step=1)), store)
        name = "step-00000001/model-00000-of-00001.safetensors"
        data = bytearray(store.read(name))
        data[4096 + row * 1_000_000 + 5] ^= 1
        store.delete(name)
        store.write(name, [bytes(data)], size_bytes=len(data))
        half = part_of(value, make_placement(make_mesh((2,)), [[0]]), 0)
        like = TrainState(model=ModelState(Leaves({"w": half}), Leaves()), trainer=Progress(step=1))
        if is_found:
            with pytest.raises((CheckpointDamaged, ResumeRefused), match="xxh3"):
                load(store, like=fresh(like))
        else:
            assert torch.equal(load(store, like=fresh(like)).model.params["w"].tensor, value[:4])
    assert volume(half.box) == 4_000_000
