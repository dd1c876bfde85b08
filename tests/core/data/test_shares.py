"""Shares of a range and of a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.data.shares import even_split, shard_of
from trainfold.core.errors import InvalidArgument, InvalidBatch

sizes = st.integers(0, 300)
worlds = st.integers(1, 40)


@given(n=st.integers(0, 2**62), world_size=worlds)
def test_the_ranges_are_in_order_cover_everything_and_differ_by_at_most_one(n, world_size):
    ranges = even_split(n, world_size)
    assert [r.start for r in ranges] == [0, *(r.stop for r in ranges[:-1])]
    assert ranges[-1].stop == n
    lengths = [r.stop - r.start for r in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(n=sizes, world_size=worlds)
def test_the_sizes_are_those_of_numpy(n, world_size):
    assert [list(r) for r in even_split(n, world_size)] == [
        a.tolist() for a in np.array_split(np.arange(n), world_size)
    ]


@given(n=sizes, world_size=worlds)
def test_the_shares_of_all_ranks_concatenated_are_the_batch(n, world_size):
    batches: list[Any] = [list(range(n)), tuple(range(n)), range(n)]
    for batch in batches:
        shares = [shard_of(batch, rank, world_size) for rank in range(world_size)]
        assert [sample for share in shares for sample in share] == list(batch)
        assert {type(share) for share in shares} == {type(batch)}
    tensors = {"x": torch.arange(n), "y": [np.arange(2 * n).reshape(n, 2)]}
    shares = [shard_of(tensors, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([share["x"] for share in shares]), tensors["x"])
    assert np.array_equal(np.concatenate([share["y"][0] for share in shares]), tensors["y"][0])


def test_a_share_of_a_tensor_is_a_view():
    batch = torch.zeros(6, 2)
    shard_of(batch, 1, 3).fill_(1)
    assert batch.sum() == 4


def test_a_list_of_tensors_is_a_tree_and_a_list_of_numbers_is_a_sequence_of_samples():
    x, y = shard_of([torch.arange(4), torch.arange(4)], 1, 2)
    assert x.tolist() == y.tolist() == [2, 3]
    assert shard_of([1, 2, 3, 4], 1, 2) == [3, 4]


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(3), "y": torch.zeros(4)}, {"x": torch.zeros(3), "n": 3}, torch.tensor(1.0)]
)
def test_a_ragged_batch_is_refused_with_every_size(batch):
    with pytest.raises(InvalidBatch, match="dimension 0"):
        shard_of(batch, 0, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    with pytest.raises(InvalidArgument, match="rank"):
        shard_of([1, 2], rank, world_size)


@pytest.mark.parametrize(("n", "world_size"), [(-1, 1), (3, 0)])
def test_a_split_that_cannot_be_is_refused(n, world_size):
    with pytest.raises(InvalidArgument, match="world_size"):
        even_split(n, world_size)
