"""`share_reads`: each needed piece is read by one rank, each rank gets exactly what it wants, and rounds are bounded."""

import itertools
import math

import numpy as np
from hypothesis import event, example, given
from hypothesis import strategies as st

from trainfold.core.layout.shared_reads import StoredPart, share_reads, taken_of
from trainfold.core.layout.slices import intersect, whole_box

ITEM_BYTES = 2


@st.composite
def boxes(draw, shape):
    """None, or any box inside a shape."""
    sides = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return draw(st.none() | st.just(tuple((start, stop) for start, stop in sides)) | st.just(whole_box(shape)))


@st.composite
def cases(draw):
    """Tensors in grids of stored parts, what each rank wants of each of them, and the sizes of pieces and rounds."""
    ranks = draw(st.integers(1, 4))
    values, parts, owners = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        values.append(np.arange(1000 * number, 1000 * number + math.prod(shape), dtype=np.int16).reshape(shape))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=1))}) for size in shape]
        for box in itertools.product(*(list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts)):
            parts.append(StoredPart(box, ITEM_BYTES))
            owners.append(number)
    wanted = [[draw(boxes(value.shape)) for value in values] for _ in range(ranks)]
    sizes = draw(st.sampled_from([2, 4, 6, 16])), draw(st.sampled_from([1, 8, 32, 1000]))
    return values, parts, owners, wanted, sizes


def slices(part, box):
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(part, box, strict=True))


def sizes_of(block):
    return [high - low for low, high in block]


def row_case():
    """A piece of 7 elements over rows of 5, of which one rank needs columns."""
    whole = ((0, 3), (0, 5))
    values = np.arange(15, dtype=np.int16).reshape(3, 5)
    return [values], [StoredPart(whole, ITEM_BYTES)], [0], [[((0, 3), (1, 3))], [whole], [whole]], (14, 32)


def busy_reader_case():
    """Rank 0 reads for three others, each of which receives little; they read something of their own."""
    sides = [((0, 7),)] * 3 + [((0, 2),)] * 3
    values = [np.arange(100 * index, 100 * index + side[0][1], dtype=np.int16) for index, side in enumerate(sides)]
    wanted = [[None] * 3 + sides[3:]]
    wanted += [[side if index % 3 == rank else None for index, side in enumerate(sides)] for rank in range(3)]
    return values, [StoredPart(side, ITEM_BYTES) for side in sides], list(range(6)), wanted, (14, 8)


@given(case=cases())
@example(case=row_case())
@example(case=busy_reader_case())
def test_each_piece_is_read_once_if_it_is_needed_and_each_rank_gets_exactly_what_it_wants(case):
    """X13, X03: no byte of the store is read twice or in vain by the group, whatever is stored and wanted."""
    values, parts, owners, wanted, (piece_bytes, round_bytes) = case
    by_part = [[boxes[owner] for owner in owners] for boxes in wanted]
    rounds = share_reads(parts, by_part, piece_bytes=piece_bytes, round_bytes=round_bytes)
    outs = [[None if box is None else np.full(sizes_of(box), -1, dtype=np.int16) for box in boxes] for boxes in wanted]
    seen = set()
    for reads in rounds:
        sent, received = [0] * len(wanted), [0] * len(wanted)
        for read in reads:
            part, owner = parts[read.part], owners[read.part]
            stored = values[owner][tuple(slice(*side) for side in part.box)].reshape(-1)
            assert read.first * ITEM_BYTES % piece_bytes == 0
            assert read.stop == min(read.first + piece_bytes // ITEM_BYTES, stored.size)
            assert (read.part, read.first) not in seen
            seen.add((read.part, read.first))
            takers = []
            for rank, boxes in enumerate(wanted):
                for taken in taken_of(part.box, read.first, read.stop, boxes[owner]):
                    run = stored[read.first : read.stop][taken.place :][: math.prod(sizes_of(taken.block))]
                    target = outs[rank][owner][(*slices(taken.box, boxes[owner]), ...)]
                    assert (target == -1).all(), "each element comes once"
                    target[...] = run.reshape(sizes_of(taken.block))[slices(taken.box, taken.block)]
                    takers.append(rank)
                    if rank != read.reader:
                        sent[read.reader] += target.nbytes
                        received[rank] += target.nbytes
            assert read.takers == tuple(sorted(set(takers)))
            assert read.reader in read.takers
        assert reads
        assert len(reads) == 1 or max(*sent, *received) <= round_bytes
    for boxes, found in zip(wanted, outs, strict=True):
        for value, box, out in zip(values, boxes, found, strict=True):
            assert box is None or np.array_equal(out, value[tuple(slice(*side) for side in box)])
    event(f"{len(rounds) > 1} rounds, {len(seen) > 1} pieces")


@given(case=cases(), data=st.data())
def test_a_piece_that_no_rank_needs_is_not_read_and_the_rounds_change_no_reader(case, data):
    _, parts, owners, wanted, (piece_bytes, round_bytes) = case
    by_part = [[boxes[owner] for owner in owners] for boxes in wanted]
    rounds = share_reads(parts, by_part, piece_bytes=piece_bytes, round_bytes=round_bytes)
    other = share_reads(parts, by_part, piece_bytes=piece_bytes, round_bytes=data.draw(st.integers(0, 100)))
    assert sorted(itertools.chain(*rounds)) == sorted(itertools.chain(*other))
    for read in itertools.chain(*rounds):
        assert any(
            wants[read.part] is not None
            and (not parts[read.part].box or intersect(parts[read.part].box, wants[read.part]) is not None)
            for wants in by_part
        )


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 8)), ranks=st.integers(1, 8), pieces=st.sampled_from([2, 6, 16])
)
def test_where_all_ranks_need_every_piece_no_rank_reads_more_than_a_piece_above_another(shape, ranks, pieces):
    box = whole_box(shape)
    rounds = share_reads([StoredPart(box, 2)], [[box]] * ranks, piece_bytes=pieces, round_bytes=1 << 20)
    loads = [0] * ranks
    for read in itertools.chain(*rounds):
        loads[read.reader] += 2 * (read.stop - read.first)
    assert sum(loads) == 2 * math.prod(shape)
    assert max(loads) - min(loads) <= pieces
