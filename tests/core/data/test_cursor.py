"""The order of an epoch, and the position in an epoch."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.data.cursor import DataCursor, check_cursor, make_cursor, sample_order
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import (
    CheckpointHostile,
    DataPositionMismatch,
    InvalidArgument,
    InvalidState,
    ResumeRefused,
)
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import TrainState, make_progress

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)
lengths = st.integers(1, 400)


# --- the order -------------------------------------------------------------------------------------------------------


@given(seed=seeds, epoch=epochs, n=st.integers(0, 400))
def test_an_order_is_a_permutation(seed, epoch, n):
    order = sample_order(seed, epoch, n)
    assert sorted(order) == list(range(n)) == order.inverse(order[:]).tolist()


@given(seed=seeds, epoch=epochs, n=st.integers(1, 2**63 - 1), data=st.data())
@example(seed=0, epoch=0, n=2**63 - 1, data=None)
@example(seed=0, epoch=0, n=2**53 + 1, data=None)
@example(seed=0, epoch=0, n=1, data=None)
def test_one_index_and_many_indices_give_the_same_and_the_inverse_undoes_them(seed, epoch, n, data):
    order = sample_order(seed, epoch, n)
    some = [0, n // 2, n - 1] if data is None else data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    one_by_one = [order[i] for i in some]
    assert all(0 <= j < n for j in one_by_one)
    assert one_by_one == order[np.array(some)].tolist() == order[torch.tensor(some)].tolist()
    assert [order.inverse(j) for j in one_by_one] == some == order.inverse(np.array(one_by_one)).tolist()


@pytest.mark.parametrize(
    ("seed", "epoch", "n", "wanted"),
    [
        (0, 0, 10, [1, 3, 8, 9, 4, 2, 5, 0]),
        (0, 1, 10, [9, 6, 5, 2, 3, 0, 4, 1]),
        (1, 0, 10, [6, 9, 8, 3, 1, 7, 4, 2]),
        (7, 3, 1000, [912, 492, 426, 253, 246, 554, 663, 679]),
        (
            18446744073709551615,
            1099511627776,
            1000000000000,
            [
                511670880333,
                286137635224,
                508584398329,
                768177780522,
                847293840392,
                291339225999,
                9082335169,
                159982723757,
            ],
        ),
        (
            42,
            0,
            9007199254740993,
            [
                8864796716014897,
                3367008819157996,
                7501121906418120,
                7855739771496093,
                7424178247150259,
                4454334730502000,
                2795751104239799,
                7137979254982377,
            ],
        ),
        (
            5,
            5,
            9223372036854775807,
            [
                6371695150638220566,
                4601172942703873465,
                2305028584213917800,
                401817467223736474,
                3452501158164009274,
                7357689249243415810,
                5526902262550111741,
                3190323913097256788,
            ],
        ),
        (0, 0, 1, [0]),
    ],
)
def test_the_order_is_the_same_on_every_machine_and_in_every_version(seed, epoch, n, wanted):
    """G01: checkpoints rely on these values; changing them changes the format."""
    assert sample_order(seed, epoch, n)[0 : min(n, 8)].tolist() == wanted


def test_a_trillion_samples_need_no_table():
    order = sample_order(1, 2, 10**12)
    tracemalloc.start()
    order[5 * 10**11]
    order[10**11 : 10**11 + 1000]
    make_cursor(10**12, next_index=10**11).batch(1000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_orders_of_three_to_five_samples_are_uniform_over_seeds_and_over_epochs():
    """Chi-squared over all permutations; the keys are fixed, so the test cannot be flaky."""
    for n, cells in ((3, 6), (4, 24), (5, 120)):
        for orders in (
            (sample_order(seed, 0, n) for seed in range(1500)),
            (sample_order(9, epoch, n) for epoch in range(1500)),
        ):
            counts: dict[tuple[int, ...], int] = {}
            for order in orders:
                found = tuple(order[i] for i in range(n))
                counts[found] = counts.get(found, 0) + 1
            expected = 1500 / cells
            chi = sum((count - expected) ** 2 / expected for count in counts.values()) + expected * (
                cells - len(counts)
            )
            assert abs(chi - (cells - 1)) < 4 * (2 * (cells - 1)) ** 0.5, (n, chi)


def test_neighbours_are_not_neighbours_after_the_shuffle():
    order = sample_order(3, 0, 100_000)[:]
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02
    fixed = int((order == np.arange(100_000)).sum())
    assert fixed < 10
    other_epoch, other_seed = sample_order(3, 1, 100_000)[:], sample_order(4, 0, 100_000)[:]
    assert max((order == other_epoch).sum(), (order == other_seed).sum()) < 10


@pytest.mark.parametrize("index", [-1, 10, np.array([0, 10]), torch.tensor([-1]), np.array([0.5])])
def test_a_position_outside_the_order_is_an_index_error(index):
    with pytest.raises(IndexError, match="position"):
        sample_order(0, 0, 10)[index]


@pytest.mark.parametrize("arguments", [(-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, -1), (0, 0, 2**63), (True, 0, 1)])
def test_an_order_of_impossible_arguments_is_refused_by_name(arguments):
    with pytest.raises(InvalidArgument, match=r"sample_order\.(seed|epoch|n)"):
        sample_order(*arguments)


# --- the position ----------------------------------------------------------------------------------------------------


@given(
    seed=seeds,
    n=lengths,
    plan=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 64)), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_resharding_neither_loses_nor_repeats_a_sample(seed, n, plan):
    """However often the world size and the batch size change, each sample of an epoch is read exactly once."""
    cursor = make_cursor(n, seed=seed)
    seen: list[int] = []
    turn = 0
    while cursor.epoch == 0:
        world_size, batch_size = plan[turn % len(plan)]
        turn += 1
        ids = cursor.batch(batch_size)
        for rank in range(world_size):
            seen.extend(shard_of(ids, rank, world_size).tolist())
        cursor = cursor.advance(len(ids))
    assert sorted(seen) == list(range(n))
    assert seen == list(sample_order(seed, 0, n))
    assert (cursor.epoch, cursor.next_index) == (1, 0)


@given(seed=seeds, n=lengths, sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_batches_across_epochs_read_every_epoch_exactly_once_too(seed, n, sizes):
    """G03: after the last sample, the position is 0 of epoch + 1."""
    cursor = make_cursor(n, seed=seed)
    stream: list[int] = []
    for size in sizes:
        ids = cursor.batch_across(size)
        assert len(ids) == size
        stream.extend(ids.tolist())
        cursor = cursor.advance(size)
    for epoch in range(-(-len(stream) // n)):
        part = stream[epoch * n : (epoch + 1) * n]
        assert part == list(sample_order(seed, epoch, n))[: len(part)]
    assert cursor.epoch * n + cursor.next_index == len(stream)
    assert 0 <= cursor.next_index < n


@given(n=lengths, steps=st.lists(st.integers(0, 900), max_size=6))
def test_advancing_in_parts_is_advancing_once(n, steps):
    cursor = make_cursor(n)
    for step in steps:
        cursor = cursor.advance(step)
    assert cursor == make_cursor(n).advance(sum(steps))


def test_an_unshuffled_run_reads_positions():
    cursor = make_cursor(10, next_index=4)
    assert list(cursor.positions(4)) == [4, 5, 6, 7]
    assert list(cursor.advance(4).positions(4)) == [8, 9]


def test_a_cursor_is_a_node_of_four_ints():
    assert tree.leaves(make_cursor(10, seed=3, epoch=1, next_index=4)) == [1, 4, 10, 3]
    assert tree.paths(make_cursor(10), "dataset") == [
        "dataset.epoch",
        "dataset.next_index",
        "dataset.length",
        "dataset.seed",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 0},
        {"length": -1},
        {"length": 2.0},
        {"length": 10, "next_index": 10},
        {"length": 10, "next_index": -1},
        {"length": 10, "epoch": -1},
        {"length": 10, "seed": -1},
        {"length": True},
    ],
)
def test_a_position_outside_the_data_is_refused(fields):
    """G02: negative, past the end, or not a whole number of samples."""
    with pytest.raises(InvalidState, match=r"state\.dataset\."):
        make_cursor(**fields)


def test_the_error_for_a_position_at_the_end_says_how_the_end_is_written():
    with pytest.raises(InvalidState, match="epoch \\+ 1, next_index 0"):
        make_cursor(10, next_index=10)


def test_a_position_in_a_dataset_of_another_length_is_refused():
    """G02: the position is checked against the size of the dataset."""
    with pytest.raises(DataPositionMismatch, match="99 samples"):
        check_cursor(make_cursor(100), length=99)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": -3}, "epoch"),
        ({"next_index": 99}, "next_index"),
        ({"next_index": 8}, "next_index"),
        ({"next_index": -1}, "next_index"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_saved_position_that_cannot_be_is_not_resumed(fields, field):
    """G02: the class accepts any values, since trees put specs in it; values from a checkpoint are checked."""
    store = MemoryStore()
    good = {"epoch": 0, "next_index": 0, "length": 8, "seed": 0}
    state = TrainState(trainer=make_progress(step=3), dataset=DataCursor(**{**good, **fields}))
    save(state, store)
    like = state.evolve(dataset=make_cursor(8, seed=state.dataset.seed if field != "seed" else 0))
    found = plan(store, like=state, step=3)  # before any tensor byte is read
    assert isinstance(found, Refusal)
    assert [reason.error for reason in found.reasons] == ["CheckpointHostile"]
    with pytest.raises(ResumeRefused, match=rf"(?s)step-00000003: state\.dataset\.{field}: .*reset=") as caught:
        load(store, like=state, step=3)
    assert caught.value.refusal.exit_code == CheckpointHostile.exit_code
    with pytest.raises(ResumeRefused, match=rf"state\.dataset\.{field}"):
        load(store, like=state)
    anew = load(store, like=like, reset={"dataset": "the position was lost"}, policy={"dataset": "adapt"})
    assert anew.dataset == like.dataset
    assert anew.trainer == state.trainer


def test_a_position_that_is_no_whole_number_is_not_saved():
    store = MemoryStore()
    with pytest.raises(InvalidState, match=r"state\.dataset\.next_index: expected an int"):
        save(TrainState(trainer=make_progress(step=3), dataset=DataCursor(0, 1.5, 8, 0)), store)
    assert store.list() == []


def test_a_saved_position_that_can_be_is_resumed():
    store = MemoryStore()
    state = TrainState(trainer=make_progress(step=3), dataset=make_cursor(8, epoch=2, next_index=7))
    save(state, store)
    assert load(store, like=state.evolve(dataset=make_cursor(8))).dataset == state.dataset


@pytest.mark.parametrize("call", [lambda c: c.batch(0), lambda c: c.batch_across(0), lambda c: c.advance(-1)])
def test_sizes_that_cannot_be_are_refused(call):
    with pytest.raises(InvalidArgument):
        call(make_cursor(10))
