"""The device and memory layout of an optimizer's slots: those of their parameter, as in torch."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState, ParamGroup


def beside_params(optimizer: OptimizerState, params: Mapping[str, torch.Tensor]) -> OptimizerState:
    """Return the slots and masters, each on the device and in the layout of its parameter; a copy only where that differs.

    A slot with the shape of its parameter gets the strides of the parameter, because kernels round differently in another
    layout. A ``step`` counter stays on the CPU unless its group is fused or capturable.

    Examples:
        >>> w = torch.zeros(2, 3).t()
        >>> state = OptimizerState("k", Leaves({"w": {"exp_avg": torch.zeros(3, 2)}}), (ParamGroup({}, ("w",)),))
        >>> beside_params(state, {"w": w}).slots["w"]["exp_avg"].stride()
        (1, 3)

    Source: ``Optimizer._process_value_according_to_param_policy`` of torch.
    """
    on_device = {fqn for group in optimizer.groups if _counts_on_device(group) for fqn in group.params}
    slots = {
        fqn: {name: _place(leaf, name, params.get(fqn), fqn in on_device) for name, leaf in of_param.items()}
        for fqn, of_param in optimizer.slots.items()
    }
    masters = optimizer.masters
    if masters is not None:
        masters = Leaves({fqn: laid_out_like(leaf, params.get(fqn)) for fqn, leaf in masters.items()})
    return attrs.evolve(optimizer, slots=Leaves(slots), masters=masters)


def laid_out_like(value: torch.Tensor, target: object) -> torch.Tensor:
    """Return the values as a tensor on the target's device, with the target's strides if the shapes agree.

    Args:
        value: contiguous values, as they are read.
        target: a tensor; a meta tensor gives only its strides. With anything else the values are returned as they are, and
            so is a meta tensor that stands for values, unless the target is one.

    Examples:
        >>> laid_out_like(torch.zeros(3, 2), torch.zeros(2, 3).t()).stride()
        (1, 3)
    """
    if not isinstance(target, torch.Tensor) or (value.is_meta and not target.is_meta):
        return value
    device = value.device if target.is_meta else target.device
    if target.shape != value.shape or target.is_contiguous() or target.layout is not torch.strided:
        return value.to(device)
    return torch.empty_like(target, dtype=value.dtype, device=device, requires_grad=False).copy_(value)


def check_layouts(optimizer: OptimizerState, params: Mapping[str, torch.Tensor]) -> None:
    """Refuse a slot that a load would restore in another memory layout, in which kernels round differently.

    A load restores a slot in the layout of its parameter if it has the shape of the parameter, and row by row otherwise.

    Args:
        optimizer: the optimizer component of a pure step.
        params: FQN -> parameter.

    Raises:
        UnsupportedLeaf: naming the slot.

    Examples:
        >>> state = OptimizerState("SOAP", Leaves({"w": {"GG": [torch.zeros(2, 3).t()]}}), ())
        >>> check_layouts(state, {"w": torch.zeros(2)})
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnsupportedLeaf: optimizer.slots['w']['GG'][0]: expected a tensor in the memory layout that a \
load restores: strides [2, 1], found strides [1, 3], which give other bits after a resume; use the optimizer itself in your own \
loop, with trainfold.attach(model, optimizer): its layouts are saved
    """
    for fqn, of_param in optimizer.slots.items():
        given = params.get(fqn)
        param = given if isinstance(given, torch.Tensor) else None  # neither a shard nor an array
        is_plain = param is None or param.is_contiguous()
        for name, leaf in of_param.items():
            if type(leaf) is torch.Tensor and is_plain and leaf.is_contiguous():
                continue  # nearly all leaves
            for path, each in tree.named_leaves(leaf, f"optimizer.slots[{fqn!r}][{name!r}]"):
                if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                    is_beside = each is leaf and param is not None and name != "step"
                    _check_layout(path, each, param if is_beside else None)


def _check_layout(path: str, leaf: torch.Tensor, param: torch.Tensor | None) -> None:
    read = torch.empty(leaf.shape, device="meta")
    usual = read if param is None else laid_out_like(read, param.to("meta"))
    have, want = ([s for s, n in zip(each.stride(), each.shape, strict=True) if n > 1] for each in (leaf, usual))
    if have != want and leaf.numel():
        raise UnsupportedLeaf(
            path,
            expected=f"a tensor in the memory layout that a load restores: strides {list(usual.stride())}",
            found=f"strides {list(leaf.stride())}, which give other bits after a resume",
            fix="use the optimizer itself in your own loop, with trainfold.attach(model, optimizer): its layouts are saved",
        )


def _counts_on_device(group: ParamGroup) -> bool:
    # True and no other value: a checkpoint may hold anything here
    return group.hyper.get("fused") is True or group.hyper.get("capturable") is True


def _place(leaf: Any, name: str, param: torch.Tensor | None, counts_on_device: bool) -> Any:  # noqa: FBT001 - private
    if not isinstance(leaf, torch.Tensor) or param is None or (name == "step" and not counts_on_device):
        return leaf
    return laid_out_like(leaf, param)
