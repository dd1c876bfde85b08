"""Shares: how to split a range or a batch over the ranks of a world."""

from typing import Any

import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidBatch
from trainfold.core.layout.world import make_world


def even_split(n: int, world_size: int) -> tuple[range, ...]:
    """Split ``range(n)`` into one contiguous range for each rank.

    Law: the ranges are disjoint, in rank order, and cover ``range(n)``; their sizes differ by at most one.

    Args:
        n: number of samples, >= 0.
        world_size: number of ranks, >= 1.

    Returns:
        ``world_size`` ranges; the first ``n % world_size`` are one longer.

    Raises:
        InvalidArgument: if ``n < 0`` or ``world_size < 1``.

    Examples:
        >>> even_split(5, 2)
        (range(0, 3), range(3, 5))

    Source: the sizes of ``numpy.array_split``.
    """
    if n < 0 or world_size < 1:
        raise InvalidArgument(
            "even_split",
            expected="n >= 0 and world_size >= 1",
            found=f"n={n}, world_size={world_size}",
            fix="count samples and ranks in whole units",
        )
    return tuple(_share(n, rank, world_size) for rank in range(world_size))


def _share(n: int, rank: int, world_size: int) -> range:
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return range(start, start + size + (rank < longer))


def shard_of(batch: Any, rank: int, world_size: int) -> Any:
    """Return one rank's share of a global batch.

    Law: the shares of all ranks, concatenated in rank order, are the batch. Their sizes differ by at most one; with more
    ranks than samples, some are empty.

    Args:
        batch: an array or tensor, split along dimension 0; a pytree of them with one size of dimension 0; or a list,
            tuple or range without any array, which is a sequence of samples.
        rank: this rank, from 0.
        world_size: the number of ranks that share the batch.

    Returns:
        The share, with the type of the batch; tensors and arrays are views.

    Raises:
        InvalidArgument: unless ``0 <= rank < world_size``.
        InvalidBatch: if the leaves of the batch differ in dimension 0, or one has no dimensions.

    Examples:
        >>> shard_of([10, 11, 12, 13, 14], rank=1, world_size=2)
        [13, 14]
        >>> shard_of({"x": torch.arange(4), "y": torch.zeros(4, 2)}, rank=0, world_size=4)["x"]
        tensor([0])
    """
    make_world(rank, world_size)
    flat = [batch] if isinstance(batch, range) else tree.leaves(batch)
    if isinstance(batch, list | tuple | range) and not any(
        isinstance(leaf, torch.Tensor | np.ndarray) for leaf in flat
    ):
        share = _share(len(batch), rank, world_size)
        return batch[share.start : share.stop]
    sizes = {path: _dim_0(leaf) for path, leaf in tree.named_leaves(batch, "batch")}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise InvalidBatch(
            "batch",
            expected="tensors or arrays that share dimension 0",
            found=f"sizes {sizes}",
            fix="stack the samples of each leaf along dimension 0, or pass a list of samples",
        )
    (size,) = set(sizes.values())
    assert size is not None
    share = _share(size, rank, world_size)
    return tree.map(lambda leaf: leaf[share.start : share.stop], batch)


def _dim_0(leaf: object) -> int | None:
    if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0:
        return int(leaf.shape[0])
    return None
