"""`ExactSum`: an exact sum of floats. No order, batch size or number of ranks can change a bit of it.

Terms are added as integers, which is associative and commutative. The sum is rounded once, when its value is read.
"""

import math
import struct
from fractions import Fraction
from typing import TypeAlias, final

import attrs
import numpy as np
import torch
from torch.nn.functional import pad

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.cpu_sum import BLOCK_OF_BINS, NO_SPECIAL, Special, sum_on_cpu
from trainfold.core.exact.float_bits import FORMATS, bits_of, units_of_bits
from trainfold.core.exact.limbs import LIMBS, UNIT, carried, limbs_of, settled, units_of
from trainfold.core.exact.terms import KINDS, bins_of
from trainfold.core.json_values import shown
from trainfold.core.tensor_memory import check_plain

Number: TypeAlias = torch.Tensor | float
Exact: TypeAlias = Fraction | float

_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)} | {torch.bool}
_NARROW = {
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.float8_")
}
_MANY = 256  # from this many rows on, adding each column alone is faster
_BLOCK_ON_DEVICE = 1 << 22
_SMALLEST_NORMAL = Fraction(1, 1 << 1022)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class ExactSum:
    """An exact sum, or one for each position, as tensors that can be saved, and added up over ranks as integers.

    Make it with `exact_zero`.

    Attributes:
        limbs: int64[..., 68]; the sum is the sum of ``limbs[i] * 2**(32 * i - 1074)``. On a CPU the limbs of every returned sum
            lie in 0 to 2**32 - 1, the last one with a sign, so equal sums have equal bits, and 2**30 of them can be added up
            limb by limb before one overflows. On another device they may be 2**32 larger until they are merged, because
            adding terms does not wait for the device.
        special: int64[..., 3]; how many terms were NaN, infinity, minus infinity.
    """

    limbs: torch.Tensor
    special: torch.Tensor


def exact_zero(length: int | None = None) -> ExactSum:
    """An empty sum; with a length, an empty sum for each position.

    Examples:
        >>> exact_value(exact_zero()), exact_values(exact_zero(2))
        (Fraction(0, 1), [Fraction(0, 1), Fraction(0, 1)])
    """
    shape = () if length is None else (length,)
    return ExactSum(
        torch.zeros((*shape, LIMBS), dtype=torch.int64, device="cpu"),
        torch.zeros((*shape, KINDS), dtype=torch.int64, device="cpu"),
    )


def exact_add(total: ExactSum, terms: Number) -> ExactSum:
    """A sum with more terms.

    Args:
        total: the sum so far.
        terms: a real tensor of any shape and dtype, which may be empty, and each element of which is a term; or a float or an
            integer of Python or numpy.

    Raises:
        InvalidArgument: for complex and quantized terms, fractions and decimals, tensors that are not plain memory (DTensors),
            and for a total that has positions.

    Examples:
        >>> total = exact_add(exact_zero(), torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64))
        >>> float(exact_value(total)), torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64).sum().item()
        (1.0, 0.0)
    """
    _check_dim(total, 1, fix="add to the sums of positions with exact_add_columns")
    if isinstance(terms, np.generic):
        terms = _of_numpy(terms)
    if not isinstance(terms, torch.Tensor):
        return _added(total, *_units_of_number(terms))
    terms = _real(terms)
    if _is_on_cpu(total.limbs) and _is_on_cpu(terms):
        return _added(total, *sum_on_cpu(terms))
    return _add_bins(total, terms.reshape(-1, 1), 1)


def exact_add_columns(total: ExactSum, terms: torch.Tensor) -> ExactSum:
    """Add terms to several sums, one for each position of the last dimension.

    Args:
        total: the sums so far, of shape (K,).
        terms: a real tensor of shape [..., L].

    Returns:
        max(K, L) sums.

    Raises:
        InvalidArgument: if the terms are complex, quantized or a scalar, or if the total is a single sum.

    Examples:
        >>> total = exact_add_columns(exact_zero(0), torch.tensor([[1, 2], [3, 4]]))
        >>> [int(value) for value in exact_values(exact_add_columns(total, torch.tensor([1, 1, 1])))]
        [5, 7, 1]
    """
    _check_dim(total, 2, fix="start with exact_zero(0)")
    terms = _real(terms)
    if terms.dim() == 0:
        raise InvalidArgument(
            "terms", expected="shape [..., L]", found="a scalar", fix="give it a dimension of positions"
        )
    columns = terms.shape[-1]
    total = _grown(total, max(columns, len(total.limbs)))
    if terms.numel() == 0:
        return total
    rows = terms.reshape(-1, columns)
    if len(rows) < _MANY or not (_is_on_cpu(rows) and _is_on_cpu(total.limbs) and rows.is_floating_point()):
        return _add_bins(total, rows, columns)
    alone = [ExactSum(limbs, special) for limbs, special in zip(total.limbs, total.special, strict=True)]
    alone[:columns] = [
        _added(one, *sum_on_cpu(column)) for one, column in zip(alone, rows.T.contiguous(), strict=False)
    ]
    return ExactSum(torch.stack([one.limbs for one in alone]), torch.stack([one.special for one in alone]))


def exact_merge(one: ExactSum, other: ExactSum) -> ExactSum:
    """The sum of the terms of both, on the CPU.

    Law: associative and commutative, to the bit.

    Examples:
        >>> half = exact_add(exact_zero(), 0.5)
        >>> exact_value(exact_merge(half, half))
        Fraction(1, 1)
    """
    _check_dim(other, one.limbs.dim(), fix="merge sums of the same kind")
    if one.limbs.dim() > 1:
        length = max(len(one.limbs), len(other.limbs))
        one, other = _grown(one, length), _grown(other, length)
    one, other = _on_cpu(one), _on_cpu(other)
    return ExactSum(settled(one.limbs + other.limbs), one.special + other.special)


def exact_value(total: ExactSum) -> Exact:
    """The sum as a fraction; or, if terms were not finite, what IEEE 754 defines: NaN for a NaN or for infinities of both signs.

    Examples:
        >>> exact_value(exact_add(exact_zero(), torch.tensor([0.1], dtype=torch.float64))) == Fraction(0.1)
        True
        >>> exact_value(exact_add(exact_zero(), torch.tensor([1.0, float("-inf")])))
        -inf
    """
    _check_dim(total, 1, fix="see exact_values")
    return _value(total.limbs.cpu(), total.special.tolist())


def exact_values(total: ExactSum) -> list[Exact]:
    """The sum at each position, as from `exact_value`."""
    _check_dim(total, 2, fix="see exact_value")
    return [_value(limbs, special) for limbs, special in zip(total.limbs.cpu(), total.special.tolist(), strict=True)]


def ratio_of(numerator: Exact, denominator: Exact) -> Exact | None:
    """An exact quotient; None if the denominator is 0, which is not the same as a quotient of 0.

    Returns:
        A fraction. NaN for a numerator that is NaN, and for a denominator that is not finite, which would turn a broken weight
        into a good score. An infinity for an infinite numerator.

    Examples:
        >>> ratio_of(Fraction(1), Fraction(3)), ratio_of(Fraction(0), Fraction(0)), ratio_of(math.nan, Fraction(0))
        (Fraction(1, 3), None, nan)
    """
    if not isinstance(denominator, Fraction):
        return math.nan
    if isinstance(numerator, Fraction):
        return numerator / denominator if denominator else None
    return -numerator if denominator < 0 else numerator


def rounded(value: Exact) -> float:
    """The float64 nearest to an exact number, ties to even; an infinity beyond the largest float.

    Examples:
        >>> rounded(Fraction(1, 3)), rounded(-Fraction(10) ** 400)
        (0.3333333333333333, -inf)
    """
    if isinstance(value, Fraction) and abs(value) < _SMALLEST_NORMAL:  # a CPU may be set to flush such floats to 0
        bits = round(abs(value) * (1 << UNIT))
        smallest: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return -smallest if value < 0 else smallest
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _units_of_number(number: object) -> tuple[int, Special]:
    if isinstance(number, int):
        return int(number) << UNIT, NO_SPECIAL
    if isinstance(number, float):
        return units_of_bits([bits_of(number)], FORMATS[torch.float64])
    raise InvalidArgument(
        "terms", expected="a tensor, or a float or integer", found=shown(number), fix="pass floats and integers"
    )


def _of_numpy(number: np.generic) -> torch.Tensor:
    try:
        return torch.from_numpy(np.asarray(number))
    except TypeError as error:
        raise InvalidArgument(
            "terms", expected="a number that torch has", found=shown(number), fix="pass floats and integers"
        ) from error


def _added(total: ExactSum, units: int, special: Special = NO_SPECIAL) -> ExactSum:
    counts = total.special
    if any(special):
        counts = counts + torch.tensor(special, dtype=torch.int64, device="cpu").to(counts.device, non_blocking=True)
    if _is_on_cpu(total.limbs):
        return ExactSum(limbs_of(units_of(total.limbs) + units), counts)
    return ExactSum(carried(total.limbs + limbs_of(units).to(total.limbs.device, non_blocking=True)), counts)


def _add_bins(total: ExactSum, terms: torch.Tensor, columns: int) -> ExactSum:
    """Add rows of terms: on a device without waiting for it, on a CPU with all carries done."""
    device = total.limbs.device if _is_on_cpu(terms) else terms.device
    limbs, special = total.limbs.to(device, non_blocking=True), total.special.to(device, non_blocking=True)
    block = BLOCK_OF_BINS if _is_on_cpu(terms) else _BLOCK_ON_DEVICE
    for rows in torch.split(terms, max(1, block // columns)):
        more, counts = (part.to(device, non_blocking=True) for part in bins_of(rows, columns))
        if limbs.dim() == 1:
            more, counts = more[0], counts[0]
        else:
            missing = (0, 0, 0, len(limbs) - columns)
            more, counts = pad(more, missing), pad(counts, missing)
        limbs, special = carried(limbs + more), special + counts
    return ExactSum(settled(limbs) if _is_on_cpu(limbs) else limbs, special)


def _real(terms: torch.Tensor) -> torch.Tensor:
    """The terms as a tensor of integers, or of a float dtype in `FORMATS`; conversions from 8 bits are exact."""
    check_plain("terms", terms)
    if terms.dtype in _NARROW:
        terms = terms.float()
    elif terms.dtype not in FORMATS and terms.dtype not in _INTEGERS:
        raise InvalidArgument(
            "terms",
            expected="real numbers",
            found=str(terms.dtype),
            fix="add up its two parts" if terms.is_complex() else "convert them to float32",
        )
    return terms.resolve_neg().detach() if terms.is_neg() else terms.detach()


def _check_dim(total: ExactSum, dim: int, *, fix: str) -> None:
    if total.limbs.dim() != dim:
        raise InvalidArgument(
            "exact sum",
            expected="one sum" if dim == 1 else "a sum for each position",
            found="one sum" if total.limbs.dim() == 1 else f"sums of {len(total.limbs)} positions",
            fix=fix,
        )


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _on_cpu(total: ExactSum) -> ExactSum:
    return total if _is_on_cpu(total.limbs) else ExactSum(total.limbs.cpu(), total.special.cpu())


def _grown(total: ExactSum, length: int) -> ExactSum:
    missing = length - len(total.limbs)
    if missing == 0:
        return total
    return ExactSum(pad(total.limbs, (0, 0, 0, missing)), pad(total.special, (0, 0, 0, missing)))


def _value(limbs: torch.Tensor, special: list[int]) -> Exact:
    nans, above, below = special
    if nans or (above and below):
        return math.nan
    if above or below:
        return math.inf if above else -math.inf
    return Fraction(units_of(limbs), 1 << UNIT)
