"""`blocks_of`: a large tensor some rows at a time, so that what is computed from it needs memory for a block and not for all of it."""

import math
from collections.abc import Iterator

import torch

__all__ = ["BLOCK", "blocks_of"]

BLOCK = 1 << 20  # elements: enough to hide what a call costs, and few beside what was given


def blocks_of(tensor: torch.Tensor, size: int = BLOCK, *, keep: int = 0) -> Iterator[torch.Tensor]:
    """The rows of a tensor in order, at most so many at a time, however its elements lie in memory.

    A tensor whose dimensions cannot be viewed as one (``logits[:, :-1]``) is not copied as a whole; at most a block is.

    Args:
        tensor: of any shape.
        size: rows of a block, >= 1.
        keep: how many dimensions at the end make a row; the others are flattened.

    Yields:
        Tensors ``[rows, *kept]``; one that is empty for a tensor without elements.

    Examples:
        >>> [block.tolist() for block in blocks_of(torch.arange(12).view(2, 3, 2)[:, :-1], 3)]
        [[0, 1, 2], [3], [6, 7, 8], [9]]
        >>> [tuple(block.shape) for block in blocks_of(torch.zeros(2, 3, 5), 4, keep=1)]
        [(4, 5), (2, 5)]
    """
    outer = tensor.dim() - keep
    tail = tensor.shape[outer:]
    if outer < 2 or tensor.numel() == 0 or tensor.is_contiguous():
        yield from torch.split(tensor.reshape(math.prod(tensor.shape[:outer]), *tail), size)
        return
    inner = math.prod(tensor.shape[1:outer])
    if inner > size:
        for part in tensor:
            yield from blocks_of(part, size, keep=keep)
        return
    for part in torch.split(tensor, size // inner):
        yield part.reshape(len(part) * inner, *tail)
