"""`Loss`: a sum and its denominator, never a mean, so that every window is normalised exactly once."""

import numbers
from collections.abc import Mapping
from typing import TypeAlias, final

import attrs
import numpy as np
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

Number: TypeAlias = int | float | torch.Tensor
_REPORTED = frozenset({"loss", "grad_norm", "lr", "weight"})
_LARGEST = int(torch.finfo(torch.float64).max)


@final
@attrs.frozen(eq=False)
class Loss:
    """The result of a loss function.

    Attributes:
        sum: the sum of the loss over the batch, a tensor with one element.
        weight: what the sum is divided by, such as the number of valid tokens. It may be 0 in a microbatch.
        metrics: name -> ``(num, den)``, reported as the ratio of their sums over the window and the ranks. A value that
            is not a pair is a sum, and is divided by the weight like the loss.
    """

    sum: torch.Tensor
    weight: Number
    metrics: Mapping[str, Number | tuple[Number, Number]] = attrs.field(factory=dict)


@final
@attrs.define(eq=False)
class Totals:
    """The sums of a window, as numbers or as tensors not read yet, because reading waits for a device.

    Attributes:
        loss: the sum of the losses.
        weight: the sum of the weights.
        samples: the number of samples.
        metrics: name -> (num, den) sums.
        suspects: ranks, and not shares of the data, whose loss or gradient is known not to be finite.
        marks: by share, which parameters have a gradient there, from `mark_of`; empty if nothing asked for it.
    """

    loss: Number = 0
    weight: Number = 0
    samples: int = 0
    metrics: dict[str, tuple[Number, Number]] = attrs.field(factory=dict)
    suspects: list[int] = attrs.field(factory=list)
    marks: list[int] = attrs.field(factory=list)

    def add(self, loss: Loss) -> None:
        """Add one microbatch."""
        self.loss = self.loss + wide(loss.sum)
        weight = wide(loss.weight)
        self.weight = self.weight + weight
        for name, metric in loss.metrics.items():
            num, den = metric if isinstance(metric, tuple) else (metric, weight)
            old_num, old_den = self.metrics.get(name, (0, 0))
            self.metrics[name] = (old_num + wide(num), old_den + wide(den))


def wide(value: Number) -> Number:
    """Return the sum of a tensor in float64 or int64, without its graph; as a number if the tensor is on a CPU.

    Examples:
        >>> wide(torch.tensor([1.5, 2.5])), wide(torch.tensor([True, True])), wide(3)
        (4.0, 2, 3)
    """
    if not isinstance(value, torch.Tensor):
        return value.item() if isinstance(value, np.generic) else value
    is_float = value.is_floating_point()
    if is_float and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    value = value.detach()
    total = value.double().sum() if is_float else value.sum()
    return total.item() if total.device.type == "cpu" else total


def normaliser(weight: Number) -> Number:
    """Return the divisor of a sum. No gradient flows through it; a tensor of several elements counts as its sum.

    Examples:
        >>> normaliser(3), normaliser(torch.tensor(3)), normaliser(torch.tensor([True, False, True]))
        (3, tensor(3), 2)
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach()
    return wide(weight)


def read(values: list[Number]) -> list[float | int]:
    """Return the values as Python numbers, with one transfer for all values on a device.

    Examples:
        >>> read([1, torch.tensor(2), torch.tensor(0.5)])
        [1, 2, 0.5]
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
    if not tensors:
        return [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    arrived = iter(torch.stack([value.double() for value in tensors]).tolist())
    return [
        value if not isinstance(value, torch.Tensor) else value.item() if value.device.type == "cpu" else next(arrived)
        for value in values
    ]


def check_loss(value: object) -> Loss:
    """Check the result of a user's loss function.

    Raises:
        InvalidArgument: if it is not a `Loss` whose sum is one real number, or if a weight or metric is not a number.
    """
    if isinstance(value, Loss) and isinstance(value.sum, torch.Tensor) and value.sum.numel() == 1:
        if value.sum.is_complex():
            raise InvalidArgument(
                "loss_fn", expected="a real sum", found=str(value.sum.dtype), fix="take its real part or its modulus"
            )
        if isinstance(value.weight, bool) or not _is_number(value.weight):
            raise InvalidArgument(
                "loss_fn",
                expected="a weight that is a number, or a tensor",
                found=shown(value.weight),
                fix="return Loss(sum=..., weight=the number of terms in the sum)",
            )
        if value.metrics:
            _check_metrics(value.metrics)
        return value
    found = type(value).__name__
    if isinstance(value, Loss):
        found = f"Loss(sum={type(value.sum).__name__} of shape {tuple(getattr(value.sum, 'shape', ()))})"
    raise InvalidArgument(
        "loss_fn",
        expected="Loss(sum=a tensor with one element, weight=...)",
        found=found,
        fix='return Loss(sum=loss with reduction="sum", weight=its number of terms)',
    )


def _is_number(value: object) -> bool:
    """Whether the value can be summed and divided; an int beyond the range of floats cannot."""
    if isinstance(value, numbers.Integral):
        return abs(int(value)) <= _LARGEST
    return isinstance(value, numbers.Real | torch.Tensor | np.bool_)


def _check_metrics(metrics: Mapping[str, object]) -> None:
    if taken := sorted(_REPORTED & metrics.keys()):
        raise InvalidArgument(
            "loss_fn", expected="metrics beside those of the step", found=taken, fix="choose other names"
        )
    for name, metric in metrics.items():
        pair = metric if isinstance(metric, tuple) and len(metric) == len(("num", "den")) else (metric,)
        if not all(map(_is_number, pair)):
            raise InvalidArgument(
                f"loss_fn: metrics[{name!r}]",
                expected="a number, a tensor, or a pair (num, den) of these",
                found=shown(metric),
                fix="return the sum and its divisor, as a pair",
            )
