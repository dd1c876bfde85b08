"""The slots of a parameter that is cut over the ranks: a slot of its shape is cut as it is, and any other slot is whole on every rank."""

from collections.abc import Mapping
from typing import Any

import torch

from trainfold.adapters.sharded.dtensor import is_cut_like, is_dtensor, leaf_of, like_parameter, local_part
from trainfold.adapters.sharded.parts import cut_differs, part_for
from trainfold.core.errors import InvalidState
from trainfold.core.layout.shard import Shard


def slot_leaves(form: dict[str, Any], slots: Mapping[str, Any], parameter: torch.Tensor, path: str) -> dict[str, Any]:
    """Return the plain form of a parameter's slots with a `Shard` for each DTensor.

    The slots are the optimizer's own: torch's ``get_optimizer_state_dict`` would make slots for a parameter that has none yet.

    Args:
        form: the plain form.
        slots: the slots.
        parameter: a DTensor.
        path: of the slots, for messages.

    Raises:
        InvalidState: for a slot that a load could not cut again: a DTensor that is cut otherwise than its parameter, or a plain tensor
            of the parameter's shape.
    """
    own = leaf_of(parameter, path)
    for key, value in slots.items():
        if not isinstance(value, torch.Tensor) or key not in form:
            continue
        if is_dtensor(value) and is_cut_like(value, parameter):
            form[key] = (
                Shard(local_part(value), own.shape, own.starts, own.is_copied, own.placement)
                if isinstance(own, Shard)
                else local_part(value)
            )
        elif is_dtensor(value) or (value.dim() and value.shape == parameter.shape):
            kept = f"cut as {value.placements}" if is_dtensor(value) else "whole, beside a parameter that is cut"  # type: ignore[attr-defined]
            raise InvalidState(
                f"{path}[{key!r}]",
                expected="a slot that is cut as its parameter is, or one of another shape that is the same on every rank",
                found=f"a tensor of shape {list(value.shape)} that is {kept}",
                fix="use an optimizer that makes its slots with torch.zeros_like(parameter), such as AdamW",
            )
    return form


def slot_cut_problems(slots: Mapping[str, Any], parameter: torch.Tensor, path: str) -> list[InvalidState]:
    """Return a problem for each saved slot that does not have the part that this rank holds of the parameter."""
    own = leaf_of(parameter, path)
    return [
        InvalidState(
            f"{path}[{key!r}]",
            expected="the part that this rank holds",
            found=found,
            fix="restore on as many ranks as the state was captured on, or load it from its checkpoint",
        )
        for key, value in slots.items()
        if (found := cut_differs(value, own)) is not None
    ]


def part_of_slot(value: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a saved slot of a parameter's shape, if the parameter is a DTensor; None for any other slot."""
    if not is_dtensor(parameter):
        return None
    is_like = isinstance(value, Shard) or (
        isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
    )
    return part_for(value, leaf_of(parameter, "slot")) if is_like else None


def slot_for(part: torch.Tensor, present: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the slot for this rank's part of its values, and the memory to write them to; None if it is new and has them.

    Args:
        part: the values; a meta tensor for values that are read later.
        present: the slot that the optimizer has; anything else if it has none.
        parameter: a DTensor.
    """
    if is_dtensor(present) and is_cut_like(present, parameter):
        own = local_part(present)
        if own.shape == part.shape and own.dtype == part.dtype:
            return present, own
    made = like_parameter(part, parameter)
    return made, local_part(made) if part.is_meta else None
