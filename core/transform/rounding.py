"""`rounded_to`: a tensor in another dtype, unless one of its numbers becomes infinite there. `converted_to`: of any kind. `check_finite`: the same of what is rounded elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trainfold.core.errors import InvalidState

if TYPE_CHECKING:
    import torch


_FIX: Final = (
    "cast to bfloat16, which has the range of float32, or leave this tensor as it is: cast(dtype, without=name)"
)


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
        InvalidState: if a finite number is beyond what the dtype has, and would be infinite.

    Examples:
        >>> import torch
        >>> rounded_to(torch.tensor([1.5, float("inf")]), torch.float16, lambda: "w")
        tensor([1.5000,    inf], dtype=torch.float16)
        >>> rounded_to(torch.tensor([1.0, 70000.0]), torch.float16, lambda: "w")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidState: w: expected numbers that float16 has, up to 65504, found 1 of 2 beyond, such as 70000, which would be infinite; \
cast to bfloat16, which has the range of float32, or leave this tensor as it is: cast(dtype, without=name)
    """
    import torch

    # in rows: `to` keeps the strides of a transposed tensor, which would be copied once more to be written
    found = torch.empty(source.shape, dtype=dtype, device=source.device)
    found.copy_(source)
    if torch.finfo(source.dtype).max <= torch.finfo(dtype).max:
        return found
    check_finite(found, source, name, fix=fix)
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
    before, after = source.to(torch.float64), found.to(torch.float64)
    is_beyond = before.isfinite() & ~after.isfinite() if dtype.is_floating_point else ~((after - before).abs() < 1)
    if is_beyond.any():
        raise InvalidState(
            name(), expected=f"numbers that {str(dtype).removeprefix('torch.')} has",
            found=f"{int(is_beyond.sum())} of {source.numel()} beyond, such as {source[is_beyond][0].item()}", fix=fix)  # fmt: skip
    return found


def check_finite(part: "torch.Tensor", before: "torch.Tensor", name: Callable[[], str], *, fix: str = _FIX) -> None:
    """Check that a rounded part has no number that is infinite, and was not before.

    Args:
        part: what was rounded.
        before: what it was rounded from.
        name: returns what the error calls the tensor.
        fix: what the error advises.

    Raises:
        InvalidState: if there is one.
    """
    import torch

    numbers = part if part.itemsize > 1 else part.to(torch.float32)  # of float8 torch finds no extremes
    if not part.numel() or torch.stack(torch.aminmax(numbers)).isfinite().all():
        return  # found as fast as memory is read; a NaN is an extreme, too. A look at each number takes ten times as long
    is_beyond = before.isfinite() & ~numbers.isfinite()
    if is_beyond.any():
        most = torch.finfo(part.dtype).max
        raise InvalidState(
            name(), expected=f"numbers that {str(part.dtype).removeprefix('torch.')} has, up to {most:.6g}",
            found=f"{int(is_beyond.sum())} of {before.numel()} beyond, such as {before[is_beyond].abs().max().item():.6g}, which would be infinite",
            fix=fix)  # fmt: skip
