"""`ExactSum`: a sum that is exact, so that no order, batch size or number of ranks can change a bit of it (Q01, Q02).

Adding is adding integers: associative and commutative. Rounding happens once, when the number is asked for.
"""

import math
from fractions import Fraction
from typing import final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.terms import (
    LIMB_BITS,
    LIMBS,
    MASK,
    MAX_TERMS,
    UNIT,
    bins_of,
    sum_of_doubles,
    sum_of_floats,
    sum_of_ints,
)

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = 3  # NaN, infinity, minus infinity


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class ExactSum:
    """An exact sum as tensors, so that it can be saved, and added up over ranks as integers. Make it with `exact_zero`.

    Attributes:
        limbs: int64[68]; the sum is that of ``limbs[i] * 2**(32 * i - 1074)``. In every sum that is returned the limbs lie from
            0 to 2**32 - 1, the last one with a sign, so that equal sums have equal bits, and 2**30 of them can be added up
            limb by limb before one overflows.
        special: int64[3]; how many terms were NaN, infinity, minus infinity.
    """

    limbs: torch.Tensor
    special: torch.Tensor


def exact_zero() -> ExactSum:
    """The sum of nothing.

    Examples:
        >>> exact_value(exact_zero())
        Fraction(0, 1)
    """
    return ExactSum(torch.zeros(LIMBS, dtype=torch.int64), torch.zeros(_KINDS, dtype=torch.int64))


def exact_add(total: ExactSum, terms: torch.Tensor | float) -> ExactSum:
    """A sum with more terms.

    Args:
        total: the sum so far.
        terms: a real tensor of any shape and dtype, also empty; each element is a term. Or a number.

    Raises:
        InvalidArgument: for complex terms.

    Examples:
        >>> total = exact_add(exact_zero(), torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64))
        >>> float(exact_value(total)), torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64).sum().item()
        (1.0, 0.0)
    """
    if not isinstance(terms, torch.Tensor):
        terms = torch.tensor(terms, dtype=torch.float64 if isinstance(terms, float) else torch.int64)
    if terms.is_complex():
        raise InvalidArgument("terms", expected="real numbers", found=str(terms.dtype), mend="add up its two parts")
    special = total.special
    amount = 0
    for part in torch.split(terms.detach().reshape(-1), MAX_TERMS):
        if not part.is_floating_point():
            amount += sum_of_ints(part) << UNIT
            continue
        units = _units_of_rows(part.contiguous()) if part.device.type == "cpu" else None
        if units is None:
            limbs, counts = bins_of(part)
            units, special = _units(limbs), special + counts.cpu()
        amount += units
    return ExactSum(_limbs(_units(total.limbs) + amount), special)


def exact_merge(one: ExactSum, other: ExactSum) -> ExactSum:
    """The sum of the terms of both.

    Law: associative and commutative, to the bit.

    Examples:
        >>> half = exact_add(exact_zero(), 0.5)
        >>> exact_value(exact_merge(half, half))
        Fraction(1, 1)
    """
    return ExactSum(_limbs(_units(one.limbs) + _units(other.limbs)), one.special + other.special)


def exact_value(total: ExactSum) -> Fraction | float:
    """The sum itself, or what IEEE 754 says of terms that are not finite: NaN if one was, or if both infinities were.

    Examples:
        >>> exact_value(exact_add(exact_zero(), torch.tensor([0.1], dtype=torch.float64))) == Fraction(0.1)
        True
        >>> exact_value(exact_add(exact_zero(), torch.tensor([1.0, float("-inf")])))
        -inf
    """
    nans, above, below = total.special.tolist()
    if nans or (above and below):
        return math.nan
    if above or below:
        return math.inf if above else -math.inf
    return Fraction(_units(total.limbs), 1 << UNIT)


def _units_of_rows(terms: torch.Tensor) -> int | None:
    """The sum where rows of float64 can hold it, in units of 2**-1074."""
    if len(terms) == 0:
        return 0
    if terms.dtype in _NARROW:
        return sum_of_floats(terms.float())
    return sum_of_doubles(terms) if terms.dtype == torch.float64 else None


def _units(limbs: torch.Tensor) -> int:
    """The integer that limbs are, carried or not."""
    found = 0
    for limb in reversed(limbs.tolist()):
        found = (found << LIMB_BITS) + limb
    return found


def _limbs(units: int) -> torch.Tensor:
    """An integer as limbs with all carries done."""
    width = LIMBS * LIMB_BITS // 8
    if not -(1 << (8 * width - 1)) <= units < 1 << (8 * width - 1):
        raise InvalidArgument(
            "exact sum", expected=f"less than 2**{8 * width - 1 - UNIT}", found="more", mend="no float reaches this far"
        )
    words = np.frombuffer(units.to_bytes(width, "little", signed=True), dtype="<u4").astype(np.int64)
    if units < 0:
        words[-1] -= MASK + 1
    return torch.from_numpy(words)
