"""Where the part of a DTensor lies: what its leaf says is what its memory holds, for tensors that are cut twice and unevenly.

The ranks are imagined: torch's fake process group makes each one in turn in this process, and nothing is sent.
"""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfold.adapters.sharded import dtensor
from trainfold.adapters.sharded.dtensor import leaf_of
from trainfold.core.layout.slices import check_cover


@contextmanager
def imagined_rank(rank, size):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports torch's compiler

        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # torch's memory of meshes, and ours, are of one rank
        dtensor._cut.cache_clear()


def held(shape, sizes, cut_by_tensor_parallelism, cut_by_fsdp):
    """What each rank of a mesh of data x tensor parallelism holds of a tensor that counts its elements, as (leaf, values)."""
    found = []
    for rank in range(math.prod(sizes)):
        with imagined_rank(rank, math.prod(sizes)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            whole = torch.arange(float(math.prod(shape))).view(shape)
            module = torch.nn.Module()
            placements = [Shard(cut_by_tensor_parallelism)]
            module.weight = torch.nn.Parameter(distribute_tensor(whole, mesh["tp"], placements, src_data_rank=None))
            fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(cut_by_fsdp))
            found.append((leaf_of(module.weight, "w"), whole))
    return found


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 12, 13])
def test_uneven_rows_of_tensor_parallelism_and_fsdp_lie_where_their_leaf_says(rows):
    """Row X01: with 7 rows on 3 x 2 ranks torch's own rule names rows that the rank does not hold; such a model could not be saved."""
    parts = held((rows,), (3, 2), 0, 0)
    for leaf, whole in parts:
        assert torch.equal(leaf.tensor, whole[leaf.box[0][0] : leaf.box[0][1]])
    check_cover("w", list(dict.fromkeys(leaf.box for leaf, _ in parts if leaf.tensor.numel())) or [((0, 0),)], (rows,))


def test_rows_and_columns_cut_by_different_axes_lie_where_their_leaf_says():
    for leaf, whole in held((5, 3), (3, 2), 1, 0):
        (top, bottom), (left, right) = leaf.box
        assert torch.equal(leaf.tensor, whole[top:bottom, left:right])
