"""`distance`: how far apart two tensors are: how many elements differ, and by how many units in the last place."""

from typing import Final, final

import attrs
import torch

from trainfold.core.tensor_memory import byte_view

_CHUNK: Final = 1 << 20  # elements
_LEAST: Final = -(2**63)
_WIDE: Final = {torch.int64, torch.uint64}  # float64 has not all of their values
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@attrs.frozen
class Distance:
    """How far apart two tensors of one dtype and shape are.

    Attributes:
        differing: how many elements have other bits.
        total: how many there are.
        max_ulps: the most representable numbers from one to the other, of floating elements that are numbers on both sides; None for other dtypes, and if
            none differ. 0 if only signs of zeros do.
        max_abs: the largest difference of values, rounded to float64; None for complex numbers and if no numbers differ.
        nans: differing elements of which one is not a number.
    """

    differing: int
    total: int
    max_ulps: int | None = None
    max_abs: float | None = None
    nans: int = 0

    def __str__(self) -> str:
        if not self.differing:
            return "equal"
        parts = [f"{self.differing:,} of {self.total:,} differ"]
        parts += [] if self.max_ulps is None else [f"by up to {self.max_ulps:,} ulps"]
        parts += [] if self.max_abs is None else [f"{self.max_abs:.3g}"]
        parts += [f"{self.nans:,} of them not numbers"] if self.nans else []
        return ", ".join(parts)


def distance(one: torch.Tensor, other: torch.Tensor) -> Distance:
    """Compare two tensors bit by bit, some elements at a time.

    Law: it is symmetric, and equal bits are equal, whatever they mean.

    Args:
        one: any tensor on the CPU.
        other: one of the same dtype and shape.

    Examples:
        >>> one = torch.tensor([1.0, 2.0])
        >>> print(distance(one, one), "|", distance(one, torch.nextafter(one, torch.tensor([9.0, 2.0]))))
        equal | 1 of 2 differ, by up to 1 ulps, 1.19e-07
    """
    assert (one.dtype, one.shape) == (other.dtype, other.shape), "the caller compares these first"
    size, dtype = one.element_size(), one.dtype
    a, b = byte_view(one), byte_view(other)
    found = Distance(0, one.numel())
    for start in range(0, one.numel(), _CHUNK):
        stop = min(start + _CHUNK, one.numel())
        pair = a[start * size : stop * size], b[start * size : stop * size]
        if not torch.equal(*pair):
            found = _added(found, *pair, dtype)
    return found


def _added(found: Distance, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Distance:
    differ = (a.view(-1, dtype.itemsize) != b.view(-1, dtype.itemsize)).any(dim=1)
    count = int(differ.sum())
    ulps, size, nans = found.max_ulps, found.max_abs, 0
    if not dtype.is_complex:
        left, right = (_of_dtype(each, dtype)[differ] for each in (a, b))
        x, y = left.to(torch.float64), right.to(torch.float64)
        are_numbers = ~(x.isnan() | y.isnan())
        nans = count - int(are_numbers.sum())
        if nans < count:
            if dtype in _WIDE:
                most = float(_farthest(_in_order(left), _in_order(right)))
            else:
                apart = (x - y).abs()[are_numbers]
                most = float(
                    torch.where(apart.isnan(), 0.0, apart).max()
                )  # infinities of one sign have other bits in no dtype
            size = max(size or 0.0, most)
        if dtype.is_floating_point and nans < count and dtype.itemsize in _WORDS:
            ulps = max(ulps or 0, _farthest(_in_order(left)[are_numbers], _in_order(right)[are_numbers]))
    return Distance(found.differing + count, found.total, ulps, size, found.nans + nans)


def _of_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.clone().view(dtype)  # a part may lie at any address


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the values, one apart where floats are neighbours, and of integers their difference apart."""
    bits = values.view(_WORDS[values.element_size()]).to(torch.int64)
    if values.dtype == torch.uint64:
        return bits ^ _LEAST
    if not values.is_floating_point():
        return bits
    least = -(2 ** (8 * values.element_size() - 1))
    return torch.where(bits < 0, least - bits, bits)


def _farthest(one: torch.Tensor, other: torch.Tensor) -> int:
    """The largest difference of 64-bit numbers. It may need one bit more than they have, so differences wrap, and negative ones are the largest."""
    apart = torch.where(one >= other, one - other, other - one)
    wrapped = apart[apart < 0]
    return int(wrapped.max()) + 2**64 if wrapped.numel() else int(apart.max())
