"""Shared storage: which tensors have bytes in common, so that a write to one changes the other."""

from collections.abc import Iterable

import torch

from trainfold.core.errors import SharedStorage

Named = Iterable[tuple[str, torch.Tensor]]


def first_overlap(written: Named, others: Named = ()) -> tuple[str, str] | None:
    """Return the first two tensors whose bytes overlap, in the order of their addresses; None if all are disjoint.

    A tensor spans from its first byte to its last; adjacent views of one storage are disjoint.

    Args:
        written: tensors that may not overlap each other.
        others: tensors that may overlap each other, but not ``written``.

    Examples:
        >>> flat = torch.zeros(4)
        >>> first_overlap([("a", flat[:2]), ("b", flat[2:])]) is None
        True
        >>> first_overlap([("a", flat[:3]), ("b", flat[2:])])
        ('a', 'b')
    """
    spans = [(*_span(value), name, True) for name, value in written if _has_bytes(value)]
    spans += [(*_span(value), name, False) for name, value in others if _has_bytes(value)]
    ends: dict[bool, tuple[str, int, str]] = {True: ("", 0, ""), False: ("", 0, "")}  # of `written`, and of `others`
    for device, start, stop, name, is_written in sorted(spans):
        for group in (True, False) if is_written else (True,):
            place, end, owner = ends[group]
            if place == device and start < end:
                return owner, name
        place, end, _ = ends[is_written]
        if place != device or stop > end:
            ends[is_written] = (device, stop, name)
    return None


def check_apart(written: Named, others: Named = (), *, fix: str) -> None:
    """Refuse tensors that share bytes.

    Raises:
        SharedStorage: naming the first two.
    """
    found = first_overlap(written, others)
    if found is not None:
        first, second = found
        raise SharedStorage(second, expected="its own storage", found=f"the storage of {first}", fix=fix)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (steps + 1) * tensor.element_size()
