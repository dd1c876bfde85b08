"""The position of an evaluation: each sample exactly once, for any ranks, batches and interruptions."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.data.eval_cursor import DistributedEvalCursor, check_eval_cursor, eval_batches, make_eval_cursor
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, InvalidState
from trainfold.core.layout.world import make_world
from trainfold.core.state.state import TrainState, make_progress

lengths = st.integers(0, 60)
sizes = st.integers(1, 20)
worlds = st.integers(1, 6)


class Ranks:
    """Collectives that only provide the rank and the world size."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = make_world(rank, world_size).rank, world_size


def part_of(cursor, world_size, limit):
    """The samples of each rank in one part, and the position after it."""
    batches = [
        eval_batches(cursor, list, collectives=Ranks(rank, world_size), limit=limit) for rank in range(world_size)
    ]
    assert len({(each.steps, each.after, each.complete) for each in batches}) == 1, "all ranks agree"
    return [list(each) for each in batches], batches[0].after


@given(length=lengths, parts=st.lists(st.tuples(worlds, sizes, st.integers(1, 4)), min_size=1, max_size=6))
def test_every_sample_is_evaluated_exactly_once_whatever_comes_between(length, parts):
    """Q01: any world sizes, batch sizes and interruptions between steps; no sample is repeated, none is padded."""
    seen = []
    cursor = make_eval_cursor(length, global_batch_size=parts[0][1])
    turn = 0
    while not cursor.is_done:
        world_size, size, limit = parts[turn % len(parts)]
        turn += 1
        cursor = make_eval_cursor(length, global_batch_size=size, next_index=cursor.next_index)
        given_, cursor = part_of(cursor, world_size, limit)
        seen += [sample for rank in given_ for batch in rank for sample in batch]
    assert sorted(seen) == list(range(length))


@given(length=lengths, size=sizes, world_size=worlds)
def test_shares_are_the_step_in_rank_order_and_even(length, size, world_size):
    cursor = make_eval_cursor(length, global_batch_size=size)
    for step in range(cursor.steps + 1):
        here = cursor.advance(step)
        shares = [here.share(rank, world_size) for rank in range(world_size)]
        assert [sample for share in shares for sample in share] == list(here.positions)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert bool(here.positions) == (step < cursor.steps) == (not here.is_done)
    assert cursor.steps == -(-length // size)


@given(length=lengths, size=sizes, world_size=worlds, limit=st.none() | st.integers(1, 5))
def test_a_rank_has_at_most_as_many_batches_as_there_are_steps_and_an_early_one_for_each_late_one(
    length, size, world_size, limit
):
    """Q05: a rank's missing batches come last, where a communicating forward runs uncounted steps."""
    cursor = make_eval_cursor(length, global_batch_size=size)
    given_, _ = part_of(cursor, world_size, limit)
    steps = cursor.steps if limit is None else min(limit, cursor.steps)
    for rank, batches in enumerate(given_):
        has = [bool(cursor.advance(step).share(rank, world_size)) for step in range(steps)]
        assert len(batches) == sum(has)
        assert has == sorted(has, reverse=True)


@given(length=lengths, size=sizes, steps=st.lists(st.integers(0, 5), max_size=5))
def test_advancing_in_parts_is_advancing_once(length, size, steps):
    cursor = make_eval_cursor(length, global_batch_size=size)
    there = cursor
    for count in steps:
        there = there.advance(count)
    assert there == cursor.advance(sum(steps))
    assert there.steps == max(cursor.steps - sum(steps), 0)


def test_a_part_says_that_it_is_one():
    """Q12."""
    cursor = make_eval_cursor(10, global_batch_size=4)
    assert [eval_batches(cursor, list, limit=limit).complete for limit in (1, 2, 3, 4, None)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    part = eval_batches(cursor, list, limit=2)
    assert list(part) == list(part)
    assert part.after == cursor.advance(2) == cursor.advance().advance()
    assert list(eval_batches(cursor.advance(3), list)) == []


def test_where_torch_repeats_or_drops_samples_each_is_given_once():
    """P16: pytorch#25162 says of `DistributedSampler`'s padding: "This will definitely cause incorrect validation accuracy"."""
    samples, world_size = list(range(10)), 4

    def of_torch(*, drop_last):
        sampler = torch.utils.data.DistributedSampler
        ranks = [sampler(samples, world_size, rank, shuffle=False, drop_last=drop_last) for rank in range(world_size)]
        return sorted(sample for rank in ranks for sample in rank)

    assert of_torch(drop_last=False) == sorted([*samples, 0, 1])
    assert of_torch(drop_last=True) == samples[:8]
    given_, _ = part_of(make_eval_cursor(10, global_batch_size=4), world_size, None)
    assert sorted(sample for rank in given_ for batch in rank for sample in batch) == samples


def test_threads_are_given_their_own_shares():
    cursor = make_eval_cursor(5, global_batch_size=3)
    found = run_threads(2, lambda collectives: list(eval_batches(cursor, list, collectives=collectives)))
    assert found == [[[0, 1], [3]], [[2], [4]]]


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"length": -1},
        {"length": 2.0},
        {"length": True},
        {"global_batch_size": 0},
        {"global_batch_size": None},
        {"next_index": -1},
        {"next_index": 11},
    ],
)
def test_a_position_that_cannot_be_is_refused_by_its_field(fields):
    """G02: also if the position comes from a checkpoint, where the class itself checks nothing."""
    whole = {"length": 10, "global_batch_size": 4, "next_index": 0, **fields}
    with pytest.raises(InvalidState, match=rf"DistributedEvalCursor\.{next(iter(fields))}"):
        make_eval_cursor(whole.pop("length"), **whole)
    bad = DistributedEvalCursor(**{"length": 10, "global_batch_size": 4, "next_index": 0, **fields})
    with pytest.raises(InvalidState, match=rf"DistributedEvalCursor\.{next(iter(fields))}"):
        eval_batches(bad, list)


def test_a_position_in_other_samples_is_refused():
    cursor = make_eval_cursor(10, global_batch_size=4)
    assert check_eval_cursor(cursor, length=10) is cursor
    with pytest.raises(DataPositionMismatch, match="9 samples"):
        check_eval_cursor(cursor, length=9)


def test_arguments_that_cannot_be_are_refused():
    cursor = make_eval_cursor(10, global_batch_size=4)
    for call in (lambda: cursor.share(2, 2), lambda: cursor.advance(-1), lambda: eval_batches(cursor, list, limit=0)):
        with pytest.raises(InvalidArgument):
            call()


def test_a_cursor_is_a_node_of_three_ints_and_goes_into_a_checkpoint_and_back():
    cursor = make_eval_cursor(10, global_batch_size=4, next_index=8)
    assert tree.leaves(cursor) == [10, 4, 8]
    store = MemoryStore()
    state = TrainState(trainer=make_progress(step=3), extra={"evaluation": {"cursor": cursor}})
    save(state, store)
    like = state.evolve(extra={"evaluation": {"cursor": make_eval_cursor(10, global_batch_size=4)}})
    assert load(store, like=like).extra["evaluation"]["cursor"] == cursor
    assert attrs.asdict(cursor) == {"length": 10, "global_batch_size": 4, "next_index": 8}
