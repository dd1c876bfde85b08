"""`field_problems`: checks of the saved fields of a scheduler, before anything is written."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.json_values import shown

_COUNTS: Final = ("last_epoch", "_step_count")
_EACH_GROUP: Final = ("base_lrs", "_last_lr")


def field_problems(
    saved: Mapping[Any, Any], present: Mapping[Any, Any], path: str, *, is_torchs: bool
) -> list[TrainfoldError]:
    """Return a problem for every field whose type differs from that of the live scheduler.

    Any number may replace any number, a tuple may replace a list, and any value may replace None. For torch's own schedulers, counts must be whole numbers,
    there must be one rate per group, and None replaces nothing.

    Args:
        saved: the state of a scheduler.
        present: the state of the live scheduler.
        path: its path in the state, for messages.
        is_torchs: whether the class is from torch.

    Examples:
        >>> [str(each.where) for each in field_problems({"gamma": "x"}, {"gamma": 0.5}, "scheduler", is_torchs=True)]
        ["scheduler['gamma']"]
    """
    fix = "attach the scheduler that the state was captured from, or use another checkpoint"
    return [
        InvalidState(where, expected=expected, found=found, fix=fix)
        for where, expected, found in _misfits(saved, present, path, is_torchs)
    ]


def _misfits(
    saved: Mapping[Any, Any],
    present: Mapping[Any, Any],
    path: str,
    is_torchs: bool,  # noqa: FBT001 - private
) -> Iterator[tuple[str, str, str]]:
    for key, mine in present.items():
        if key not in saved:
            continue
        value, where = saved[key], f"{path}[{key!r}]"
        if is_torchs and key in _COUNTS and not (type(value) is int and value >= -1):
            yield where, "a whole number, -1 or more", shown(value)
        elif is_torchs and key in _EACH_GROUP and isinstance(mine, list) and not _is_rates(value, len(mine)):
            yield where, f"{len(mine)} rates, one for each group", shown(value)
        elif type(mine) is dict and isinstance(value, Mapping):
            yield from _misfits(value, mine, where, is_torchs)
        elif isinstance(mine, list | tuple) and isinstance(value, list | tuple) and len(mine) == len(value):
            yield from _misfits(dict(enumerate(value)), dict(enumerate(mine)), where, is_torchs)
        elif not _fits(value, mine, is_torchs):
            yield where, f"a value like {shown(mine)}", shown(value)


def _is_rates(value: Any, length: int) -> bool:
    if not isinstance(value, list) or len(value) != length:
        return False
    return all(_is_number(each) and (isinstance(each, torch.Tensor) or math.isfinite(each)) for each in value)


def _fits(value: Any, mine: Any, is_torchs: bool) -> bool:  # noqa: FBT001 - private
    if mine is None:
        return True
    if value is None:
        return not is_torchs
    if _is_number(mine):
        return _is_number(value)
    if isinstance(mine, list | tuple):
        return isinstance(value, list | tuple)
    if isinstance(mine, Mapping):
        return isinstance(value, Mapping) and type(value) is type(mine)
    return isinstance(value, type(mine))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
