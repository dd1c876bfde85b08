"""Shared storage: which tensors have bytes in common, so that a write to one would change the other (B19)."""

from collections.abc import Iterable

import torch

from trainfold.core.errors import SharedStorage


def first_overlap(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """The first two named tensors, in the order of their addresses, whose bytes overlap; None if all are apart.

    A tensor counts from its first byte to its last; views of one storage that lie beside each other are apart.

    Examples:
        >>> flat = torch.zeros(4)
        >>> first_overlap([("a", flat[:2]), ("b", flat[2:])]) is None
        True
        >>> first_overlap([("a", flat[:3]), ("b", flat[2:])])
        ('a', 'b')
    """
    spans = sorted(
        (str(value.device), value.data_ptr(), value.data_ptr() + _extent_bytes(value), name)
        for name, value in tensors
        if value.layout == torch.strided and value.numel() and not value.is_meta
    )
    end, owner, device = 0, "", ""
    for place, start, stop, name in spans:
        if place == device and start < end:
            return owner, name
        if place != device or stop > end:
            end, owner, device = stop, name, place
    return None


def check_apart(tensors: Iterable[tuple[str, torch.Tensor]], mend: str) -> None:
    """Refuse tensors that share bytes.

    Raises:
        SharedStorage: naming the first two.
    """
    found = first_overlap(tensors)
    if found is not None:
        first, second = found
        raise SharedStorage(second, expected="a storage of its own", found=f"the storage of {first}", mend=mend)


def _extent_bytes(tensor: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
