"""Microbatches: a batch split along dimension 0, as evenly as possible."""

from typing import Any, TypeVar

import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidBatch

B = TypeVar("B")


def split(batch: B | list[B], accumulate: int) -> tuple[list[B], int]:
    """Split a batch into microbatches.

    Args:
        batch: a tree whose tensors share dimension 0; or a list of such trees, which are the microbatches.
        accumulate: the number of microbatches to make; a list may have fewer (the last window of a stream), but not more.

    Returns:
        The microbatches, and their total number of samples.

    Raises:
        InvalidBatch: if there are no samples, fewer than microbatches, or tensors of different lengths.

    Examples:
        >>> micro, samples = split({"x": torch.arange(5)}, 2)
        >>> [part["x"].tolist() for part in micro], samples
        ([[0, 1, 2], [3, 4]], 5)
        >>> split([{"x": torch.arange(3)}, {"x": torch.arange(1)}], 2)[1]
        4

    Source: the sizes of ``numpy.array_split``.
    """
    if isinstance(batch, list):
        return _ready_made(batch, accumulate)
    if accumulate == 1:
        return [batch], _length(_leaves(batch), lambda: tree.paths(batch, "batch"), "batch")
    flat, spec = tree.flatten(batch)
    samples = _length(flat, lambda: tree.paths(batch, "batch"), "batch")
    if samples < accumulate:
        raise InvalidBatch(
            "batch",
            expected=f"at least {accumulate} samples, one for each microbatch",
            found=samples,
            fix="lower accumulate, or give larger batches",
        )
    size, longer = divmod(samples, accumulate)
    micro = []
    start = 0
    for index in range(accumulate):
        count = size + (index < longer)
        parts = [leaf.narrow(0, start, count) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        micro.append(tree.unflatten(spec, parts))
        start += count
    return micro, samples


def _ready_made(batch: list[B], accumulate: int) -> tuple[list[B], int]:
    if not 1 <= len(batch) <= accumulate:
        raise InvalidBatch(
            "batch",
            expected=f"a list of 1 to accumulate = {accumulate} microbatches",
            found=f"a list of {len(batch)}",
            fix="a list is read as ready-made microbatches; make the batch itself a tuple or a dict, "
            "or make the step with the right accumulate",
        )
    samples = 0
    for index, part in enumerate(batch):
        where = f"batch[{index}]"
        samples += _length(tree.leaves(part), lambda part=part, where=where: tree.paths(part, where), where)
    return batch, samples


def _leaves(batch: Any) -> list[Any]:
    """The leaves. A plain dict or tuple of tensors is read directly, because the walk of a tree would slow a short step."""
    parts = list(batch.values()) if type(batch) is dict else batch if type(batch) is tuple else None
    if parts and all(type(part) is torch.Tensor for part in parts):
        return list(parts)
    return tree.leaves(batch)


def _length(flat: list[Any], paths: Any, where: str) -> int:
    lengths = {leaf.shape[0] if leaf.dim() else None for leaf in flat if isinstance(leaf, torch.Tensor)}
    if len(lengths) == 1:
        (length,) = lengths
        if length:
            return int(length)
    found: object = f"no tensors, but {sorted({type(leaf).__name__ for leaf in flat})}"
    if lengths:
        found = {
            path: tuple(leaf.shape) for path, leaf in zip(paths(), flat, strict=True) if isinstance(leaf, torch.Tensor)
        }
    raise InvalidBatch(
        where,
        expected="a tree of tensors with one length > 0 in dimension 0",
        found=found,
        fix="stack samples along dimension 0; give dicts, tuples or registered nodes of tensors",
    )
