"""`setting_like`: a hyperparameter of another program's optimizer, in the form that it has here: a tensor where there is one, and a number for a number."""

import math
from typing import Any

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.json_values import shown
from trainfold.core.torch_files.other_tensors import OtherTensor
from trainfold.core.torch_files.stored_values import StoredTensor

_FIX = "make the optimizer with a value of the form that was saved"


def setting_like(mine: Any, theirs: Any, where: str) -> Any:
    """A saved value in the form of the one that it replaces. A loop may write into a tensor that it has given to its optimizer, so that stays a tensor.

    Args:
        mine: the value of the optimizer here.
        theirs: the one that was saved.
        where: the parameter and the key, for messages.

    Raises:
        InvalidState: for a tensor of several elements in the place of one number, or one whose value the dtype here has not.

    Examples:
        >>> setting_like(torch.tensor(0.5), 0.25, "lr"), setting_like(0.5, torch.tensor(0.25), "lr"), setting_like((0.5, 0.5), [0.25, 1], "betas")
        (tensor(0.2500), 0.25, (0.25, 1))
    """
    if isinstance(theirs, StoredTensor | OtherTensor):
        raise _refused(where, mine, theirs)
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor | int | float | complex):
        return _tensor_like(mine, theirs, where)
    if isinstance(theirs, torch.Tensor) and mine is not None:
        if theirs.numel() != 1:
            raise _refused(where, mine, theirs)
        return theirs.item()
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        mine_of_each = mine if len(mine) == len(theirs) else [None] * len(theirs)
        return type(mine)(setting_like(one, each, where) for one, each in zip(mine_of_each, theirs, strict=True))
    return theirs


def are_equal(one: Any, other: Any) -> bool:
    """Whether two settings are equal, of which some may be tensors.

    Examples:
        >>> are_equal((torch.ones(2), 1), (torch.ones(2), 1)), are_equal(torch.ones(1), 1)
        (True, False)
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def _tensor_like(mine: torch.Tensor, theirs: Any, where: str) -> torch.Tensor:
    if not isinstance(theirs, torch.Tensor):  # it is rounded as in the program that made a tensor of it
        try:
            found = torch.full_like(mine, theirs, requires_grad=False)
        except (RuntimeError, OverflowError):
            raise _refused(where, mine, theirs) from None
        one = found.flatten()[0].item() if found.numel() else theirs
        is_kept = one == theirs if not mine.is_floating_point() else math.isfinite(one) or not math.isfinite(theirs)
        if not is_kept:
            raise _refused(where, mine, theirs)
        return found
    if theirs.numel() != mine.numel():
        raise _refused(where, mine, theirs)
    found = theirs.detach().to(device=mine.device, dtype=mine.dtype, copy=True).reshape(mine.shape)
    if not torch.equal(found.to(theirs.dtype).cpu(), theirs.reshape(mine.shape).cpu()):
        raise _refused(where, mine, theirs)
    return found


def _refused(where: str, mine: Any, theirs: Any) -> InvalidState:
    return InvalidState(where, expected=_form(mine), found=_form(theirs), fix=_FIX)


def _form(value: Any) -> str:
    if isinstance(value, StoredTensor | torch.Tensor):
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        one = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else None
        return f"a tensor of the shape {shape} and {dtype}" if one is None else f"{one!r} in a tensor of {dtype}"
    if isinstance(value, OtherTensor):
        return value.kind
    return "a number" if isinstance(value, int | float | complex) and not isinstance(value, bool) else shown(value)
