"""Checks of restored slots and hyperparameters, before anything is written."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.json_values import shown
from trainfold.core.printable import with_article
from trainfold.core.state.state import OptimizerState, ParamGroup

# Slots that every optimizer of torch.optim makes with zeros_like or full_like of the parameter or its gradient.
_LIKE_PARAMETER: Final = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer"}
    | {"prev", "square_avg", "step_size", "sum"}
)
# Slots that are one number: a tensor without dimensions or, in older checkpoints, a plain number.
_ONE_NUMBER: Final = frozenset({"step", "mu_product", "eta", "mu"})
# SGD of older versions of torch has None here where it has no momentum, or has not begun; today's goes on from that.
_MOMENTUM: Final = "momentum_buffer"
_ANYTHING: Final = "anything"  # a slot that is None now may become anything later
_NUMBER: Final = "a number"
_LOW: Final = frozenset({torch.float16, torch.bfloat16})


def slot_problems(  # noqa: PLR0913 - the two sides, and what they are
    groups: Iterable[ParamGroup],
    slots: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, torch.Tensor],
    present: Mapping[str, Mapping[str, Any]],
    path: str,
    *,
    is_torchs: bool,
) -> list[TrainfoldError]:
    """Return a problem for every slot that cannot belong to its parameter.

    A parameter without slots never had a gradient; a parameter with only some of its slots is damaged. Every torch optimizer
    treats parameters of one group with the same number of dimensions alike, so they must have the same slots. An optimizer
    of another library may keep more for a large parameter, or use another dtype: there, parameters are alike only if they
    have one shape and dtype. Nothing is known about the shapes of its slots, but the live optimizer may already have a slot
    to compare with.

    Args:
        groups: the groups of the state, which are those of the live optimizer.
        slots: name -> the slots in the state.
        params: name -> parameter.
        present: name -> the slots in the live optimizer.
        path: the component, for messages.
        is_torchs: whether the class is from ``torch.optim``.
    """
    alike: dict[tuple[Any, ...], list[str]] = {}
    for number, group in enumerate(groups):
        for name in group.params:
            if name in params and slots.get(name):
                value = params[name]
                likeness = (value.dim(),) if is_torchs else (value.shape, value.dtype)
                alike.setdefault((number, *likeness), []).append(name)
    found: list[TrainfoldError] = []
    for members in alike.values():
        keys = {key for name in members for key in slots[name]}
        kinds = {key: _kind(slots[name][key]) for name in reversed(members) for key in slots[name]}
        for name in members:
            own = slots[name]
            missing = sorted(keys - set(own))
            where = f"{path}.slots[{name!r}]"
            if missing:
                found.append(
                    _problem(where, f"the slots {sorted(keys)}", f"{missing} missing", "use another checkpoint")
                )
            for key, value in own.items():
                wanted = _wanted(
                    key, value, params[name], present.get(name, {}).get(key), kinds[key], is_torchs=is_torchs
                )
                if wanted is not None:
                    fix = "build the model and the optimizer as they were when the state was saved, or use another checkpoint"
                    found.append(_problem(f"{where}[{key!r}]", wanted, _described(value), fix))
    return found


def group_problems(
    saved: OptimizerState, live: Mapping[frozenset[str], Mapping[str, Any]], path: str
) -> list[TrainfoldError]:
    """Return a problem for every hyperparameter whose type differs from the value that it would replace.

    A step of the optimizer may have turned a number into a tensor of one element, and None into anything.

    Args:
        saved: the state.
        live: the members of each group of the optimizer -> the group.
        path: the component, for messages.
    """
    return [
        _problem(
            f"{path}.groups[{min(group.params, default='')!r}].{key}",
            expected,
            _described(value),
            "use another checkpoint: no optimizer writes such a value",
        )
        for group in saved.groups
        for key, value in group.hyper.items()
        for expected in _misfits(key, value, live.get(frozenset(group.params), {}))
    ]


def _misfits(key: str, value: Any, group: Mapping[str, Any]) -> Iterator[str]:
    if key in ("params", "param_names"):
        yield "a hyperparameter"
    elif key in group and not fits(value, group[key]):
        yield f"a value like {_described(group[key])}"


def fits(value: Any, present: Any) -> bool:  # noqa: PLR0911 - one return for each kind
    """Whether a value may replace another: a number a number, a string a string, a list a list.

    Examples:
        >>> fits(1, 0.5), fits("fast", 0.5), fits(None, 0.5), fits([1, 2], (0.9, 0.999)), fits(True, 0.5)
        (True, False, True, True, False)
    """
    if value is None or present is None:
        return True
    if _is_number(present):
        return _is_number(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if isinstance(present, torch.Tensor):
        return _is_number(value) or isinstance(value, torch.Tensor)
    if isinstance(present, list | tuple):
        if not isinstance(value, list | tuple):
            return False
        return not present or all(any(fits(each, other) for other in present) for each in value)
    if isinstance(present, bool | str | bytes):
        return type(value) is type(present)
    return not isinstance(value, bool | str | bytes) and not _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _wanted(  # noqa: PLR0913 - private
    key: str, value: Any, parameter: torch.Tensor, present: Any, usual: str, *, is_torchs: bool
) -> str | None:
    """Return what a slot should be if it cannot be right, and None if it can."""
    if is_torchs and key == _MOMENTUM and value is None:
        return None
    if is_torchs and key in _LIKE_PARAMETER:
        return (
            None
            if _is_like(value, parameter)
            else f"a tensor of {parameter.dtype}, shape {list(parameter.shape)}, like its parameter"
        )
    if is_torchs and key in _ONE_NUMBER:
        return None if _is_one_number(value) else "one number that is finite and not negative"
    kinds = {_kind(value), usual, *([] if present is None else [_kind(present)])} - {_ANYTHING}
    return None if len(kinds) <= 1 else usual if usual not in (_kind(value), _ANYTHING) else _kind(present)


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if parameter.dtype in _LOW and value.dtype in (torch.float32, torch.float64):
        return True  # its moments may have more bits than torch gives them
    return value.dtype == parameter.dtype


def _is_one_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool:
            return False
        value = value.item()
    return _is_number(value) and not isinstance(value, complex) and math.isfinite(value) and value >= 0


def _kind(value: Any) -> str:
    """Return the kind of a slot; like parameters must have the same kind. The shape is up to the class, and may grow.

    A class may keep one number as a tensor for one parameter and as a plain number for another.
    """
    if isinstance(value, torch.Tensor) and value.dim():
        return f"a tensor of {value.dtype}"
    if value is None:
        return _ANYTHING
    return _NUMBER if _is_number(value) or isinstance(value, torch.Tensor) else f"{with_article(type(value).__name__)}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    return shown(value)


def _problem(where: str, expected: object, found: object, fix: str) -> InvalidState:
    return InvalidState(where, expected=expected, found=found, fix=fix)
