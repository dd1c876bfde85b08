"""Counts, which are int64 tensors of any length on any device, and `blocks_of`, which hands a large tensor to them in parts."""

import math
from collections.abc import Iterator

import torch

from trainfold.core.errors import InvalidArgument

__all__ = ["BLOCK", "add_counts", "beside", "blocks_of", "check_counts", "merge_counts", "no_counts"]

BLOCK = 1 << 20  # elements: enough to hide the cost of a call, and little memory next to the tensor itself


def no_counts(*shape: int) -> torch.Tensor:
    """Zeros on the CPU; adding the first batch moves them to its device.

    Examples:
        >>> no_counts(2)
        tensor([0, 0])
    """
    return torch.zeros(shape, dtype=torch.int64, device="cpu")


def add_counts(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two counts; the shorter one is padded with zeros at the end of each dimension.

    Law: associative and commutative, and ``no_counts()`` with as many dimensions, of any length, is neutral.

    Examples:
        >>> add_counts(torch.tensor([1, 2, 3]), torch.tensor([10]))
        tensor([11,  2,  3])
    """
    one, other = beside(one, other)
    if one.shape == other.shape:
        return one + other
    shape = [max(sides) for sides in zip(one.shape, other.shape, strict=True)]
    return _padded(one, shape) + _padded(other, shape)


def merge_counts(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two counts on the CPU; a merge may wait for a device.

    Examples:
        >>> merge_counts(torch.tensor(1), torch.tensor(2))
        tensor(3)
    """
    return add_counts(one.cpu(), other.cpu())


def check_counts(where: str, counts: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse counts of different shapes if the shape has a meaning: padding and adding them would give wrong counts.

    Raises:
        InvalidArgument: naming both shapes.

    Examples:
        >>> check_counts("Confusion(2)", no_counts(3, 3), (2, 2))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: Confusion(2): expected an accumulator with counts [2, 2], found [3, 3]; \
pass the accumulator of an equal metric
    """
    if tuple(counts.shape) != shape:
        raise InvalidArgument(
            where,
            expected=f"an accumulator with counts {list(shape)}",
            found=list(counts.shape),
            fix="pass the accumulator of an equal metric",
        )


def beside(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors on one device: the first one's, unless that is the CPU.

    The call does not wait for the device, and copies nothing back to the CPU. It reads the values that the tensors have now,
    whatever is written into the CPU's memory afterwards: memory that is not pinned is staged before the call returns; pinned
    memory is read later, when a loader may have refilled it, so it is copied first.

    Examples:
        >>> [tensor.device.type for tensor in beside(torch.zeros(1), torch.zeros(1, device="meta"))]
        ['meta', 'meta']
    """
    if one.device == other.device:
        return one, other
    device = other.device if one.device.type == "cpu" else one.device
    return _sent(one, device), _sent(other, device)


def blocks_of(tensor: torch.Tensor, size: int = BLOCK, *, keep: int = 0) -> Iterator[torch.Tensor]:
    """The rows of a tensor in order, at most ``size`` at a time, so that temporaries need memory for one block only.

    A tensor whose dimensions cannot be viewed as one (``logits[:, :-1]``) is copied block by block, never as a whole.

    Args:
        tensor: of any shape.
        size: rows of a block, >= 1.
        keep: how many dimensions at the end make a row; the others are flattened.

    Yields:
        Tensors ``[rows, *kept]``; one empty tensor if the input has no elements.

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


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    kept = tensor.clone() if tensor.device.type == "cpu" and tensor.is_pinned() else tensor
    return kept.to(device, non_blocking=True)


def _padded(counts: torch.Tensor, shape: list[int]) -> torch.Tensor:
    grown = counts.new_zeros(shape)
    grown[tuple(slice(0, size) for size in counts.shape)] = counts
    return grown
