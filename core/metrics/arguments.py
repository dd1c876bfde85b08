"""Checks of the outputs passed to metrics. They read only types, dtypes and shapes, so they never wait for a device."""

import math
import numbers
from typing import Any

import numpy as np
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.tensor_memory import check_plain

__all__ = ["integers", "is_number", "real", "same_shape"]

_INT64 = 1 << 63


def real(where: str, value: Any) -> torch.Tensor:
    """A real tensor, detached; or a number as a tensor of its kind.

    Args:
        where: the argument's name, for the message.
        value: a tensor of any shape and real dtype, or a number of Python or numpy.

    Raises:
        InvalidArgument: for anything else, complex tensors, DTensors and fractions included, and for integers beyond int64.

    Examples:
        >>> real("Sum.values", 2.5), real("Sum.values", True).dtype
        (tensor(2.5000, dtype=torch.float64), torch.bool)
    """
    if isinstance(value, torch.Tensor):
        check_plain(where, value)
        if value.is_complex() or value.is_quantized or value.dtype == torch.uint64:
            raise InvalidArgument(
                where, expected="real numbers", found=value.dtype, fix="pass real parts, dequantized; int64 for uint64"
            )
        return value.detach()
    if isinstance(value, bool):
        return torch.tensor(value, device="cpu")
    if isinstance(value, numbers.Integral):
        if not -_INT64 <= (whole := int(value)) < _INT64:
            raise InvalidArgument(where, expected="an integer of 64 bits", found=whole, fix="pass it as a float")
        return torch.tensor(whole, device="cpu")
    if isinstance(value, float | np.floating) and np.dtype(type(value)).itemsize <= 8:
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    raise InvalidArgument(
        where, expected="a tensor or a number", found=type(value).__name__, fix="convert it with torch.as_tensor"
    )


def integers(where: str, value: Any, *, fix: str) -> torch.Tensor:
    """As `real`, in int64, for outputs of which only integers and booleans have a meaning.

    Raises:
        InvalidArgument: for floats, and all that `real` refuses.

    Examples:
        >>> integers("TopK.targets", torch.tensor([1, 2], dtype=torch.int32), fix="give class indices")
        tensor([1, 2])
    """
    tensor = real(where, value)
    if tensor.is_floating_point():
        raise InvalidArgument(where, expected="integers", found=tensor.dtype, fix=fix)
    return tensor.to(torch.int64)


def same_shape(where: str, tensor: torch.Tensor, other: str, shape: torch.Size) -> None:
    """Refuse a tensor of another shape: broadcasting would count elements that the caller did not pass.

    Raises:
        InvalidArgument: naming both shapes.

    Examples:
        >>> same_shape("Confusion.predicted", torch.zeros(4, 1), "targets", torch.Size([4]))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: Confusion.predicted: expected the shape of targets, (4,), found (4, 1); \
reshape or expand it yourself: nothing is broadcast here
    """
    if tensor.shape != shape:
        raise InvalidArgument(
            where,
            expected=f"the shape of {other}, {tuple(shape)}",
            found=tuple(tensor.shape),
            fix="reshape or expand it yourself: nothing is broadcast here",
        )


def is_number(value: Any) -> bool:
    """Whether the value is a finite Python number.

    Examples:
        >>> is_number(10**400), is_number(float("inf")), is_number(True), is_number("1")
        (True, False, False, False)
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
