"""The exact sum of one tensor, as an integer in units of 2**-1074, the smallest float64; every float is such a multiple.

On a CPU, sums of rows in float64 are exact where the exponents of the terms lie close enough together, which is seen before
they are taken; what lies farther apart goes through bins of 32 bits, which hold any float.

Source: bins after Kulisch's long accumulator ("Computer Arithmetic and Validity", 2008); the bound for the rows is that of an
error-free sum: multiples of 2**g below 2**(g + 53) add up in float64 without rounding.
"""

import torch

UNIT = 1074
LIMB_BITS = 32
LIMBS = 68  # the 2,098 bits of float64, and 78 more for as many terms as anybody has
MASK = (1 << LIMB_BITS) - 1
MAX_TERMS = 1 << 28  # each adds less than 2**34 to a limb, so that no limb leaves 63 bits
_FRACTION_BITS = 52
_WITHOUT_SIGN = (1 << 63) - 1
_EXPONENTS = 100, 2000  # fields of float64 for which neither a sum of a row nor a power of two for its grid overflows
_SMALLEST_ROW = 32
_LARGEST_ROW = 1024


def sum_of_ints(terms: torch.Tensor) -> int:
    """The sum of the elements of an integer or boolean tensor.

    Examples:
        >>> sum_of_ints(torch.tensor([2**62, 2**62, 2**62])) == 3 * 2**62
        True
    """
    flat = terms.detach().reshape(-1).to(torch.int64)
    return (int((flat >> LIMB_BITS).sum()) << LIMB_BITS) + int((flat & MASK).sum())


def sum_of_floats(terms: torch.Tensor) -> int | None:
    """The sum of a float32 tensor on the CPU in units of 2**-1074, or None if its exponents lie too far apart for it.

    Args:
        terms: float32, one dimension, contiguous, not empty.

    Examples:
        >>> sum_of_floats(torch.tensor([0.5, 0.25])) == 3 << (UNIT - 2)
        True
        >>> sum_of_floats(torch.tensor([1e30, 1e-30])) is None
        True
    """
    low, high = _magnitudes(terms)
    if high == 0:
        return 0
    if high >= 255 << 23:  # an infinity or a NaN
        return None
    least, most = max(low >> 23, 1), max(high >> 23, 1)  # exponents; subnormals have that of the smallest normal
    spare = 53 - 24 - (most - least)
    if 1 << max(spare, 0) < _SMALLEST_ROW:
        return None
    grid = least - 150  # every term is a multiple of 2**grid
    return _rows(terms, 1 << spare, grid) << (UNIT + grid)


def sum_of_doubles(terms: torch.Tensor) -> int | None:
    """The same of a float64 tensor: each term is taken apart into its upper 26 bits and its lower 27, and both have room.

    Examples:
        >>> sum_of_doubles(torch.tensor([0.1, -0.1, 0.5], dtype=torch.float64)) == 1 << (UNIT - 1)
        True
    """
    bits = terms.view(torch.int64) & _WITHOUT_SIGN
    low, high = (int(value) for value in torch.aminmax(bits))
    if high == 0:
        return 0
    if low == 0:
        low = int(torch.where(bits == 0, high, bits).amin())
    least, most = low >> _FRACTION_BITS, high >> _FRACTION_BITS
    spare = 53 - 27 - (most - least)
    if spare < 1 or not _EXPONENTS[0] <= least <= most <= _EXPONENTS[1]:
        return None
    upper = (terms.view(torch.int64) & ~((1 << 27) - 1)).view(torch.float64)
    grid, row = least - 1075, 1 << spare
    return (_rows(upper, row, grid + 27) << 27) + _rows(terms - upper, row, grid) << (UNIT + grid)


def _rows(terms: torch.Tensor, longest: int, grid: int) -> int:
    """The sum, in units of 2**grid, of multiples of it; rows of as many of them as ``longest`` do not round in float64."""
    row = min(longest, _LARGEST_ROW)
    whole = len(terms) // row * row
    total = _sum_of_multiples(terms[:whole].view(-1, row).sum(1, dtype=torch.float64), grid)
    return total + _sum_of_multiples(terms[whole:].double(), grid)


def _magnitudes(terms: torch.Tensor) -> tuple[int, int]:
    """The bits of the smallest magnitude that is not 0, and of the largest: magnitudes are ordered as their bits are."""
    low, high = (int(value) for value in torch.aminmax(terms.view(torch.int32)))
    if low > 0:
        return low, high
    bits = terms.abs().view(torch.int32)
    if low < 0:  # a sign
        low, high = (int(value) for value in torch.aminmax(bits))
    if low == 0 and high > 0:
        wrapped = int(bits.add_(0x7FFFFFFF).amin())  # zeros become the largest of all, and the others keep their order
        low = (wrapped - 0x7FFFFFFF) & MASK
    return low, high


def _sum_of_multiples(values: torch.Tensor, grid: int) -> int:
    """The sum, in units of 2**grid, of float64 multiples of it below 2**(grid + 53)."""
    parts = values.mul(2.0**-grid).to(torch.int64)
    half = 27
    return (int((parts >> half).sum()) << half) + int((parts & ((1 << half) - 1)).sum())


def bins_of(terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What terms of any float dtype add to each limb, and how many are NaN, infinity, minus infinity; nobody waits for a device.

    Args:
        terms: at most ``MAX_TERMS`` elements, on any device.

    Returns:
        int64[LIMBS], where limb i counts 2**(32 * i - 1074), and int64[3].

    Examples:
        >>> limbs, special = bins_of(torch.tensor([1.0, -1.0, float("inf")]))
        >>> bool(limbs.any()), special.tolist()
        (False, [0, 1, 0])
    """
    values = terms.detach().reshape(-1).double()
    bits = values.view(torch.int64)
    exponent = (bits >> _FRACTION_BITS) & 0x7FF
    fraction = bits & ((1 << _FRACTION_BITS) - 1)
    is_finite, is_negative = exponent != 0x7FF, bits < 0
    mantissa = torch.where(exponent > 0, fraction | (1 << _FRACTION_BITS), fraction) * is_finite
    mantissa = torch.where(is_negative, -mantissa, mantissa)
    place = (exponent - 1).clamp_min(0) * is_finite
    limb, offset = place >> 5, place & 31
    low, high = (mantissa & MASK) << offset, (mantissa >> LIMB_BITS) << offset
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=values.device)
    limbs.index_add_(0, limb, low & MASK)
    limbs.index_add_(0, limb + 1, ((low >> LIMB_BITS) & MASK) + (high & MASK))
    limbs.index_add_(0, limb + 2, high >> LIMB_BITS)
    infinite = ~is_finite & (fraction == 0)
    counts = (~is_finite & (fraction != 0), infinite & ~is_negative, infinite & is_negative)
    return limbs, torch.stack([count.sum() for count in counts])
