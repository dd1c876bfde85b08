"""The exact sum of one tensor, as an integer in units of 2**-1074: every float is a multiple of this smallest float64.

On a CPU, sums of rows in float64 are exact if the exponents of the terms lie close enough together, which is checked first. Terms
that lie farther apart go through bins of 32 bits, which hold any float. Subnormal terms are read as bits and never by arithmetic,
because a CPU may be set to flush them to 0 (`torch.set_flush_denormal`).

Source: bins after Kulisch's long accumulator ("Computer Arithmetic and Validity", 2008); the bound for the rows is that of an
error-free sum: multiples of 2**g below 2**(g + 53) add up in float64 without rounding.
"""

import torch

from trainfold.core.exact.float_bits import FORMATS
from trainfold.core.exact.limbs import LIMB_BITS, LIMBS, MASK, UNIT

KINDS = 3  # NaN, infinity, minus infinity
BLOCK = 1 << 19  # terms that a CPU adds at a time, so that its buffers stay small and in its cache
_PLAIN = {
    torch.float32: (1, 254),
    torch.float64: (100, 2000),
}  # the range of exponent fields for which arithmetic in float64 is safe
_SMALLEST_ROW = 4
_SHORT_ROW = 64  # below it, sums of columns are faster; which terms share a sum does not matter
_LARGEST_ROW = 1024
_GLANCE = 1024
_BUFFER = 1 << 17  # fresh pages for a copy of all terms would cost more than everything else
_WINDOW = 53 - 10
_MOST_WINDOWS = 12
_NO_OVERFLOW = 1 << 9  # this many integers of 53 bits and a sign have a sum that fits into int64


def sum_of_ints(terms: torch.Tensor) -> int:
    """The sum of the elements of an integer or boolean tensor.

    Examples:
        >>> sum_of_ints(torch.tensor([2**62, 2**62, 2**62])) == 3 * 2**62
        True
    """
    upper, lower = halves_of_ints(terms.reshape(-1))
    return (int(upper.sum()) << LIMB_BITS) + int(lower.sum())


def halves_of_ints(terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers or booleans split into ``upper * 2**32 + lower``, as int64; only ``upper`` has a sign.

    Examples:
        >>> halves_of_ints(torch.tensor([2**32 + 7, -1]))
        (tensor([ 1, -1]), tensor([         7, 4294967295]))
    """
    is_unsigned = terms.dtype == torch.uint64
    whole = terms.view(torch.int64) if is_unsigned else terms.to(torch.int64)
    upper = whole >> LIMB_BITS
    return (upper & MASK if is_unsigned else upper), whole & MASK


def sum_of_floats(terms: torch.Tensor, *, digits: int) -> int | None:
    """The sum of a tensor on the CPU in units of 2**-1074, or None if terms are not plain or too far apart.

    Args:
        terms: float32 or float64, one dimension, contiguous, not empty, at most ``BLOCK`` elements.
        digits: significant bits of a term: 53, 24, or fewer for terms from a narrower dtype.

    Examples:
        >>> sum_of_floats(torch.tensor([0.5, 0.25]), digits=24) == 3 << (UNIT - 2)
        True
        >>> sum_of_floats(torch.tensor([0.1, -0.1, 0.5], dtype=torch.float64), digits=53) == 1 << (UNIT - 1)
        True
        >>> sum_of_floats(torch.tensor([1.0, float("inf")]), digits=24) is None
        True
    """
    form = FORMATS[terms.dtype]
    low, high = _magnitudes(terms)
    if high == 0:
        return 0
    least, most = low >> form.fraction_bits, high >> form.fraction_bits
    first, last = _PLAIN[terms.dtype]
    if not first <= least <= most <= last:
        return None
    bias = form.exponents // 2 - 1
    grid = least - bias - digits  # every term is a multiple of 2**grid, and below 2**(most - bias)
    spare = 53 - digits - (most - least)
    if spare >= 0 and 1 << spare >= _SMALLEST_ROW:
        return _rows(terms, 1 << spare, grid) << (UNIT + grid)
    return _windows(terms, grid, most - bias)


def is_plain(terms: torch.Tensor) -> torch.Tensor:
    """Which terms of a float32 or float64 tensor have exponents that `sum_of_floats` accepts; zeros do.

    Examples:
        >>> is_plain(torch.tensor([1.0, 0.0, 1e-40, float("nan")]))
        tensor([ True,  True, False, False])
    """
    form = FORMATS[terms.dtype]
    bits = terms.view(form.bits) & form.without_sign
    first, last = _PLAIN[terms.dtype]
    exponent = bits >> form.fraction_bits
    return (bits == 0) | ((exponent >= first) & (exponent <= last))


def _windows(terms: torch.Tensor, grid: int, top: int) -> int | None:
    """The sum, in units of 2**-1074, of multiples of 2**grid below 2**top, or None if that takes too many passes.

    Terms are split at fixed places: adding and subtracting 1.5 * 2**(k + 52) leaves the nearest multiple of 2**k, and the
    remainder is exact. Rows of 1024 such parts of 43 bits add up in float64 without rounding.

    Source: the extraction of Rump, Ogita and Oishi, "Accurate floating-point summation" (2008).
    """
    places = list(range(top - _WINDOW, grid, -_WINDOW - 1))
    if len(places) > _MOST_WINDOWS:
        return None
    sums: list[list[torch.Tensor]] = [[] for _ in range(len(places) + 1)]
    rest, upper = torch.empty(2, min(len(terms), _BUFFER), dtype=torch.float64, device="cpu")
    for block in torch.split(terms, _BUFFER):
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
    found = [terms[:whole].view(-1, _LARGEST_ROW).sum(1)] if whole else []
    return [*found, terms[whole:].sum(0, keepdim=True)] if whole < len(terms) else found


def _rows(terms: torch.Tensor, longest: int, grid: int) -> int:
    """The sum, in units of 2**grid, of multiples of it; rows of up to ``longest`` terms do not round in float64."""
    row, count = min(longest, _LARGEST_ROW), len(terms)
    if count <= longest:
        return int(float(terms.sum(dtype=torch.float64)) * 2.0**-grid)
    whole = count // row * row
    size = max(row, _BUFFER // row * row)
    buffer, sums = torch.empty(min(size, whole), dtype=torch.float64, device="cpu"), []
    for block in torch.split(terms[:whole], size):
        part = buffer[: len(block)].copy_(block)
        sums.append(part.view(row, -1).sum(0) if row < _SHORT_ROW else part.view(-1, row).sum(1))
    total = _sum_of_multiples(torch.cat(sums), grid)
    return total + (_rows(terms[whole:], row, grid) if whole < count else 0)


def _magnitudes(terms: torch.Tensor) -> tuple[int, int]:
    """The bits of the smallest magnitude that is not 0, and of the largest: magnitudes order as their bits do."""
    form = FORMATS[terms.dtype]
    bits, largest = terms.view(form.bits), form.without_sign
    if len(bits) > _GLANCE and not bool((bits[:_GLANCE] <= 0).any()):
        low, high = _ends(bits)
        if low > 0:
            return low, high
    magnitudes = bits & largest
    low, high = _ends(magnitudes)
    if low == 0:
        wrapped, _ = _ends(magnitudes.add_(largest))  # zeros become the largest, and the others keep their order
        low = (wrapped - largest) & (2 * largest + 1)
    return low, high


def _ends(bits: torch.Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(bits)
    return int(low), int(high)


def _sum_of_multiples(values: torch.Tensor, grid: int) -> int:
    """The sum, in units of 2**grid, of float64 multiples of it, none larger than 2**(grid + 53)."""
    whole = values.mul(2.0**-grid).to(torch.int64)
    return int(whole.sum()) if len(whole) <= _NO_OVERFLOW else sum_of_ints(whole)


def bins_of(terms: torch.Tensor, columns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The amount that terms add to each limb, and the counts of NaN, infinity and minus infinity; does not wait for a device.

    Args:
        terms: integers, booleans, or floats of a dtype in `FORMATS`, of any shape and on any device. At most 2**28: each adds
            less than 2**34 to a limb, so no limb exceeds 63 bits.
        columns: the number of sums; terms go to them in turn, like the elements of a last dimension.

    Returns:
        int64[columns, LIMBS], where limb i counts 2**(32 * i - 1074), and int64[columns, 3].

    Examples:
        >>> limbs, special = bins_of(torch.tensor([5.0, -2.0, float("inf")]))
        >>> units = sum(limb << (LIMB_BITS * place) for place, limb in enumerate(limbs[0].tolist()))
        >>> units == 3 << UNIT, special.tolist()
        (True, [[0, 1, 0]])
    """
    flat = terms.reshape(-1)
    if not flat.is_floating_point():
        return _bins_of_ints(flat, columns)
    form = FORMATS[flat.dtype]
    bits = flat.view(form.bits).to(torch.int64)
    exponent = (bits >> form.fraction_bits) & form.exponents
    fraction = bits & form.fractions
    is_finite, is_negative = exponent != form.exponents, bits < 0
    mantissa = torch.where(exponent > 0, fraction | (1 << form.fraction_bits), fraction) * is_finite
    mantissa = torch.where(is_negative, -mantissa, mantissa)
    place = (exponent - 1).clamp_min(0) * is_finite + form.place
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
