"""The exact sum of one tensor, as an integer in units of 2**-1074, the smallest float64; every float is such a multiple.

On a CPU, sums of rows in float64 are exact where the exponents of the terms lie close enough together, which is seen before
they are taken; what lies farther apart goes through bins of 32 bits, which hold any float.

Source: bins after Kulisch's long accumulator ("Computer Arithmetic and Validity", 2008); the bound for the rows is that of an
error-free sum: multiples of 2**g below 2**(g + 53) add up in float64 without rounding.
"""

import torch

from trainfold.core.limbs import LIMB_BITS, LIMBS, MASK, UNIT

KINDS = 3  # NaN, infinity, minus infinity
MAX_TERMS = 1 << 28  # each adds less than 2**34 to a limb, so that no limb leaves 63 bits
_FRACTION_BITS = 52
_WITHOUT_SIGN = (1 << 63) - 1
_EXPONENTS = 100, 2000  # fields of float64 for which neither a sum of a row nor a power of two for its grid overflows
_SMALLEST_ROW = 32
_LARGEST_ROW = 1024
_GLANCE = 1024
_BLOCK = 1 << 19
_BLOCK_OF_WINDOWS = 1 << 19
_WINDOW = 53 - 10
_MOST_WINDOWS = 4
_WITHOUT_SIGN_32 = _NO_ZERO = 0x7FFFFFFF
_TO_HALVES = 1.5 * 2.0 ** (52 + 27)


def sum_of_ints(terms: torch.Tensor) -> int:
    """The sum of the elements of an integer or boolean tensor.

    Examples:
        >>> sum_of_ints(torch.tensor([2**62, 2**62, 2**62])) == 3 * 2**62
        True
    """
    upper, lower = halves_of_ints(terms.reshape(-1))
    return (int(upper.sum()) << LIMB_BITS) + int(lower.sum())


def halves_of_ints(terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers or booleans taken apart: ``upper * 2**32 + lower``, as int64; only ``upper`` has a sign.

    Examples:
        >>> halves_of_ints(torch.tensor([2**32 + 7, -1]))
        (tensor([ 1, -1]), tensor([         7, 4294967295]))
    """
    is_unsigned = terms.dtype == torch.uint64
    whole = terms.view(torch.int64) if is_unsigned else terms.to(torch.int64)
    upper = whole >> LIMB_BITS
    return (upper & MASK if is_unsigned else upper), whole & MASK


def sum_of_floats(terms: torch.Tensor, *, digits: int = 24) -> int | None:
    """The sum of a float32 tensor on the CPU in units of 2**-1074, or None if its exponents lie too far apart for it.

    Args:
        terms: float32, one dimension, contiguous, not empty.
        digits: significant bits of a term: 24, or fewer where they come from a narrower dtype.

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
    grid = least - 126 - digits  # every term is a multiple of 2**grid, and below 2**(most - 126)
    spare = 53 - digits - (most - least)
    if 1 << max(spare, 0) >= _SMALLEST_ROW:
        return _rows(terms, 1 << spare, grid) << (UNIT + grid)
    return _windows(terms, grid, most - 126)


def sum_of_doubles(terms: torch.Tensor) -> int | None:
    """The same of a float64 tensor.

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
    if not _EXPONENTS[0] <= least <= most <= _EXPONENTS[1]:
        return None
    return _windows(terms, least - 1075, most - 1022)


def _windows(terms: torch.Tensor, grid: int, top: int) -> int | None:
    """The sum, in units of 2**-1074, of multiples of 2**grid below 2**top, or None if that takes too many passes.

    Terms are taken apart at fixed places: adding and taking away 1.5 * 2**(k + 52) leaves the multiple of 2**k that is nearest,
    and the rest is exact. Rows of 1024 such parts of 43 bits add up in float64 without rounding.

    Source: the extraction of Rump, Ogita and Oishi, "Accurate floating-point summation" (2008).
    """
    places = list(range(top - _WINDOW, grid, -_WINDOW - 1))
    if len(places) > _MOST_WINDOWS:
        return None
    sums: list[list[torch.Tensor]] = [[] for _ in range(len(places) + 1)]
    size = min(len(terms), _BLOCK_OF_WINDOWS)
    rest, upper = torch.empty(2, size, dtype=torch.float64)
    for block in torch.split(terms, _BLOCK_OF_WINDOWS):
        rest, upper = rest[: len(block)].copy_(block), upper[: len(block)]
        for place, rows in zip(places, sums[:-1], strict=True):
            shift = 1.5 * 2.0 ** (place + 52)
            torch.add(rest, shift, out=upper).sub_(shift)
            rest.sub_(upper)
            rows.extend(_sums_of_rows(upper))
        sums[-1].extend(_sums_of_rows(rest))
    units = 0
    for place, rows in zip([*places, grid], sums, strict=True):
        units += _sum_of_multiples(torch.cat(rows), place) << (UNIT + place)
    return units


def _sums_of_rows(terms: torch.Tensor) -> list[torch.Tensor]:
    whole = len(terms) // _LARGEST_ROW * _LARGEST_ROW
    return [terms[:whole].view(-1, _LARGEST_ROW).sum(1), terms[whole:].sum(0, keepdim=True)]


def _rows(terms: torch.Tensor, longest: int, grid: int) -> int:
    """The sum, in units of 2**grid, of multiples of it; rows of as many of them as ``longest`` do not round in float64."""
    row = min(longest, _LARGEST_ROW)
    whole = len(terms) // row * row
    total = _sum_of_multiples(terms[:whole].view(-1, row).sum(1, dtype=torch.float64), grid)
    return total + _sum_of_multiples(terms[whole:].double(), grid)


def _magnitudes(terms: torch.Tensor) -> tuple[int, int]:
    """The bits of the smallest magnitude that is not 0, and of the largest: magnitudes are ordered as their bits are.

    In blocks, with one buffer: fresh pages for a large copy would cost more than all the rest.
    """
    bits = terms.view(torch.int32)
    if not bool((bits[:_GLANCE] <= 0).any()):
        low, high = (int(value) for value in torch.aminmax(bits))
        if low > 0:
            return low, high
    low, high = _NO_ZERO, 0
    buffer = torch.empty(min(_BLOCK, len(bits)), dtype=torch.int32)
    for block in torch.split(bits, _BLOCK):
        part = torch.bitwise_and(block, _WITHOUT_SIGN_32, out=buffer[: len(block)])
        least, most = (int(value) for value in torch.aminmax(part))
        if least == 0:
            least = (int(part.add_(_NO_ZERO).amin()) - _NO_ZERO) & MASK  # wraps: zeros become the largest of all
        low, high = min(low, least or _NO_ZERO), max(high, most)
    return low, high


def _sum_of_multiples(values: torch.Tensor, grid: int) -> int:
    """The sum, in units of 2**grid, of at most 2**27 float64 multiples of it below 2**(grid + 53).

    Adding and taking away 1.5 * 2**79 rounds to multiples of 2**27; both parts then add up without rounding.

    Source: the extraction of Rump, Ogita and Oishi, "Accurate floating-point summation" (2008).
    """
    parts = values.mul(2.0**-grid)
    upper = (parts + _TO_HALVES).sub_(_TO_HALVES)
    return int(upper.sum()) + int(parts.sub_(upper).sum())


def bins_of(terms: torch.Tensor, columns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What terms add to each limb, and how many are NaN, infinity, minus infinity; nobody waits for a device.

    Args:
        terms: of any real dtype and shape, at most ``MAX_TERMS`` elements, on any device.
        columns: terms go to so many sums in turn, as those of the last dimension do.

    Returns:
        int64[columns, LIMBS], where limb i counts 2**(32 * i - 1074), and int64[columns, 3].

    Examples:
        >>> limbs, special = bins_of(torch.tensor([1.0, -1.0, float("inf")]))
        >>> bool(limbs.any()), special.tolist()
        (False, [[0, 1, 0]])
    """
    flat = terms.reshape(-1)
    if not flat.is_floating_point():
        return _bins_of_ints(flat, columns)
    values = flat.double()
    bits = values.view(torch.int64)
    exponent = (bits >> _FRACTION_BITS) & 0x7FF
    fraction = bits & ((1 << _FRACTION_BITS) - 1)
    is_finite, is_negative = exponent != 0x7FF, bits < 0
    mantissa = torch.where(exponent > 0, fraction | (1 << _FRACTION_BITS), fraction) * is_finite
    mantissa = torch.where(is_negative, -mantissa, mantissa)
    place = (exponent - 1).clamp_min(0) * is_finite
    limb, offset = place >> 5, place & 31
    if columns > 1:
        limb = limb + (torch.arange(len(flat), device=flat.device) % columns) * LIMBS
    low, high = (mantissa & MASK) << offset, (mantissa >> LIMB_BITS) << offset
    limbs = torch.zeros(columns * LIMBS, dtype=torch.int64, device=flat.device)
    limbs.index_add_(0, limb, low & MASK)
    limbs.index_add_(0, limb + 1, ((low >> LIMB_BITS) & MASK) + (high & MASK))
    limbs.index_add_(0, limb + 2, high >> LIMB_BITS)
    infinite = ~is_finite & (fraction == 0)
    counts = (~is_finite & (fraction != 0), infinite & ~is_negative, infinite & is_negative)
    special = torch.stack([count.view(-1, columns).sum(0) for count in counts], 1)
    return limbs.view(columns, LIMBS), special


def _bins_of_ints(flat: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    upper, lower = (half.view(-1, columns).sum(0) for half in halves_of_ints(flat))
    limbs = torch.zeros((columns, LIMBS), dtype=torch.int64, device=flat.device)
    first, shift = divmod(UNIT, LIMB_BITS)
    for limb, amount in ((first, lower), (first + 1, upper)):
        limbs[:, limb] += (amount & MASK) << shift
        limbs[:, limb + 1] += (amount >> LIMB_BITS) << shift
    return limbs, torch.zeros((columns, KINDS), dtype=torch.int64, device=flat.device)
