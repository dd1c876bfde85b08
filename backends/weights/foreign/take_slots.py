"""`taken_slots`: the slots of a saved optimizer by name, in the parts of this rank. `check_none_missing`: whether the optimizer here could go on with them."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from trainfold.backends.weights.foreign.training import Training, is_absent
from trainfold.core.errors import InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.optim.torch_slots import slots_of_torch
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.state import OptimizerState, TrainState
from trainfold.core.weights.source import Wanted

_ONE: Final = ((), (1,))  # the shapes of a counter


def taken_slots(
    state: TrainState, training: Training, order: Mapping[str, str], hyper: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Name of a parameter -> slot -> what this rank holds of it.

    Args:
        state: of this rank.
        training: what was saved.
        order: the number or the name under which a parameter was saved -> its name here.
        hyper: name -> the settings that it has now, of all parameters of the whole optimizer.

    Raises:
        InvalidState: naming a slot of another shape, or of a parameter that is in no group.
    """
    assert training.slots is not None
    assert state.model is not None or not order, "a state with an optimizer has a model"
    params: Mapping[str, Any] = {} if state.model is None else state.model.params
    kind = state.optimizer.kind if isinstance(state.optimizer, OptimizerState) else ""
    wanted, owners = {}, {}
    for full, spec in training.slots.specs().items():
        name, slot = _owner(full, order, hyper, training)
        if name not in params:  # it is of another stage
            continue
        leaf = params[name]
        is_cut = isinstance(leaf, Shard) and spec.shape == tuple(leaf.shape)
        _check_shape(
            f"optimizer: {name}.{slot}",
            leaf,
            spec.shape,
            (slots_of_torch(kind, hyper[name], tuple(leaf.shape)) or {}).get(slot),
        )
        wanted[full] = Wanted(spec.dtype, spec.shape, leaf.box if is_cut else whole_box(spec.shape))
        owners[full] = name, slot, leaf if is_cut else None
    found: dict[str, dict[str, Any]] = {}
    for full, tensor in training.slots.supply(wanted):
        name, slot, cut = owners[full]
        found.setdefault(name, {})[slot] = (
            tensor.clone() if cut is None else attrs.evolve(cut, tensor=_part(tensor, cut, wanted[full].box))
        )
    for full, value in training.values.items():
        name, slot = _owner(f"{full}." if isinstance(value, Mapping) and not value else full, order, hyper, training)
        if name in params and not is_absent(value):
            found.setdefault(name, {})[slot] = value
    return {name: dict(sorted(each.items())) for name, each in found.items()}


def check_none_missing(
    kind: str,
    state: TrainState,
    slots: Mapping[str, Mapping[str, Any]],
    hyper: Mapping[str, Mapping[str, Any]],
    where: str,
) -> None:
    """Check that no parameter with slots lacks one that its optimizer makes. One without any never had a gradient.

    Args:
        kind: the class of the optimizer.
        state: of this rank.
        slots: name -> slot -> value.
        hyper: name -> its settings.
        where: the checkpoint, for messages.

    Raises:
        InvalidState: naming the first parameter, and its missing slots.
    """
    params: Mapping[str, Any] = {} if state.model is None else state.model.params
    lacks: dict[str, list[str]] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, each in slots.items():
        made = slots_of_torch(kind, hyper[name], tuple(params[name].shape)) or {}
        if missing := [slot for slot in made if slot not in each]:
            expected = expected or made
            lacks[name] = missing
    if lacks:
        first, missing = next(iter(lacks.items()))
        more = f", and so of {len(lacks) - 1} more parameters" if len(lacks) > 1 else ""
        raise InvalidState(f"optimizer: {first}", expected=f"the slots {list(expected)} of {kind.rpartition('.')[2]}",
                           found=f"{', '.join(map(repr, missing))} missing{more} in {where}",
                           fix="save it again with the whole optimizer; or take the model alone, with a fresh optimizer: take_weights(state, training.model)")  # fmt: skip


def _check_shape(where: str, leaf: Any, found: tuple[int, ...], made: tuple[int, ...] | None) -> None:
    """Raise unless a slot can be one of its parameter.

    Args:
        where: the slot, for messages.
        leaf: the parameter on this rank.
        found: the shape that was saved.
        made: the shape that its optimizer gives it; None if that is not known.
    """
    shape = tuple(leaf.shape)
    if found not in _ONE and made not in (None, (), shape) and isinstance(leaf, Shard):
        raise InvalidState(where, expected="a slot that is cut as its parameter, of which this rank holds a part", found=f"one of the shape {list(found)}",
                           fix="take it in one process that has the whole model, save a run there, and continue from that")  # fmt: skip
    allowed = (*_ONE, shape) if made is None else _ONE if made == () else (made,)
    if found not in allowed:
        said = (
            f"the shape {list(shape)} of its parameter, or one number"
            if made in (None, (), shape)
            else f"the shape {list(made)}, as its optimizer makes it of {list(shape)}"
        )
        raise InvalidState(where, expected=said, found=list(found), fix="make the optimizer of the parameters that it was saved with, in their order")  # fmt: skip


def _part(tensor: torch.Tensor, cut: Shard, box: Box) -> torch.Tensor:
    """What this rank holds of what a source has yielded: all of it, or the box."""
    if tuple(tensor.shape) == tuple(cut.shape):
        tensor = tensor[tuple(slice(start, stop) for start, stop in box)]
    return tensor.to(cut.tensor.device, copy=True)


def _owner(full: str, order: Mapping[str, str], hyper: Mapping[str, Any], training: Training) -> tuple[str, str]:
    """The parameter and the slot of a saved value."""
    saved, _, slot = full.rpartition(".")
    short = canonical_name(saved) if not training.is_numbered else saved
    name = order.get(saved, order.get(short, short))
    if name not in hyper:
        raise InvalidState(f"optimizer: {full.rstrip('.')}", expected="a slot of a parameter in a group", found=saved, fix=f"look at {training.where}: it is not as torch writes it")  # fmt: skip
    return name, slot
