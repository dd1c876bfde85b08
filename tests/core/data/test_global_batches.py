"""Batches of all ranks together, and the shares of each rank."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.data.global_batches import global_batches
from trainfold.core.errors import InvalidArgument

worlds = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=8)


@given(length=st.integers(9, 300), worlds=worlds)
@example(length=9, worlds=[(2, 2, 1), (1, 0, 9)])
def test_any_sequence_of_worlds_and_batch_sizes_reads_each_sample_of_an_epoch_exactly_once(length, worlds):
    """G06, A02: a world in which a replica would be without a share cannot take over; the run goes on in the one before it."""
    start, read, batches = 0, [], None
    for replicas, more, steps in [*worlds, (1, 0, length)]:
        wanted = global_batches(length, replicas + more, replicas=replicas)
        batches = wanted if batches is None or not wanted.without_share(start) else batches
        for _ in range(steps):
            positions = batches.positions(start)
            shares = [batches.share(positions, replica) for replica in range(batches.replicas)]
            assert start == length or all(shares), "no replica is without a sample"
            read += [position for share in shares for position in share]
            start = positions.stop
    while start < length:
        positions = batches.positions(start)
        read, start = read + list(positions), positions.stop
    assert read == list(range(length))


@given(
    length=st.integers(9, 300),
    replicas=st.integers(1, 9),
    more=st.integers(0, 30),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_the_count_of_batches_is_the_number_that_are_read(length, replicas, more, drop_last, data):
    size = min(replicas + more, length)
    batches = global_batches(length, size, replicas=replicas, drop_last=drop_last)
    start = data.draw(st.integers(0, length))
    counted, found = batches.count(start), 0
    while len(positions := batches.positions(start)):
        assert len(positions) == size or (not drop_last and positions.stop == length)
        start, found = positions.stop, found + 1
    assert found == counted
    assert length - start < (size if drop_last else 1), "nothing is left out unless that was declared"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"batch_size": 3}, "batch_size"),
        ({"length": 2}, "GlobalBatchSampler.dataset"),
        ({"length": 7, "drop_last": True}, "GlobalBatchSampler.dataset"),
        ({"replicas": 0}, "GlobalBatchSampler.replicas"),
        ({"drop_last": 1}, "GlobalBatchSampler.drop_last"),
    ],
)
def test_batches_that_leave_a_replica_without_a_sample_are_refused(arguments, where):
    wanted = {"length": 100, "batch_size": 8, "replicas": 4, **arguments}
    with pytest.raises(InvalidArgument) as error:
        global_batches(wanted.pop("length"), wanted.pop("batch_size"), **wanted)
    assert error.value.where == where
