"""Live leaves beside saved ones: which part of a saved value this rank needs, and why a value has no such part."""

from typing import Any

import torch

from trainfold.core.layout.shard import Shard


def memory_of(leaf: Any) -> torch.Tensor:
    """Return the tensor in this rank's memory behind a leaf.

    Examples:
        >>> memory_of(Shard(torch.ones(1), (2,), (1,)))
        tensor([1.])
    """
    found: torch.Tensor = leaf.tensor if isinstance(leaf, Shard) else leaf
    return found


def part_for(value: Any, wanted: Any) -> torch.Tensor:
    """Return the part of a saved value that a live leaf holds; no copy. `cut_differs` finds values that have no such part.

    Args:
        value: a tensor, which is whole, or a `Shard`.
        wanted: the live leaf.

    Examples:
        >>> part_for(torch.arange(4), Shard(torch.zeros(2), (4,), (2,)))
        tensor([2, 3])
    """
    if isinstance(wanted, Shard) and not isinstance(value, Shard):
        whole: torch.Tensor = value
        return whole[tuple(slice(start, stop) for start, stop in wanted.box)]
    return memory_of(value)


def cut_differs(value: Any, wanted: Any) -> str | None:
    """Return how a saved value is cut, in words, if that is not how the live leaf is cut; None if its part is there.

    Examples:
        >>> whole, half = torch.zeros(4), Shard(torch.zeros(2), (4,), (2,))
        >>> cut_differs(whole, half), cut_differs(half, half), cut_differs(half, whole)
        (None, None, 'only [2:4] of [4]')
    """
    if not isinstance(value, Shard):
        return None
    box = wanted.box if isinstance(wanted, Shard) else tuple((0, size) for size in value.shape)
    if value.box == box:
        return None
    return f"only [{', '.join(f'{start}:{stop}' for start, stop in value.box)}] of {list(value.shape)}"


def as_whole(value: Any) -> Any:
    """Return a tensor without values for a shard, of the shape of the whole; anything else as it is.

    Examples:
        >>> as_whole(Shard(torch.zeros(2), (4,), (2,))).shape
        torch.Size([4])
    """
    if isinstance(value, Shard):
        return torch.empty(value.shape, dtype=value.tensor.dtype, device="meta")
    return value
