"""`rounded_to`: a tensor in another dtype, unless that has not one of its numbers. `converted_to`: of any kind. `check_in_range`: the same of what is rounded elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trainfold.core.errors import InvalidState

if TYPE_CHECKING:
    import torch


_LAST: Final = {"float8_e4m3fn": 464.0}
"""The last number that is rounded to the largest one, where torch gives that for all beyond too, and for infinities: it does so on the CPU."""

_FIX: Final = "cast to a dtype of a larger range, as bfloat16 has beside float16, or leave this tensor as it is: cast(dtype, without=name)"


def rounded_to(
    source: "torch.Tensor", dtype: "torch.dtype", name: Callable[[], str], *, fix: str = _FIX
) -> "torch.Tensor":
    """Round a tensor, as torch rounds.

    Args:
        source: of a floating dtype, on any device.
        dtype: of the result, floating too.
        name: returns what the error calls it.
        fix: what the error advises.

    Returns:
        A tensor in rows, of memory of its own.

    Raises:
        InvalidState: if a number is beyond what the dtype has: if a finite one would be infinite, NaN, or the largest one without being near it; if an infinite one is rounded
            to a dtype without infinities; or a negative one to a dtype without signs.

    Examples:
        >>> import torch
        >>> rounded_to(torch.tensor([1.5, float("inf")]), torch.float16, lambda: "w")
        tensor([1.5000,    inf], dtype=torch.float16)
        >>> rounded_to(torch.tensor([1.0, 70000.0]), torch.float16, lambda: "w")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidState: w: expected numbers that float16 has, up to 65504, found 1 of 2 beyond, such as 70000, which would be inf; \
cast to a dtype of a larger range, as bfloat16 has beside float16, or leave this tensor as it is: cast(dtype, without=name)
    """
    import torch

    # in rows: `to` keeps the strides of a transposed tensor, which would be copied once more to be written
    found = torch.empty(source.shape, dtype=dtype, device=source.device)
    found.copy_(source)
    if torch.finfo(source.dtype).max > torch.finfo(dtype).max or not _has_infinity(dtype):
        check_in_range(found, source, name, fix=fix)
    return found


def converted_to(source: "torch.Tensor", dtype: "torch.dtype", name: Callable[[], str], *, fix: str) -> "torch.Tensor":
    """A tensor in a dtype of any kind: numbers are rounded, and integers of a number are what is before its point.

    Args:
        source: the tensor.
        dtype: of the result.
        name: returns what the error calls it.
        fix: what the error advises.

    Raises:
        InvalidState: if a number is beyond what the dtype has.

    Examples:
        >>> import torch
        >>> converted_to(torch.tensor([2.5, -3.0]), torch.int32, lambda: "steps", fix="")
        tensor([ 2, -3], dtype=torch.int32)
    """
    import torch

    if source.dtype == dtype:
        return source
    if source.is_floating_point() and dtype.is_floating_point:
        return rounded_to(source, dtype, name, fix=fix)
    found = source.to(dtype)
    if dtype == torch.bool or dtype.is_complex or source.is_complex():
        return found
    if dtype.is_floating_point:
        check_in_range(found, source.to(torch.float64), name, fix=fix)
        return found
    is_beyond = ~((found.to(torch.float64) - source.to(torch.float64)).abs() < 1)
    if is_beyond.any():
        raise InvalidState(
            name(), expected=f"numbers that {str(dtype).removeprefix('torch.')} has",
            found=f"{int(is_beyond.sum())} of {source.numel()} beyond, such as {source[is_beyond][0].item()}", fix=fix)  # fmt: skip
    return found


def check_in_range(part: "torch.Tensor", before: "torch.Tensor", name: Callable[[], str], *, fix: str = _FIX) -> None:
    """Check that a rounded part has no number that its dtype had not; see `rounded_to`.

    Args:
        part: what was rounded.
        before: what it was rounded from.
        name: returns what the error calls the tensor.
        fix: what the error advises.

    Raises:
        InvalidState: if there is one.
    """
    import torch

    if not part.numel():
        return
    of, has_infinity, dtype = torch.finfo(part.dtype), _has_infinity(part.dtype), str(part.dtype).removeprefix("torch.")
    least = (
        0.0 if of.min > 0 else of.min
    )  # float8_e8m0fnu has neither signs nor a zero, which becomes its smallest number
    # found as fast as memory is read; a NaN is an extreme, too. A look at each number takes ten times as long
    if part.itemsize > 1:
        is_within = bool(torch.stack(torch.aminmax(part)).isfinite().all())
    else:  # torch finds no extremes of float8
        low, high = torch.aminmax(_looked_at(before))
        is_within = (
            low.item() >= least and high.item() <= of.max
        )  # as float16, the largest number of float8_e8m0fnu is infinite
    if is_within:
        return
    before, after = _looked_at(before), _looked_at(part)
    is_beyond = (
        ~after.isfinite() & ~before.isnan()
        | (before.abs() > _LAST.get(dtype, torch.inf))
        | (before < least) & (least == 0)
    )
    if has_infinity:
        is_beyond &= before.isfinite()
    if is_beyond.any():
        at = int(torch.where(is_beyond, before.abs(), -1.0).argmax())
        raise InvalidState(
            name(), expected=f"numbers that {dtype} has, {'' if least else 'from 0 '}up to {of.max:.6g}",
            found=f"{int(is_beyond.sum())} of {before.numel()} beyond, such as {before.flatten()[at].item():.6g}, which would be {after.flatten()[at].item():.6g}",
            fix=fix)  # fmt: skip


def _has_infinity(dtype: "torch.dtype") -> bool:
    return dtype.itemsize > 1 or str(dtype).endswith("e5m2")


def _looked_at(tensor: "torch.Tensor") -> "torch.Tensor":
    """A tensor whose numbers torch compares: those of float8 are so in float32, without a change."""
    return tensor if tensor.itemsize > 1 else tensor.float()
