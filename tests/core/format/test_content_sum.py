"""Content sums: the same for every way to cut a tensor, and others for other bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.errors import InvalidState
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.content_sum import LANES, PRIME, ZERO, add, box_sum
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.layout.shard import make_shard
from trainfold.core.layout.slices import row_blocks, volume, whole_box
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.tensor_memory import tensor_bytes

LONG = [(70_000,), (2, 9_000), (3, 9_000, 2), (9_000, 3), (2, 3_000, 3, 3)]  # longer than a row of keys
SHAPES = st.one_of(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.sampled_from(LONG))


@st.composite
def cuts(draw, shape):
    """Boxes that tile a shape: any box may be cut anywhere, repeatedly."""
    boxes = [whole_box(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        low, high = box[dim]
        at = draw(st.integers(low, high))
        boxes += [(*box[:dim], side, *box[dim + 1 :]) for side in ((low, at), (at, high))]
    return boxes


def made(shape, dtype, seed):
    return torch.randint(
        0, 256, (*shape, STORED[dtype].itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def sum_of(values, dtype, box):
    part = values[tuple(slice(low, high) for low, high in box)].contiguous()
    return box_sum(tensor_bytes(part), dtype, box)


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, dtype=st.sampled_from(sorted(STORED)), data=st.data())
def test_the_sum_of_a_tensor_is_the_sum_of_its_boxes(shape, dtype, data):
    """X05: a fingerprint does not depend on how a tensor is cut."""
    values = made(shape, dtype, data.draw(st.integers(0, 9)))
    whole = sum_of(values, dtype, whole_box(shape))
    assert add(sum_of(values, dtype, box) for box in data.draw(cuts(shape))) == whole
    assert len(whole) == LANES
    assert all(0 <= lane < PRIME for lane in whole)


@settings(deadline=None, max_examples=60)
@given(shape=SHAPES.filter(math.prod), dtype=st.sampled_from(sorted(STORED)), data=st.data())
def test_a_bit_that_flips_and_two_elements_that_change_places_change_the_sum(shape, dtype, data):
    values = made(shape, dtype, data.draw(st.integers(0, 9)))
    box, before = whole_box(shape), sum_of(values, dtype, whole_box(shape))
    flat = values.view(-1)
    place = data.draw(st.integers(0, flat.numel() - 1))
    flat[place] ^= 1 << data.draw(st.integers(0, 7))
    changed = sum_of(values, dtype, box)
    assert changed != before
    rows = values.view(math.prod(shape), -1)
    one, other = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    rows[[one, other]] = rows[[other, one]]
    assert (sum_of(values, dtype, box) == changed) is torch.equal(rows[one], rows[other])


def test_signs_that_flip_in_pairs_change_the_sum():
    """Sums modulo a power of two lose the highest bits: two flips of them would cancel."""
    values = torch.ones(64, dtype=torch.float64)
    seen = {box_sum(tensor_bytes(values), "float64", ((0, 64),))}
    for first in range(0, 64, 2):
        values[first : first + 2] *= -1
        seen.add(box_sum(tensor_bytes(values), "float64", ((0, 64),)))
    assert len(seen) == 33


@settings(deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), limit=st.integers(1, 100), itemsize=st.integers(1, 9))
def test_blocks_of_rows_are_the_bytes_of_a_box_in_order(shape, limit, itemsize):
    values = torch.arange(math.prod(shape)).view(shape)
    blocks = list(row_blocks(whole_box(shape), itemsize, limit))
    found = [values[tuple(slice(low, high) for low, high in box)].reshape(-1) for box in blocks]
    assert torch.cat(found).tolist() == list(range(values.numel()))
    assert all(volume(box) * itemsize <= max(limit, itemsize) for box in blocks)


@settings(deadline=None, max_examples=25)
@given(data=st.data(), ranks=st.sampled_from([1, 2, 4]))
def test_a_state_has_one_content_fingerprint_however_ranks_hold_it(data, ranks):
    """X05: today's recorded fingerprints have three values at 1, 2 and 4 ranks."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    dtypes = [data.draw(st.sampled_from(["float32", "bfloat16", "uint8"])) for _ in shapes]
    values = [
        made(shape, dtype, index).view(torch_dtype(dtype)).reshape(shape)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    rows = [
        sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=ranks - 1, max_size=ranks - 1)))
        for shape in shapes
    ]

    def look(world):
        leaves = {}
        for index, value in enumerate(values):
            bounds = [0, *rows[index], len(value)]
            low, high = bounds[world.rank], bounds[world.rank + 1]
            leaves[f"w{index}"] = make_shard(
                value[low:high], shape=tuple(value.shape), starts=(low,) + (0,) * (value.dim() - 1)
            )
        state = TrainState(trainer=Progress(step=1), extra={"ema": leaves, "head": values[0]})
        return content_fingerprint(state, collectives=world)

    whole = TrainState(
        trainer=Progress(step=1), extra={"ema": {f"w{i}": value for i, value in enumerate(values)}, "head": values[0]}
    )
    assert run_threads(ranks, look) == [content_fingerprint(whole)] * ranks


def test_parts_that_do_not_tile_a_tensor_have_no_fingerprint():
    part = make_shard(torch.ones(2), shape=(5,), starts=(1,))
    with pytest.raises(InvalidState, match=r"2 of 5"):
        content_fingerprint(TrainState(extra={"ema": {"w": part}}))
    assert add([]) == ZERO
