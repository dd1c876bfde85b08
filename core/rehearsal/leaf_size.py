"""`LeafSize`: the size of a difference between two tensors: how far apart, how many elements, and which first."""

from collections.abc import Iterable
from typing import Final, TypeAlias, final

import attrs
import torch

from trainfold.core.layout.slices import Box

_DOUBLE_BYTES: Final = 8
Piece: TypeAlias = tuple[Box, int, torch.Tensor, torch.Tensor]
"""A box of the whole tensor, the first element in the box, and the elements of both tensors from there on, flat."""


@final
@attrs.frozen
class LeafSize:
    """How large the difference between two tensors of one dtype and shape is.

    Attributes:
        largest: the largest absolute difference of two elements; None if it is not finite.
        differing: how many elements differ in any bit.
        elements: how many there are.
        first: the index of the first element that differs.
        expected: its value in the first tensor.
        found: its value in the second.
    """

    largest: float | None
    differing: int
    elements: int
    first: tuple[int, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        size = "not finite" if self.largest is None else f"{self.largest:.3g}"
        return f"{size}, in {self.differing} of {self.elements}"


def size_of(pieces: Iterable[Piece]) -> LeafSize | None:
    """Measure a difference piece by piece, so that no tensor has to fit into memory; None for equal bits.

    Law: any cut into pieces gives the same result.

    Args:
        pieces: of all boxes, in any order.

    Examples:
        >>> one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 3.0, 3.0])
        >>> found = size_of([(((0, 2), (0, 2)), 0, one, other)])
        >>> print(found, found.first, found.expected, found.found)
        1, in 2 of 4 (0, 1) 2 2.5
        >>> size_of([(((0, 4),), 0, one, one)]) is None
        True
    """
    differing = elements = 0
    largest: float | None = 0.0
    firsts: list[tuple[tuple[int, ...], str, str]] = []
    for box, start, one, other in pieces:
        elements += len(one)
        unlike = _bytes(one).ne(_bytes(other)).any(dim=1)
        count = int(unlike.sum())
        if not count:
            continue
        differing += count
        apart = _apart(one[unlike], other[unlike])
        largest = None if largest is None or apart is None else max(largest, apart)
        at = int(unlike.nonzero()[0])
        firsts.append((_index(box, start + at), _text(one[at]), _text(other[at])))
    return LeafSize(largest, differing, elements, *min(firsts)) if firsts else None


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.contiguous().view(torch.uint8).reshape(len(flat), -1)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float | None:
    wide = torch.complex128 if one.is_complex() else torch.float64
    try:
        apart = (one.to(wide) - other.to(wide)).abs().max()
    except (RuntimeError, NotImplementedError):  # a dtype that torch cannot convert, such as packed floats of 4 bits
        return None
    return float(apart) if bool(torch.isfinite(apart)) else None


def _index(box: Box, flat: int) -> tuple[int, ...]:
    """The index of an element of a box in the whole tensor."""
    found: list[int] = []
    for low, high in reversed(box):
        flat, at = divmod(flat, high - low)
        found.append(low + at)
    return tuple(reversed(found))


def _text(element: torch.Tensor) -> str:
    try:
        value = element.item()
    except (RuntimeError, NotImplementedError):
        return str(element.reshape(1).view(torch.uint8).tolist())
    return f"{value:.9g}" if isinstance(value, float) and element.element_size() < _DOUBLE_BYTES else f"{value}"
