"""Counts: int64 tensors that are added up, of any lengths, on any device, without waiting for one."""

import torch

__all__ = ["add_counts", "beside", "merge_counts", "no_counts"]


def no_counts(*shape: int) -> torch.Tensor:
    """Zeros, where counting begins: on the CPU; they move to where the first batch is.

    Examples:
        >>> no_counts(2)
        tensor([0, 0])
    """
    return torch.zeros(shape, dtype=torch.int64)


def add_counts(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two counts; a shorter one has zeros at the end of each dimension.

    Law: associative and commutative, and ``no_counts()`` of as many dimensions, of any length, is neutral.

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
    """The same on the CPU: to merge is where a device is waited for.

    Examples:
        >>> merge_counts(torch.tensor(1), torch.tensor(2))
        tensor(3)
    """
    return add_counts(one.cpu(), other.cpu())


def beside(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors on one device: the first one's, unless that is the CPU.

    Nobody waits for it: a copy from the CPU's memory is staged before the call returns, and none goes back to it.

    Examples:
        >>> [tensor.device.type for tensor in beside(torch.zeros(1), torch.zeros(1, device="meta"))]
        ['meta', 'meta']
    """
    if one.device == other.device:
        return one, other
    device = other.device if one.device.type == "cpu" else one.device
    return one.to(device, non_blocking=True), other.to(device, non_blocking=True)


def _padded(counts: torch.Tensor, shape: list[int]) -> torch.Tensor:
    grown = counts.new_zeros(shape)
    grown[tuple(slice(0, size) for size in counts.shape)] = counts
    return grown
