"""Whether an optimizer steps each row of a parameter by itself, so that ranks that hold rows step as one rank that holds all."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.step.optimizer import Optimizer, OptimizerLike

_ROWS, _COLUMNS, _CUT = 5, 3, 3  # a weight, and where it is cut
_KERNELS: Final = ("fused", "foreach", "capturable")  # they compute the same numbers, and may need another device
_RATE: Final = 0.01  # a rate of 0 would hide what a step does
_TOLERANCE: Final = 1e-6  # of float64; a norm of fewer rows is another number by far
_FIX: Final = "train with trainfold.ranks.Replicas; or shard the model with fully_shard, and use trainfold.attach(model, optimizer)"


def check_by_rows(optimizer: OptimizerLike) -> None:
    """Check that an optimizer can step rows: it is tried on a small weight, whole and in two parts.

    Args:
        optimizer: of a step whose state is cut by rows.

    Raises:
        InvalidArgument: for a pair of a user's own functions, for fp32 masters, or if the parts end elsewhere than the whole.

    Examples:
        >>> from trainfold import optimizer
        >>> check_by_rows(optimizer(torch.optim.AdamW, lr=0.1))
        >>> check_by_rows(optimizer(torch.optim.Muon, lr=0.1))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: make_step.optimizer: expected one that steps each row of a parameter by itself, because \
each rank steps its rows, found torch.optim.Muon, whose step of some rows depends on the others; train with \
trainfold.ranks.Replicas; or shard the model with fully_shard, and use trainfold.attach(model, optimizer)
    """
    if not isinstance(optimizer, Optimizer):
        raise _refused(
            "what trainfold.optimizer returns, whose slots can be cut as their parameters are", "functions of your own"
        )
    if optimizer.masters:
        raise InvalidArgument(
            "make_step.optimizer",
            expected="masters=False, because parts of masters are not kept",
            found="masters=True",
            fix="keep the parameters in float32, and compute under torch.autocast in the loss",
        )
    for overrides in ({}, *(hyper for _, hyper in optimizer.groups)):
        problem = _problem(attrs.evolve(optimizer, groups=(), hyper=_plain({**optimizer.hyper, **overrides})))
        if problem is not None:
            raise _refused(
                "one that steps each row of a parameter by itself, because each rank steps its rows",
                f"{optimizer.kind}, {problem}",
            )


def _problem(optimizer: Optimizer) -> str | None:
    """Why an optimizer does not step row by row, in words; None if it does."""
    start = torch.linspace(-1.0, 2.0, _ROWS * _COLUMNS, dtype=torch.float64).reshape(_ROWS, _COLUMNS)
    grads = [start.flip(0).sin() * 10.0 ** torch.arange(_ROWS)[:, None] * sign for sign in (1.0, -0.5)]
    try:
        whole, slots = _stepped(optimizer, start, grads)
        parts = [
            _stepped(optimizer, start[rows], [each[rows] for each in grads])[0]
            for rows in (slice(0, _CUT), slice(_CUT, None))
        ]
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return f"whose step of a weight of {_ROWS} rows fails: {str(error).splitlines()[0]}"
    odd = next(
        (each for each in slots if isinstance(each, torch.Tensor) and each.dim() and each.shape != start.shape), None
    )
    if odd is not None:
        return f"which keeps a slot of {list(odd.shape)} for a weight of {[_ROWS, _COLUMNS]}"
    moved, by = whole - start, torch.cat(parts) - start
    if not torch.allclose(moved, by, rtol=_TOLERANCE, atol=0.0, equal_nan=True):
        return "whose step of some rows depends on the others"
    return None


def _stepped(optimizer: Optimizer, weight: torch.Tensor, grads: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    params = {"weight": weight}
    state = optimizer.init(params)
    for grad in grads:
        params, state = optimizer.update({"weight": grad}, state, params)
    return params["weight"], tree.leaves(state.slots)


def _plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters with which a step on the CPU shows what it does."""
    found = {name: value for name, value in hyper.items() if name not in _KERNELS}
    if "lr" in found:
        found["lr"] = torch.full_like(found["lr"], _RATE) if isinstance(found["lr"], torch.Tensor) else _RATE
    return found


def _refused(expected: str, found: str) -> InvalidArgument:
    return InvalidArgument("make_step.optimizer", expected=expected, found=found, fix=_FIX)
