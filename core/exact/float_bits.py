"""`FloatBits`: the bit layout of a float dtype, so that floats can be read as integers, without rounding or flushing.

With `torch.set_flush_denormal`, or a library built with -ffast-math, a CPU flushes subnormal numbers to 0 whenever it computes with
them, conversions between dtypes included. Reading the bits is not affected.

Source: IEEE 754-2019, 3.4.
"""

import struct
from collections.abc import Iterable
from typing import final

import attrs
import torch

from trainfold.core.exact.limbs import UNIT


@final
@attrs.frozen
class FloatBits:
    """The bit layout of one dtype.

    Attributes:
        bits: the integer dtype of the same size.
        fraction_bits: how many bits of the fraction are stored.
        exponents: the exponent field with all bits set, which NaN and infinities have.
        place: the smallest number above 0 is 2**(place - 1074).
    """

    bits: torch.dtype
    fraction_bits: int
    exponents: int
    place: int

    @property
    def fractions(self) -> int:
        """The mask of the fraction."""
        return (1 << self.fraction_bits) - 1

    @property
    def without_sign(self) -> int:
        """The mask of all bits but the sign."""
        return (self.exponents << self.fraction_bits) | self.fractions


FORMATS = {
    torch.float64: FloatBits(torch.int64, 52, 0x7FF, 0),
    torch.float32: FloatBits(torch.int32, 23, 0xFF, UNIT - 149),
    torch.bfloat16: FloatBits(torch.int16, 7, 0xFF, UNIT - 133),
    torch.float16: FloatBits(torch.int16, 10, 0x1F, UNIT - 24),
}


def units_of_bits(patterns: Iterable[int], form: FloatBits) -> tuple[int, tuple[int, int, int]]:
    """The sum of floats, given as signed integers with the same bits, in units of 2**-1074; and the counts of NaN, inf and -inf.

    Examples:
        >>> units_of_bits(torch.tensor([1.5, 0.5]).view(torch.int32).tolist(), FORMATS[torch.float32]) == (
        ...     2 << UNIT,
        ...     (0, 0, 0),
        ... )
        True
    """
    total, nans, above, below = 0, 0, 0, 0
    width, fractions, exponents = form.fraction_bits, form.fractions, form.exponents
    for pattern in patterns:
        fraction, exponent = pattern & fractions, (pattern >> width) & exponents
        if exponent == exponents:
            if fraction:
                nans += 1
            elif pattern < 0:
                below += 1
            else:
                above += 1
            continue
        units = (fraction | (fractions + 1)) << (exponent - 1) if exponent else fraction
        total += -units if pattern < 0 else units
    return total << form.place, (nans, above, below)


def bits_of(number: float) -> int:
    """The bits of a float64 as a signed integer.

    Examples:
        >>> bits_of(5e-324), bits_of(-0.0) == -(2**63)
        (1, True)
    """
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits
