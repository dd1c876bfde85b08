"""Parts of stored shards: the right elements in the right place, through one buffer, and every byte that is used is verified."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.formats.native.scatter import Inside, Scatter
from trainfold.backends.runs.api import save
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.layout.slices import run_blocks
from trainfold.core.resume.reads import plan_reads
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.state.state import Progress, TrainState


@st.composite
def parts(draw):
    """The shape of a shard, a part of it that is not empty, and where its elements are cut into runs."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    box = tuple((low, draw(st.integers(low + 1, size))) for size in shape for low in [draw(st.integers(0, size - 1))])
    cuts = sorted({0, math.prod(shape), *draw(st.lists(st.integers(0, math.prod(shape)), max_size=5))})
    return shape, box, list(itertools.pairwise(cuts))


@given(case=parts())
def test_runs_are_cut_into_boxes_that_hold_their_elements_in_order(case):
    shape, _, runs = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for first, stop in runs:
        blocks = list(run_blocks(first, stop, shape))
        held = [numbers[tuple(slice(*side) for side in block)].reshape(-1) for block in blocks]
        assert np.concatenate([*held, []]).tolist() == list(range(first, stop))
        assert len(blocks) <= 2 * len(shape)


@given(case=parts(), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
def test_the_runs_of_a_shard_give_each_part_of_it_with_any_strides(case, dtype):
    """V12: the part of a rank, cut in any dimension, into memory of any order."""
    shape, box, runs = case
    shard = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    data = bytearray(shard.contiguous().view(torch.uint8).numpy().tobytes())
    wanted = shard[tuple(slice(*side) for side in box)]
    target = torch.zeros(wanted.shape[::-1], dtype=dtype).permute(*range(wanted.dim())[::-1])
    inside = Inside(shape, tuple(low for low, _ in box))
    scatter, size = Scatter(target, inside), shard.element_size()
    for first, stop in runs:
        scatter.put(memoryview(data)[first * size : stop * size], first * size)
    assert torch.equal(target, wanted)
    run = inside.run(wanted.shape)
    if run is not None:
        assert torch.equal(shard.reshape(-1)[slice(*run)], wanted.reshape(-1))


# --- through the store ------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 600, 1100  # 2.6 MB: three pieces of 238.3 rows
PARTS = {
    "rows": ((100, 300), (0, COLUMNS)),
    "columns": ((0, ROWS), (300, 500)),
    "both": ((230, 250), (1099, 1100)),
    "all": ((0, ROWS), (0, COLUMNS)),
}


def saved():
    store = MemoryStore()
    tensor = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    save(TrainState(trainer=Progress(step=1), extra={"ema": {"w": tensor}}), store)
    return store, tensor


def read_part(store, box, out=None):
    manifest = read_manifest(store, "step-00000001")
    plan = ResumePlan("runs/a", "step-00000001", manifest, (ComponentAction("ema", "load"),), (), ())
    reads = plan_reads(plan, {"ema": {"ema['w']": box}})
    reader = PlanReader(store, "step-00000001", manifest)
    (read,) = reads.components["ema"].tensors.values()
    if out is not None:
        reader.read_into([(read, out)])
        return out, reads.size_bytes
    return reader.read(reads.components["ema"], {})[0], reads.size_bytes


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["fresh", "in place", "in place, by columns"])
def test_a_part_is_read_through_one_buffer(part, how):
    """V12: the peak of reading a part, beside the part: a piece, and no copy of the rows that it is cut from."""
    store, tensor = saved()
    wanted = tensor[tuple(slice(*side) for side in PARTS[part])]
    out = None
    if how != "fresh":
        out = torch.zeros_like(wanted) if how == "in place" else torch.zeros(wanted.shape[::-1]).t()
    read_part(store, PARTS[part], out)  # imports
    tracemalloc.start()
    try:
        found, size_bytes = read_part(store, PARTS[part], out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(found, wanted)
    assert out is None or found is out
    assert peak < 2**20 + 2**18, "one buffer"
    assert size_bytes == {"rows": 2 * 2**20, "both": 2 * 2**20}.get(part, tensor.nbytes)


@pytest.mark.parametrize(("part", "row", "is_found"), [("columns", 5, True), ("rows", 5, True), ("rows", 599, False), ("both", 5, True), ("both", 599, False)])  # fmt: skip
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_bit_that_changed_is_found_in_the_pieces_that_are_used(part, row, is_found, is_in_place):
    """Also beside the needed elements, because the digest is that of the piece."""
    store, tensor = saved()
    (name,) = [name for name in store.list("step-00000001") if name.startswith("ema")]
    data = bytearray(store.read(f"step-00000001/{name}"))
    data[len(data) - tensor.nbytes + row * COLUMNS * 4] ^= 1
    store.delete(f"step-00000001/{name}")
    store.write(f"step-00000001/{name}", [bytes(data)], size_bytes=len(data))
    wanted = tensor[tuple(slice(*side) for side in PARTS[part])]
    out = torch.zeros_like(wanted) if is_in_place else None
    if is_found:
        with pytest.raises(CheckpointDamaged, match=r"ema\['w'\]: expected xxh3:"):
            read_part(store, PARTS[part], out)
    else:
        assert torch.equal(read_part(store, PARTS[part], out)[0], wanted)
