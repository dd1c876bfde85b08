"""Where an optimizer's slots live: on the device and in the memory layout of their parameter, as torch keeps them."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState, ParamGroup


def beside_params(optimizer: OptimizerState, params: Mapping[str, torch.Tensor]) -> OptimizerState:
    """The same slots and masters, each beside its parameter; those that are there already are not copied.

    A slot of its parameter's shape gets the parameter's strides, because kernels round differently in another layout. A
    ``step`` counter stays on the CPU unless its group is fused or capturable.

    Examples:
        >>> w = torch.zeros(2, 3).t()
        >>> state = OptimizerState("k", Leaves({"w": {"exp_avg": torch.zeros(3, 2)}}), (ParamGroup({}, ("w",)),))
        >>> beside_params(state, {"w": w}).slots["w"]["exp_avg"].stride()
        (1, 3)

    Source: ``Optimizer._process_value_according_to_param_policy`` of torch.
    """
    on_device = {fqn for group in optimizer.groups if _counts_on_device(group) for fqn in group.params}
    slots = {
        fqn: {name: _place(leaf, name, params.get(fqn), fqn in on_device) for name, leaf in held.items()}
        for fqn, held in optimizer.slots.items()
    }
    masters = optimizer.masters
    if masters is not None:
        masters = Leaves({fqn: laid_out_like(leaf, params.get(fqn)) for fqn, leaf in masters.items()})
    return attrs.evolve(optimizer, slots=Leaves(slots), masters=masters)


def laid_out_like(value: torch.Tensor, target: object) -> torch.Tensor:
    """A tensor with its values on the target's device and, where the shapes agree, with the target's strides.

    Args:
        value: contiguous values, as they are read.
        target: a tensor, or anything else, which changes nothing; a meta tensor gives only its strides.

    Examples:
        >>> laid_out_like(torch.zeros(3, 2), torch.zeros(2, 3).t()).stride()
        (1, 3)
    """
    if not isinstance(target, torch.Tensor):
        return value
    device = value.device if target.is_meta else target.device
    if target.shape != value.shape or target.is_contiguous() or target.layout is not torch.strided:
        return value.to(device)
    return torch.empty_like(target, dtype=value.dtype, device=device, requires_grad=False).copy_(value)


def check_layouts(optimizer: OptimizerState, params: Mapping[str, torch.Tensor]) -> None:
    """Refuse a slot that would come back in another memory layout: kernels round differently there (W05).

    A slot comes back in the layout of its parameter if it has its shape, and else row by row.

    Args:
        optimizer: what pure steps have made.
        params: FQN -> parameter.

    Raises:
        UnsupportedLeaf: naming the slot.

    Examples:
        >>> state = OptimizerState("SOAP", Leaves({"w": {"GG": [torch.zeros(2, 3).t()]}}), ())
        >>> check_layouts(state, {"w": torch.zeros(2)})
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnsupportedLeaf: optimizer.slots['w']['GG'][0]: expected a tensor that lies in memory as it would \
after a load: strides [2, 1], found strides [1, 3], and so other bits after a resume; use the optimizer itself in a loop of your \
own, with trainfold.attach(model, optimizer): its layouts are saved
    """
    for fqn, held in optimizer.slots.items():
        given = params.get(fqn)
        param = given if isinstance(given, torch.Tensor) else None  # and no shard, and no array
        is_plain = param is None or param.is_contiguous()
        for name, leaf in held.items():
            if type(leaf) is torch.Tensor and is_plain and leaf.is_contiguous():
                continue  # nearly all of them
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
            expected=f"a tensor that lies in memory as it would after a load: strides {list(usual.stride())}",
            found=f"strides {list(leaf.stride())}, and so other bits after a resume",
            fix="use the optimizer itself in a loop of your own, with trainfold.attach(model, optimizer): its layouts are saved",
        )


def _counts_on_device(group: ParamGroup) -> bool:
    return group.hyper.get("fused") is True or group.hyper.get("capturable") is True  # a checkpoint may say anything


def _place(leaf: Any, name: str, param: torch.Tensor | None, counts_on_device: bool) -> Any:  # noqa: FBT001 - private
    if not isinstance(leaf, torch.Tensor) or param is None or (name == "step" and not counts_on_device):
        return leaf
    return laid_out_like(leaf, param)
