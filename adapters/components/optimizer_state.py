"""The state of a torch optimizer as a value: slots and groups by canonical name, and the rest of what it keeps."""

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Any, Final

import torch

from trainfold.adapters.components.component import kind_of
from trainfold.adapters.components.held_optimizers import (
    AsAttached,
    changed_attributes,
    held_optimizers,
    is_given,
    own_state,
    says_own_state,
)
from trainfold.adapters.own_state.plain_form import to_plain, with_layout
from trainfold.core.errors import InvalidState
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState, OwnOptimizerState, ParamGroup

NOT_HYPER: Final = ("params", "param_names")


def capture_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    *,
    attached: AsAttached | None = None,
    around: tuple[torch.optim.Optimizer, ...] = (),
) -> OptimizerState | OwnOptimizerState:
    """An optimizer's state as a value, keyed by name; its tensors are the optimizer's own, not copies.

    A parameter that never had a gradient has no slots, as in torch (B10). Of gradients only their presence is in it. Where
    slots and groups are not all of it, because its class has a ``state_dict`` of its own, it holds other optimizers, or keeps
    something under other keys than parameters, it is an `OwnOptimizerState` (W05).

    Args:
        optimizer: any torch optimizer.
        names: ``id(parameter)`` -> canonical name.
        attached: what it was when it was attached; None where plain attributes are not asked for.
        around: the optimizers that hold it.

    Raises:
        InvalidState: if the optimizer holds a tensor that has no name.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = capture_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), {id(model.weight): "w", id(model.bias): "b"})
        >>> state.kind, state.groups[0].params
        ('torch.optim.sgd.SGD', ('w', 'b'))
    """
    held = held_optimizers(optimizer, around)
    says = says_own_state(optimizer)
    attributes = changed_attributes(optimizer, attached)
    base, loose = _base(optimizer, names, attached, with_slots=not says)
    if not (says or held or attributes or loose):
        return base
    return OwnOptimizerState(
        base,
        own=to_plain(own_state(optimizer), names) if says else None,
        loose=loose,
        attributes=attributes,
        held={
            name: capture_optimizer(
                each, names, attached=attached and attached.held.get(name), around=(*around, optimizer)
            )
            for name, each in held.items()
        },
    )


def groups_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], attached: AsAttached | None = None
) -> tuple[ParamGroup, ...]:
    """The param groups of an optimizer, by name, with what stands in them now.

    A member of an enumeration that stands there since the optimizer was attached is the script's to give, and not in them.
    """
    return tuple(
        ParamGroup(
            hyper={
                key: to_plain(value, names)
                for key, value in group.items()
                if key not in NOT_HYPER and not (isinstance(value, Enum) and is_given(attached, number, key, value))
            },
            params=tuple(names_of(group["params"], names, f"optimizer.groups[{number}]")),
        )
        for number, group in enumerate(optimizer.param_groups)
    )


def _base(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], attached: AsAttached | None, *, with_slots: bool
) -> tuple[OptimizerState, dict[str, Any] | None]:
    """Slots and groups; and what is in ``optimizer.state`` under keys that are no parameters, if anything is."""
    groups = groups_of(optimizer, names, attached)
    state = optimizer.state if with_slots else {}
    held = [(parameter, each) for parameter, each in state.items() if each]  # a look may leave an empty entry
    found = list(map(names.get, map(id, (parameter for parameter, _ in held))))
    loose: dict[str, Any] | None = None
    if None in found:
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        loose = to_plain(others, names) if others else None
        held = [(parameter, each) for parameter, each in held if isinstance(parameter, torch.Tensor)]
        found = list(names_of([parameter for parameter, _ in held], names, "optimizer.state"))
    slots = dict(zip(found, _copied_slots(held, names, is_torchs=_is_torchs(optimizer)), strict=True))
    order = list(filter(slots.__contains__, chain.from_iterable(group.params for group in groups)))
    base = OptimizerState(
        kind=kind_of(optimizer),
        slots=Leaves(zip(order, map(slots.__getitem__, order), strict=True)),
        groups=groups,
        with_grad=tuple(
            name
            for mine, theirs in zip(groups, optimizer.param_groups, strict=True)
            for name, parameter in zip(mine.params, theirs["params"], strict=True)
            if (grad := parameter.grad) is not None and grad.layout is torch.strided  # no zeros are like a sparse one
        ),
    )
    return base, loose


def _copied_slots(held: list[tuple[torch.Tensor, Any]], names: Mapping[int, str], *, is_torchs: bool) -> Iterable[Any]:
    slots = [each for _, each in held]
    if set(map(type, slots)) <= {dict} and set(map(type, chain.from_iterable(map(dict.values, slots)))) <= {
        torch.Tensor
    }:
        tensors = () if is_torchs else chain((p for p, _ in held), chain.from_iterable(map(dict.values, slots)))
        if all(map(torch.Tensor.is_contiguous, tensors)):  # torch's own lie as their parameters do
            return map(dict.copy, slots)  # there are many, and nearly all are so
    return [_slot_form(parameter, each, names) for parameter, each in held]


def _slot_form(parameter: torch.Tensor, slots: Mapping[str, Any], names: Mapping[int, str]) -> Any:
    form = to_plain(slots, names)
    for key, value in slots.items():
        if isinstance(value, torch.Tensor) and key in form and id(value) not in names:
            form[key] = with_layout(value, parameter if parameter.shape == value.shape else None)
    return form


def names_of(parameters: Collection[Any], names: Mapping[int, str], where: str) -> list[str]:
    """Return the canonical names of parameters.

    Raises:
        InvalidState: for a tensor without a name.
    """
    found = list(map(names.get, map(id, parameters)))
    if None in found:
        parameter = next(each for each, name in zip(parameters, found, strict=True) if name is None)
        shape = list(parameter.shape) if isinstance(parameter, torch.Tensor) else parameter
        raise InvalidState(
            where,
            expected="parameters of the attached model",
            found=f"a tensor of shape {shape} that the model does not have",
            fix="build the optimizer from the parameters of this model, after it was wrapped or moved; "
            "or attach the module that has it under extra=",
        )
    return [name for name in found if name is not None]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def base_of(saved: OptimizerState | OwnOptimizerState) -> OptimizerState:
    """Slots and groups, whatever else is there."""
    return saved.base if isinstance(saved, OwnOptimizerState) else saved
