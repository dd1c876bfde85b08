"""Counts: int64 tensors that are added up, of any lengths, on any device, without waiting for one."""

import torch

from trainfold.core.errors import InvalidArgument

__all__ = ["add_counts", "beside", "check_counts", "merge_counts", "no_counts"]


def no_counts(*shape: int) -> torch.Tensor:
    """Zeros, where counting begins: on the CPU; they move to where the first batch is.

    Examples:
        >>> no_counts(2)
        tensor([0, 0])
    """
    return torch.zeros(shape, dtype=torch.int64, device="cpu")


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


def check_counts(where: str, counts: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse counts of another shape, where it says what was counted: padded and added up they would be false.

    Raises:
        InvalidArgument: naming both shapes.

    Examples:
        >>> check_counts("Confusion(2)", no_counts(3, 3), (2, 2))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: Confusion(2): expected an accumulator with counts [2, 2], found [3, 3]; \
give it what an equal metric has seen
    """
    if tuple(counts.shape) != shape:
        raise InvalidArgument(
            where,
            expected=f"an accumulator with counts {list(shape)}",
            found=list(counts.shape),
            fix="give it what an equal metric has seen",
        )


def beside(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors on one device: the first one's, unless that is the CPU.

    Nobody waits for what the device computes, and nothing goes back to the CPU. The values are those of the moment of the call,
    whatever is written into the CPU's memory afterwards: memory that is not pinned is staged before the call returns; pinned
    memory is read later, when a loader may have refilled it, and is copied first.

    Examples:
        >>> [tensor.device.type for tensor in beside(torch.zeros(1), torch.zeros(1, device="meta"))]
        ['meta', 'meta']
    """
    if one.device == other.device:
        return one, other
    device = other.device if one.device.type == "cpu" else one.device
    return _sent(one, device), _sent(other, device)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    kept = tensor.clone() if tensor.device.type == "cpu" and tensor.is_pinned() else tensor
    return kept.to(device, non_blocking=True)


def _padded(counts: torch.Tensor, shape: list[int]) -> torch.Tensor:
    grown = counts.new_zeros(shape)
    grown[tuple(slice(0, size) for size in counts.shape)] = counts
    return grown
