"""The gradients of a window: forward and backward of each microbatch, normalised once and checked before any update."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, final

import attrs
import torch

from trainfold.core.errors import InvalidArgument, InvalidBatch, NonFinite, place
from trainfold.core.rng import Key, fold_in, forked_rng
from trainfold.core.step.loss import Loss, Number, Totals, check_loss, normaliser, read

B = TypeVar("B")
LossFunction: TypeAlias = Callable[[Any, B], Loss]


@final
@attrs.frozen
class WindowResult:
    """The results of a window as Python numbers; reading them is the only time that a step waits for the device.

    Attributes:
        loss: sum over weight.
        grad_norm: the norm of the normalised gradient, before it is clipped.
        weight: the sum of the weights.
        samples: over all ranks.
        metrics: the ratios of the user's metrics; nan for a denominator of 0.
        norm: the norm as a tensor, for clipping.
        grads: the normalised gradients.
    """

    loss: float
    grad_norm: float
    weight: float | int
    samples: int
    metrics: dict[str, float]
    norm: torch.Tensor = attrs.field(eq=False, repr=False)
    grads: list[torch.Tensor] = attrs.field(eq=False, repr=False)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def run_window(  # noqa: PLR0913 (every one is named where it is called)
    micro: list[B],
    *,
    step: int,
    module: torch.nn.Module,
    loss_fn: LossFunction[B],
    key: Key,
    device: torch.device,
    rank: int,
    normalise: bool,
    after_each: Callable[[], None],
) -> Totals:
    """Run forward and backward of every microbatch; gradients accumulate in the parameters.

    Args:
        micro: the microbatches.
        step: the index of the step.
        module: the model.
        loss_fn: ``(model, batch) -> Loss``.
        key: the key of the run; each step, microbatch and rank draws from its own key.
        device: where the model computes.
        rank: the data-parallel rank.
        normalise: divide the loss by its weight before the backward. For the only microbatch of a single rank, these
            are the operations, and so the bits, of the backward of a mean.
        after_each: called after each backward.

    Returns:
        The sums of the window on this rank.
    """
    totals = Totals()
    for index, part in enumerate(micro):
        part_key = fold_in(key, f"step {step} microbatch {index} rank {rank}")  # one part is one hash
        with forked_rng(part_key, device), torch.enable_grad():
            loss = check_loss(loss_fn(module, part))
            totals.add(loss)
            if loss.sum.requires_grad:  # the loss of a microbatch without a valid token may be a constant
                torch.autograd.backward(loss.sum / normaliser(loss.weight) if normalise else loss.sum)
        after_each()
    return totals


def judge(  # noqa: PLR0913 (every one is named where it is called)
    totals: Totals,
    grads: list[torch.Tensor],
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor],
    *,
    divide_by: Number | None,
    where: str,
    fix: str = "continue from error.skipped, which is past this batch, or lower the learning rate",
    local: Callable[[torch.Tensor], torch.Tensor] = _itself,
    is_part: bool = False,
) -> WindowResult:
    """Divide the gradients and read the results of the window; only gradients change.

    Args:
        totals: the sums over the ranks.
        grads: the gradients over the ranks.
        norm_of: their norm.
        divide_by: what makes the gradients those of the mean; None if they are.
        where: for the error.
        fix: what a loop does about a loss that is not finite.
        local: the part of a gradient in this rank's memory.
        is_part: whether other ranks have gradients of other parameters, so that this one may have none.

    Raises:
        InvalidBatch: on every rank, if the weight of the whole window is not positive.
        InvalidArgument: on every rank, if no parameter has a gradient.
        NonFinite: on every rank, if the loss or the gradient norm of any rank is not finite.
    """
    if grads and divide_by is not None:
        torch._foreach_div_([local(each) for each in grads], divide_by)
    norm = norm_of(grads)
    ratios = [number for pair in totals.metrics.values() for number in pair]
    loss_sum, weight, grad_norm, *numbers = read([totals.loss, totals.weight, norm, *ratios])
    finite = not totals.suspects and all(map(math.isfinite, (loss_sum, weight, grad_norm)))
    if weight <= 0:
        raise InvalidBatch(
            "the sum of the loss weights",
            expected="> 0 over all microbatches and ranks",
            found=weight,
            fix="drop batches without a valid token, or use larger windows",
        )
    if not grads and not is_part:
        raise InvalidArgument(
            "loss_fn",
            expected="a loss that depends on a parameter that requires a gradient",
            found=f"a loss of {loss_sum / weight} that does not depend on any parameter",
            fix="compute it from the model that loss_fn receives, without detach() or no_grad(), and do not freeze all parameters",
        )
    if not finite:
        error = NonFinite(
            where,
            expected="a finite loss and gradient norm on every rank",
            found=f"loss {loss_sum / weight}, gradient norm {grad_norm}{_blame(totals)}",
            fix=f"nothing was updated: {fix}",
        )
        place(error, rank=totals.suspects[0] if len(totals.suspects) == 1 else None)
        raise error
    return WindowResult(
        loss=loss_sum / weight,
        grad_norm=grad_norm,
        weight=weight,
        samples=totals.samples,
        metrics={
            name: num / den if den else math.nan
            for name, num, den in zip(totals.metrics, numbers[::2], numbers[1::2], strict=True)
        },
        norm=norm,
        grads=grads,
    )


def _blame(totals: Totals) -> str:
    return f", not finite on ranks {totals.suspects}" if totals.suspects else ""
