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
    overrides_state_dict,
    own_state,
)
from trainfold.adapters.components.sharded_slots import slot_leaves
from trainfold.adapters.own_state.plain_form import to_plain, with_layout
from trainfold.adapters.sharded.dtensor import is_dtensor
from trainfold.core.errors import InvalidState
from trainfold.core.format.codec import DENSE
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
    """Return an optimizer's state as a value, keyed by name; tensors are the optimizer's own, not copies.

    As in torch, a parameter that never had a gradient has no slots. Of gradients, the state records only which parameters
    have one. It is an `OwnOptimizerState` if there is more than slots and groups: if the class overrides ``state_dict``, or
    the optimizer holds other optimizers or keeps entries under keys other than parameters.

    Args:
        optimizer: any torch optimizer.
        names: ``id(parameter)`` -> canonical name.
        attached: the optimizer's settings when it was attached; None to leave out plain attributes.
        around: the optimizers that hold this one.

    Raises:
        InvalidState: if the optimizer holds a tensor without a name.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = capture_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), {id(model.weight): "w", id(model.bias): "b"})
        >>> state.kind, state.groups[0].params
        ('torch.optim.sgd.SGD', ('w', 'b'))
    """
    held = held_optimizers(optimizer, around)
    overrides = overrides_state_dict(optimizer)
    attributes = changed_attributes(optimizer, attached)
    base, loose = _base(optimizer, names, attached, with_slots=not overrides)
    if not (overrides or held or attributes or loose):
        return base
    return OwnOptimizerState(
        base,
        own=to_plain(own_state(optimizer), names) if overrides else None,
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
    """Return the param groups of an optimizer, by name, with their current values.

    They leave out a member of an enumeration that was there when the optimizer was attached: the script supplies it.
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
    """Return slots and groups, and the entries of ``optimizer.state`` whose keys are not parameters, if there are any."""
    groups = groups_of(optimizer, names, attached)
    state = optimizer.state if with_slots else {}
    entries = [(parameter, each) for parameter, each in state.items() if each]  # reading may leave an empty entry
    found = list(map(names.get, map(id, (parameter for parameter, _ in entries))))
    loose: dict[str, Any] | None = None
    if None in found:
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        loose = to_plain(others, names) if others else None
        entries = [(parameter, each) for parameter, each in entries if isinstance(parameter, torch.Tensor)]
        found = list(names_of([parameter for parameter, _ in entries], names, "optimizer.state"))
    slots = dict(zip(found, _copied_slots(entries, names, is_torchs=_is_torchs(optimizer)), strict=True))
    order = list(filter(slots.__contains__, chain.from_iterable(group.params for group in groups)))
    base = OptimizerState(
        kind=kind_of(optimizer),
        slots=Leaves(zip(order, map(slots.__getitem__, order), strict=True)),
        groups=groups,
        with_grad=tuple(
            name
            for mine, theirs in zip(groups, optimizer.param_groups, strict=True)
            for name, parameter in zip(mine.params, theirs["params"], strict=True)
            if (grad := parameter.grad) is not None
            and grad.layout is torch.strided  # zeros cannot replace a sparse gradient
        ),
    )
    return base, loose


def _copied_slots(
    entries: list[tuple[torch.Tensor, Any]], names: Mapping[int, str], *, is_torchs: bool
) -> Iterable[Any]:
    slots = [each for _, each in entries]
    is_dense = set(map(type, (parameter for parameter, _ in entries))) <= DENSE  # no DTensors among them
    if (
        is_dense
        and set(map(type, slots)) <= {dict}
        and set(map(type, chain.from_iterable(map(dict.values, slots)))) <= {torch.Tensor}
    ):
        tensors = () if is_torchs else chain((p for p, _ in entries), chain.from_iterable(map(dict.values, slots)))
        if all(map(torch.Tensor.is_contiguous, tensors)):  # torch's own slots have the layout of their parameters
            return map(dict.copy, slots)  # the fast path, which nearly all slots take
    return [_slot_form(parameter, each, names) for parameter, each in entries]


def _slot_form(parameter: torch.Tensor, slots: Mapping[str, Any], names: Mapping[int, str]) -> Any:
    is_cut = is_dtensor(parameter)
    is_plain = is_cut and all(isinstance(each, torch.Tensor) and id(each) not in names for each in slots.values())
    form = dict(slots) if is_plain else to_plain(slots, names)
    if is_cut:
        return slot_leaves(form, slots, parameter, f"slots[{names.get(id(parameter))!r}]")
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
            "or attach the module that owns the tensor under extra=",
        )
    return [name for name in found if name is not None]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def base_of(saved: OptimizerState | OwnOptimizerState) -> OptimizerState:
    """Return the slots and groups of any optimizer state."""
    return saved.base if isinstance(saved, OwnOptimizerState) else saved
