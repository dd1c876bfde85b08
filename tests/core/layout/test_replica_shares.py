"""Replicas share what they hold alike: disjoint, complete, and balanced."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.replica_shares import UNIT_BYTES, box_of, written_by
from trainfold.core.layout.slices import check_cover, volume

ITEM_BYTES = {"int8": 1, "bfloat16": 2, "float32": 4, "complex128": 16}
SIDES = st.sampled_from([0, 1, 1, 2, 3, 7, 64, 1000, 4097])
LEAVES = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(SIDES, max_size=3)), min_size=1, max_size=9)


def size_of(box, spec):
    return volume(box) * ITEM_BYTES[spec.dtype]


def shares(specs, ranks, **options):
    return [written_by(rank, ranks, specs, item_bytes=ITEM_BYTES.get, **options) for rank in range(ranks)]


@settings(deadline=None)
@given(LEAVES, st.integers(1, 9), st.booleans())
@example([("float32", [4097, 1000])], 8, False)
@example([("float32", [1, 1, 4097])] * 9, 7, False)
@example([("int8", [1000, 64]), ("int8", [1000, 64])], 4, False)
@example([("float32", [8, 1000, 4097])], 3, False)
@example([("float32", [2, 4097, 4097])], 3, True)
@example([("complex128", [1, 4097, 64, 7])], 9, True)
@example([("int8", [4097, 64])] * 9, 40, False)
@example([("int8", [4097, 64])] * 9, 90, True)
def test_the_bytes_of_replicas_are_balanced_within_2_percent_whatever_leaves_they_have(leaves, ranks, is_cut):
    """N05: a replica's bytes are within 2 % of the mean if that is 3.2 MB or more, and within a unit otherwise.

    A leaf has at most one writer for each unit of it, so none up to a unit is divided, and who needs the leaf opens few indexes.
    """
    mesh = make_mesh((2, ranks)) if is_cut else make_mesh((ranks,))
    specs = {}
    for number, (dtype, shape) in enumerate(leaves):
        rule = make_placement(mesh, [[0]]) if is_cut and shape else None
        specs[f"w{number}"] = LeafSpec(dtype, tuple(shape), (), rule)
    written = shares(specs, mesh.size)
    for path, spec in specs.items():
        pieces = [piece for mine in written for piece in mine if piece.path == path]
        check_cover(path, [piece.box for piece in pieces], spec.shape)
        divided = [piece for piece in pieces if piece.held is not None]
        assert all(size_of(piece.held, spec) > UNIT_BYTES and piece.box != piece.held for piece in divided)
        for group in [range(ranks), range(ranks, 2 * ranks)] if spec.placement is not None else [range(mesh.size)]:
            writers = {rank for rank in group if any(piece.path == path for piece in written[rank])}
            assert len(writers) <= max(1, -(-size_of(box_of(spec, group[0]), spec) // UNIT_BYTES))
    for group in [range(ranks), range(ranks, 2 * ranks)] if is_cut else [range(ranks)]:
        ruled = {path: spec for path, spec in specs.items() if (spec.placement is not None) == is_cut}
        mean = sum(size_of(box_of(spec, group[0]), spec) for spec in ruled.values()) / ranks
        for rank in group:
            mine = sum(size_of(piece.box, piece.spec) for piece in written[rank] if piece.path in ruled)
            assert abs(mine - mean) <= max(0.01 * mean, UNIT_BYTES) + 1
            assert abs(mine - mean) <= 0.02 * mean or mean < 50 * UNIT_BYTES


@settings(deadline=None)
@given(LEAVES, st.integers(2, 9))
@example([("float32", [8, 1000, 4097])], 3)
def test_what_a_replica_writes_of_a_leaf_is_one_run_of_its_elements(leaves, ranks):
    """So that a save reads it in order, and each box is one run of bytes. A replica divides at most two leaves, into few boxes each."""
    specs = {f"w{number}": LeafSpec(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(leaves)}
    written = shares(specs, ranks)
    for mine in written:
        assert len({piece.path for piece in mine if piece.held is not None}) <= 2
    for path, spec in specs.items():
        strides = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        end = 0
        for mine in written:
            boxes = [piece.box for piece in mine if piece.path == path and volume(piece.box)]
            assert len(boxes) <= max(1, 2 * len(spec.shape) - 1)
            for box in boxes:
                assert sum(low * stride for (low, _), stride in zip(box, strides, strict=True)) == end
                last = sum((high - 1) * stride for (_, high), stride in zip(box, strides, strict=True))
                assert last + 1 - end == volume(box)
                end = last + 1


@settings(deadline=None)
@given(LEAVES, st.integers(2, 5), st.data())
def test_leaves_of_rank_0_are_written_by_it_whole_and_count_in_its_share(leaves, ranks, data):
    specs = {f"w{number}": LeafSpec(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(leaves)}
    first = data.draw(st.sets(st.sampled_from(sorted(specs))))
    written = shares(specs, ranks, of_rank_zero=first)
    for path, spec in specs.items():
        check_cover(path, [piece.box for mine in written for piece in mine if piece.path == path], spec.shape)
    assert first <= {piece.path for piece in written[0] if piece.held is None}
    assert not first & {piece.path for mine in written[1:] for piece in mine}


@settings(deadline=None)
@given(LEAVES, st.integers(1, 4), st.integers(6, 10))
@example([("float32", [64, 1000]), ("int8", [1]), ("float32", [64, 1000])], 1, 6)
def test_few_bytes_of_many_replicas_are_written_by_the_first_of_them(leaves, some, more):
    """X02: so that a load, which does not know who wrote a leaf that no rule cuts, finds it in the first indexes that it opens."""
    specs = {f"w{number}": LeafSpec(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(leaves)}
    total = sum(size_of(box_of(spec, 0), spec) for spec in specs.values())
    writers = 1 + 2 * total // UNIT_BYTES
    ranks = writers + 2**more
    for rank in {0, 1, some, writers - 1, writers, ranks - 1}:
        mine = written_by(rank, ranks, specs, item_bytes=ITEM_BYTES.get)
        assert not any(volume(piece.box) for piece in mine) or rank < writers
        assert sum(size_of(piece.box, piece.spec) for piece in mine) <= UNIT_BYTES


@settings(deadline=None)
@given(LEAVES, st.integers(1, 40), st.sampled_from([1, 5000, UNIT_BYTES, 3 * UNIT_BYTES, 10**7, 10**9]), st.booleans())
@example([("float32", [4097, 1000]), ("int8", [7])], 9, 3 * UNIT_BYTES, True)
def test_a_store_that_prefers_large_objects_has_the_writers_of_a_smaller_world(leaves, ranks, object_bytes, is_cut):
    """N05: no more of them than can have an object each, balanced as that many replicas are; the others write nothing. Of what is cut, each part has its own."""
    mesh = make_mesh((2, ranks)) if is_cut else make_mesh((ranks,))
    rule = make_placement(mesh, [[0]]) if is_cut else None
    specs = {
        f"w{n}": LeafSpec(dtype, tuple(shape), (), rule if shape else None) for n, (dtype, shape) in enumerate(leaves)
    }
    ruled = {path: spec for path, spec in specs.items() if spec.shape}
    written = shares(ruled, mesh.size, prefers=FilePreference(object_bytes=object_bytes))
    for group in [range(ranks), range(ranks, 2 * ranks)] if is_cut else [range(ranks)]:
        total = sum(size_of(box_of(spec, group[0]), spec) for spec in ruled.values())
        writers = max(1, min(ranks, total // object_bytes))
        sizes = [sum(size_of(piece.box, piece.spec) for piece in written[rank]) for rank in group]
        assert sum(sizes) == total
        assert not any(sizes[writers:])
        assert (
            max(abs(size - total / writers) for size in sizes[:writers]) <= max(0.01 * total / writers, UNIT_BYTES) + 1
        )
    for path, spec in ruled.items():
        check_cover(path, [piece.box for mine in written for piece in mine if piece.path == path], spec.shape)
    if not is_cut:
        assert written[:writers] == shares(ruled, writers)


def test_a_preference_that_is_no_size_is_refused():
    for wrong in ({"object_bytes": -1}, {"object_bytes": 1.5}, {"one_a_rank_from": 0}, {"one_a_rank_from": True}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            FilePreference(**wrong)
    assert FilePreference(object_bytes=10).writers(4, 9) == 1


def test_a_transformer_is_balanced_and_few_of_its_leaves_are_divided():
    """N05: an embedding of a quarter of the bytes, layers, and vectors, on 1 to 64 replicas."""
    specs = {"embedding": LeafSpec("float32", (50_257, 768))}
    for layer in range(12):
        specs |= {f"{layer}.up": LeafSpec("float32", (3072, 768)), f"{layer}.down": LeafSpec("float32", (768, 3072))}
        specs |= {f"{layer}.qkv": LeafSpec("float32", (2304, 768)), f"{layer}.norm": LeafSpec("float32", (768,))}
    total = sum(math.prod(spec.shape) * 4 for spec in specs.values())
    for ranks in (2, 3, 8, 64):
        written = shares(specs, ranks)
        sizes = [sum(size_of(piece.box, piece.spec) for piece in mine) for mine in written]
        assert max(sizes) <= 1.01 * total / ranks
        assert (max(sizes) - min(sizes)) / (total / ranks) <= 0.02
        assert all(len({piece.path for piece in mine if piece.held is not None}) <= 2 for mine in written)


@pytest.mark.parametrize("ranks", [2, 512])
def test_a_rank_finds_its_part_in_as_many_steps_as_it_has_leaves(ranks):
    """X02: the number of ranks does not enter."""
    tensors = CountedDict({f"w{number}": LeafSpec("float32", (64, 1024)) for number in range(500)})
    written_by(ranks // 2, ranks, tensors, item_bytes=ITEM_BYTES.get)
    assert tensors.read <= 4 * len(tensors)


class CountedDict(dict):
    """Counts what is read of it one by one."""

    read = 0

    def values(self):
        return self.counted(super().values())

    def items(self):
        return self.counted(super().items())

    def counted(self, each):
        for one in each:
            self.read += 1
            yield one


def test_a_mixture_of_experts_is_balanced_on_three_replicas():
    """N05: eight experts in one tensor, and a few leaves beside it."""
    specs = {"router": LeafSpec("float32", (8, 1024)), "experts": LeafSpec("bfloat16", (8, 4096, 1024))}
    written = shares(specs, 3)
    sizes = [sum(size_of(piece.box, piece.spec) for piece in mine) for mine in written]
    assert max(sizes) - min(sizes) <= 0.02 * sum(sizes) / 3
    assert [len(mine) for mine in written] == [
        3,
        3,
        2,
    ]  # the router; then whole experts, and the rows of one that is divided
