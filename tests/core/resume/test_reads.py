"""`plan_reads`: run on a simple model, the plan gives exactly the requested bytes and reads no others."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import trainfold.core.resume.reads as reads_module
from trainfold.core.format.manifest import ComponentRecord, FileRecord, Head, Manifest, ShardRecord, TensorRecord
from trainfold.core.layout.slices import intersect
from trainfold.core.resume.reads import plan_reads
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan

ITEM_BYTES = 2
BASE = 8


@st.composite
def boxes(draw, shape):
    """Any box inside a shape."""
    sides = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in sides)


@st.composite
def tables(draw, most_files=3):
    """Tensors with values, each split into a grid of shards placed anywhere in some files; and the bytes of the files."""
    count = draw(st.integers(1, 4))
    files = [bytearray(BASE) for _ in range(most_files)]
    values, pieces = [], []
    for index in range(count):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        values.append(np.arange(math.prod(shape), dtype=np.int16).reshape(shape) + 1000 * (index + 1))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        grid = itertools.product(*(list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts))
        pieces += [(index, box) for box in grid]
    shards = {index: [] for index in range(count)}
    for index, box in draw(st.permutations(pieces)):
        number = draw(st.integers(0, most_files - 1))
        data = values[index][tuple(slice(*side) for side in box)].tobytes()
        files[number] += bytes(draw(st.sampled_from([0, 0, 2])))
        start = len(files[number])
        files[number] += data
        shards[index].append(ShardRecord(number, start, start + len(data), box, "xxh3:"))
    table = tuple(
        TensorRecord(f"ema[{index}]", "int16", value.shape, tuple(sorted(shards[index], key=lambda shard: shard.box)))
        for index, value in enumerate(values)
    )
    return values, table, [bytes(file) for file in files]


def resume_of(table, places, *, verb="load", kept=(), files=3):
    """A plan that loads a list of tensors, each by its index in a table."""
    node = {"list": [{"t": index} for index in places]}
    records = tuple(FileRecord(f"ema-{number}", ("ema",), number, 10**6, "xxh3:") for number in range(files))
    component = ComponentRecord("ema", (node,), (table,), "xxh3:")
    manifest = Manifest(Head("run", 7), files, (component,), (), {}, {}, records)
    action = ComponentAction("ema", verb, kept=kept)
    return ResumePlan("runs/a", "step-00000007", manifest, (action,), (), ())


def carried_out(read, files):
    """The slice that a tensor's reads give: the bytes that are read, in their place in the shard, and of these the needed box."""
    record = read.record
    out = np.full([stop - start for start, stop in read.wanted], -1, dtype=np.int16)
    for number in {each.shard for each in read.shards}:
        shard, those = record.shards[number], [each for each in read.shards if each.shard == number]
        data = bytearray(b"\xff" * (shard.stop - shard.start))
        for each in those:
            assert (each.file, each.box) == (shard.file, those[0].box)
            assert shard.start <= each.start <= each.stop <= shard.stop
            data[each.start - shard.start : each.stop - shard.start] = files[each.file][each.start : each.stop]
        stored = np.frombuffer(data, dtype=np.int16).reshape([stop - start for start, stop in shard.box])
        box = those[0].box
        out[within(box, read.wanted)] = stored[within(box, shard.box)]
    return out


def within(part, box):
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, box, strict=True))


@given(data=st.data(), case=tables())
def test_the_reads_give_the_bytes_of_each_leaf_and_no_byte_is_read_twice_or_in_vain(data, case):
    """V12, H02: for any saved slices and any slices of this rank."""
    values, table, files = case
    targets = {
        record.path: data.draw(st.none() | boxes(record.shape)) for record in data.draw(st.permutations(table)) if data.draw(st.booleans())
    }  # fmt: skip
    plan = plan_reads(resume_of(table, range(len(table))), {"ema": targets})
    found = plan.components["ema"].tensors
    assert {read.path for read in found.values()} == set(targets)
    for index, read in found.items():
        box = targets[read.path]
        wanted = values[index] if box is None else values[index][tuple(slice(*side) for side in box)]
        assert np.array_equal(carried_out(read, files), wanted)
        for each in read.shards:  # a shard without a needed element is not read
            assert box is None or intersect(table[index].shards[each.shard].box, box) is not None or not wanted.shape
    once = [(each.file, byte) for each in plan.components["ema"].shards for byte in range(each.start, each.stop)]
    assert len(once) == len(set(once)) == plan.size_bytes
    check_ranges(plan, once)
    event(f"{len(plan.ranges)} files")


def check_ranges(plan, once):
    """The ranges cover the same bytes; they are sorted, separate and not empty."""
    by_file = {name: {byte for number, byte in once if plan.files[number] == name} for name in plan.files}
    for name, spans in plan.ranges.items():
        assert all(start < stop for start, stop in spans)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
        assert {byte for start, stop in spans for byte in range(start, stop)} == by_file[name]
    assert sum(stop - start for spans in plan.ranges.values() for start, stop in spans) == plan.size_bytes


@given(case=tables())
def test_reads_are_in_the_order_of_bytes_and_the_order_of_the_targets_makes_no_difference(case):
    _, table, _ = case
    paths = [record.path for record in table]
    one = plan_reads(resume_of(table, range(len(table))), {"ema": dict.fromkeys(paths)})
    other = plan_reads(resume_of(table, range(len(table))), {"ema": dict.fromkeys(reversed(paths))})
    assert (one, str(one)) == (other, str(other))
    first = [read.shards[0] for read in one.components["ema"].tensors.values() if read.shards]
    assert first == sorted(first)


def two_tensors():
    return tuple(
        TensorRecord(f"ema[{i}]", "int16", (4,), (ShardRecord(0, 8 + 8 * i, 16 + 8 * i, ((0, 4),), "xxh3:"),))
        for i in range(2)
    )


def test_tied_leaves_are_read_once_and_kept_ones_not_at_all():
    """B19."""
    targets = {"ema": {"ema[0]": None, "ema[1]": None, "ema[2]": None}}
    plan = plan_reads(resume_of(two_tensors(), [0, 1, 0], kept=("ema[1]",)), targets)
    assert plan.ranges == {"ema-0": ((8, 16),)}
    tied = plan_reads(resume_of(two_tensors(), [0, 1, 0], kept=("ema[0]",)), targets)  # the other of the two needs it
    assert tied.ranges == {"ema-0": ((8, 24),)}
    assert tied.components["ema"].tensors[0].path == "ema[2]"


def test_an_adopted_component_needs_every_leaf_and_a_loaded_one_those_of_the_target():
    """B10: slots are created lazily, so the target may not have them yet."""
    some = {"ema": {"ema[0]": None}}
    assert plan_reads(resume_of(two_tensors(), [0, 1]), some).size_bytes == 8
    assert plan_reads(resume_of(two_tensors(), [0, 1], verb="adopt"), some).size_bytes == 16


@pytest.mark.parametrize("verb", ["keep", "reset"])
def test_what_is_not_loaded_is_not_read(verb):
    plan = plan_reads(resume_of(two_tensors(), [0, 1], verb=verb), {"ema": {"ema[0]": None}})
    assert plan.components == {}
    assert str(plan) == "read step-00000007: 0 files, 0 bytes"


# --- parts of shards --------------------------------------------------------------------------------------------------

PIECE = 16  # bytes; elements have two


@st.composite
def cut_tensors(draw):
    """One tensor in one shard of many pieces, in a file after other bytes; and a part of it, cut in any dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    values = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    start = draw(st.integers(0, 5)) * 2 + BASE
    pieces = "" if values.nbytes <= PIECE else "0" * (-(-values.nbytes // PIECE) * 32)
    shard = ShardRecord(0, start, start + values.nbytes, tuple((0, size) for size in shape), "xxh3:", pieces)
    box = tuple((low, high) for low, high in draw(boxes(shape)))
    return values, (TensorRecord("ema[0]", "int16", shape, (shard,)),), bytes(start) + values.tobytes(), box


def runs_of(shape, box, row_bytes):
    """The runs of bytes of a box whose rows of at most so many bytes are taken whole: how many, and how many bytes."""
    count, inner = 1, len(shape)
    while inner > 1 and math.prod(shape[inner - 1 :]) * ITEM_BYTES <= row_bytes:
        inner -= 1
    # the dimensions from `inner` on are whole; before the last cut one, each index begins another run
    last = max((d for d in range(inner) if box[d] != (0, shape[d])), default=0)
    for low, high in box[:last]:
        count *= high - low
    size = count * (box[last][1] - box[last][0]) * math.prod(shape[last + 1 :]) * ITEM_BYTES
    return count, size


@given(case=cut_tensors())
def test_a_part_of_a_shard_costs_its_rows_and_at_most_a_piece_at_each_end_of_a_run(case):
    """V12: bytes read / bytes needed; rows of at most a piece are read whole, because their digests cover them whole."""
    values, table, data, box = case
    with mock.patch.object(reads_module, "PIECE_BYTES", PIECE):
        plan = plan_reads(resume_of(table, [0], files=1), {"ema": {"ema[0]": box}})
    (read,) = plan.components["ema"].tensors.values()
    wanted = values[tuple(slice(*side) for side in box)]
    assert np.array_equal(carried_out(read, [data]), wanted)
    once = [byte for each in plan.components["ema"].shards for byte in range(each.start, each.stop)]
    assert len(once) == len(set(once)), "no byte is read twice"
    (shard,) = table[0].shards
    if not wanted.size:
        assert once == []
        return
    runs, size = runs_of(values.shape, box, PIECE)
    most = size + 2 * (PIECE - 1) * runs
    assert len(once) <= min(most, values.nbytes)
    if size == wanted.nbytes:  # cut between rows, or inside of rows that are larger than a piece
        event("as the law says")
        assert len(once) <= wanted.nbytes + 2 * (PIECE - 1) * runs
    for each in read.shards if shard.pieces and len(once) < values.nbytes else ():
        assert (each.start - shard.start) % PIECE == 0
        assert (each.stop - shard.start) % PIECE == 0 or each.stop == shard.stop


def test_the_cost_is_linear_in_the_shards_and_does_not_depend_on_the_number_of_ranks(monkeypatch):
    """H02: one rank of 16,384 compares its slice with each stored shard once, and reads one shard."""
    world = 16_384
    shards = tuple(ShardRecord(rank, 8, 10, ((rank, rank + 1),), "xxh3:") for rank in range(world))
    table = (TensorRecord("ema[0]", "int16", (world,), shards),)
    plan = resume_of(table, [0], files=world)
    calls = []
    monkeypatch.setattr(reads_module, "intersect", lambda one, other: calls.append(one) or intersect(one, other))
    for rank in (0, 7_777, world - 1):
        found = plan_reads(plan, {"ema": {"ema[0]": ((rank, rank + 1),)}})
        assert found.ranges == {f"ema-{rank}": ((8, 10),)}
    assert len(calls) == 3 * world


def test_boxes_are_compared_once_for_all_tensors_that_are_cut_and_needed_alike(monkeypatch):
    """H02: a model has many layers, and few kinds of them."""
    boxes = tuple(((low, low + 2),) for low in range(0, 8, 2))
    table = tuple(
        TensorRecord(
            f"ema[{i}]",
            "int16",
            (8,),
            tuple(ShardRecord(r, 8 + 4 * i, 12 + 4 * i, b, "xxh3:") for r, b in enumerate(boxes)),
        )
        for i in range(50)
    )
    calls = []
    monkeypatch.setattr(reads_module, "intersect", lambda one, other: calls.append(one) or intersect(one, other))
    found = plan_reads(resume_of(table, range(50), files=4), {"ema": {f"ema[{i}]": ((3, 6),) for i in range(50)}})
    assert found.ranges == {f"ema-{rank}": ((8, 208),) for rank in (1, 2)}
    assert len(calls) == len(boxes)
