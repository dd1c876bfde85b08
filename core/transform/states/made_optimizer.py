"""`made_optimizer`: the optimizer of the results, if it updates each element for itself: slots are put together as their parameters are."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from trainfold.core.errors import InvalidState
from trainfold.core.json_values import shown
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.states.made_model import MadeModel

ELEMENTWISE: Final = frozenset(
    f"torch.optim.{name.lower()}.{name}"
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers whose update of an element depends on that element of the parameter, the gradient and the slots, on counters and on settings alone."""

_COUNTERS: Final = frozenset({"step", "eta", "mu", "mu_product"})  # slots with one number for each parameter
_FIX: Final = "begin at step 0 with the weights alone: trainfold.weights.Transformed(source, rules); or leave the optimizer out: state.evolve(optimizer=None)"


def made_optimizer(found: Any, made: MadeModel, params: list[str]) -> OptimizerState:
    """The optimizer of the results.

    Args:
        found: the optimizer.
        made: of the model.
        params: the results that are parameters.

    Raises:
        InvalidState: naming the parameter: if the optimizer is not one of `ELEMENTWISE`, or its parts have other groups, slots or counters.
    """
    if not isinstance(found, OptimizerState) or (made.changed and found.kind not in ELEMENTWISE):
        known = ", ".join(sorted(each.rpartition(".")[2] for each in ELEMENTWISE))
        raise InvalidState("optimizer", expected=f"one that updates each element for itself: {known}",
                           found=found.kind if isinstance(found, OptimizerState) else type(found).__qualname__, fix=_FIX)  # fmt: skip
    group_of = {name: number for number, group in enumerate(found.groups) for name in group.params}
    masters: Mapping[str, Any] = {} if found.masters is None else found.masters
    groups: dict[int | None, list[str]] = {}
    slots: dict[str, dict[str, Any]] = {}
    for name in params:
        sources = made.sources[name]
        groups.setdefault(_same(name, "one param group", {each: group_of.get(each) for each in sources}), []).append(
            name
        )
        _same(name, "a gradient at all or at none", {each: each in found.with_grad for each in sources})
        _same(name, "an fp32 master at all or at none", {each: each in masters for each in sources})
        _same(name, "one set of slots", {each: sorted(found.slots.get(each, ())) for each in sources})
        if sources[0] in found.slots:
            slots[name] = dict(found.slots[sources[0]])
    for slot in dict.fromkeys(key for name in made.changed & slots.keys() for key in slots[name]):
        held = {name: each[slot] for name, each in found.slots.items() if slot in each}
        mine = [name for name in slots if name in made.changed and slot in slots[name]]
        values = _counters(slot, held, mine, made) if slot in _COUNTERS else _moments(slot, held, mine, made)
        for name, value in values.items():
            slots[name][slot] = value
    return attrs.evolve(
        found,
        slots=Leaves(slots),
        groups=tuple(attrs.evolve(group, params=tuple(groups.get(at, ()))) for at, group in enumerate(found.groups)),
        masters=None if found.masters is None else Leaves(made.values(masters, [name for name in params if made.sources[name][0] in masters])),
        with_grad=tuple(name for name in params if made.sources[name][0] in found.with_grad),
    )  # fmt: skip


def _moments(slot: str, held: Mapping[str, Any], results: list[str], made: MadeModel) -> dict[str, Any]:
    """A slot with the elements of its parameter, put together as these are; None where it is not there yet."""
    for name in dict.fromkeys(each for result in results for each in made.sources[result]):
        value, shape = held[name], made.shapes[name]
        if value is not None and (not isinstance(value, torch.Tensor) or tuple(value.shape) != shape):
            raise InvalidState(f"optimizer: {name}.{slot}", expected=f"a tensor of the shape {list(shape)} of its parameter",
                               found=list(value.shape) if isinstance(value, torch.Tensor) else shown(value), fix=_FIX)  # fmt: skip
    there = [name for name in results if not _same(name, f"a {slot} at all or at none", {each: held[each] is None for each in made.sources[name]})]  # fmt: skip
    return {**dict.fromkeys(results), **made.values({name: each for name, each in held.items() if each is not None}, there)}  # fmt: skip


def _counters(slot: str, held: Mapping[str, Any], results: list[str], made: MadeModel) -> dict[str, Any]:
    """A number that is equal in all parts; each result has its own."""
    found = {}
    for name in results:
        values = {each: held[each] for each in made.sources[name]}
        bits = {each: bytes(tensor_bytes(value)) if isinstance(value, torch.Tensor) else value for each, value in values.items()}  # fmt: skip
        _same(name, f"an equal {slot}", bits, shown_as={each: value.item() if isinstance(value, torch.Tensor) else value for each, value in values.items()})  # fmt: skip
        first = next(iter(values.values()))
        found[name] = first.clone() if isinstance(first, torch.Tensor) else first
    return found


def _same(name: str, what: str, values: Mapping[str, Any], *, shown_as: Mapping[str, Any] | None = None) -> Any:
    """What all parts of a result have.

    Raises:
        InvalidState: naming two of them, if they differ.
    """
    first, *others = values
    other = next((each for each in others if values[each] != values[first]), None)
    if other is not None:
        said = values if shown_as is None else shown_as
        raise InvalidState(f"optimizer: {name}", expected=f"parts that have {what}", found=f"{said[first]} for {first}, {said[other]} for {other}", fix=_FIX)  # fmt: skip
    return values[first]
