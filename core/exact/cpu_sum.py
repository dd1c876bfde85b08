"""`sum_on_cpu`: the exact sum of a tensor of any size on the CPU, block by block, each by the fastest exact method."""

from typing import TypeAlias

import torch

from trainfold.core.exact.float_bits import FORMATS, units_of_bits
from trainfold.core.exact.limbs import UNIT, units_of
from trainfold.core.exact.terms import BLOCK, bins_of, is_plain, sum_of_floats, sum_of_ints

Special: TypeAlias = tuple[int, int, int]

NO_SPECIAL: Special = (0, 0, 0)
BLOCK_OF_BINS = 1 << 16  # bins need a dozen integers for each term
_FEW = 32  # up to this many elements, Python adds faster than torch
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def sum_on_cpu(terms: torch.Tensor) -> tuple[int, Special]:
    """The sum of the finite terms, in units of 2**-1074, and how many terms are NaN, infinity, minus infinity.

    Args:
        terms: on the CPU, of any shape; integers, booleans, or floats of a dtype in `FORMATS`.

    Examples:
        >>> sum_on_cpu(torch.tensor([1.5, 0.5, float("inf")])) == (2 << UNIT, (0, 1, 0))
        True
    """
    if terms.numel() <= _FEW:
        return _sum_of_few(terms)
    flat = terms.reshape(-1)
    total, special = 0, NO_SPECIAL
    for block in (flat,) if len(flat) <= BLOCK else torch.split(flat, BLOCK):
        units, counts = _sum_of_block(block)
        total, special = total + units, _both(special, counts)
    return total, special


def _sum_of_few(terms: torch.Tensor) -> tuple[int, Special]:
    if not terms.is_floating_point():
        return sum(terms.reshape(-1).tolist()) << UNIT, NO_SPECIAL
    form = FORMATS[terms.dtype]
    return units_of_bits(terms.view(form.bits).reshape(-1).tolist(), form)


def _sum_of_block(block: torch.Tensor) -> tuple[int, Special]:
    """Add terms with plain exponents the fast way, and the others in bins; also all of them if they spread too far."""
    if not block.is_floating_point():
        return sum_of_ints(block) << UNIT, NO_SPECIAL
    terms = block.contiguous() if block.dtype == torch.float64 else block.float().contiguous()
    digits = _DIGITS[block.dtype]
    units = sum_of_floats(terms, digits=digits)
    if units is not None:
        return units, NO_SPECIAL
    plain = is_plain(terms)
    others, special = _sum_by_bins(terms[~plain])
    terms = torch.where(plain, terms, 0)
    units = sum_of_floats(terms, digits=digits)
    return others + (_sum_by_bins(terms)[0] if units is None else units), special


def _sum_by_bins(terms: torch.Tensor) -> tuple[int, Special]:
    units, special = 0, NO_SPECIAL
    for part in torch.split(terms, BLOCK_OF_BINS):
        limbs, counts = bins_of(part)
        nans, above, below = counts[0].tolist()
        units, special = units + units_of(limbs[0]), _both(special, (nans, above, below))
    return units, special


def _both(one: Special, other: Special) -> Special:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
