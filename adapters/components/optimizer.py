"""`OptimizerPart`: a torch optimizer as the ``optimizer`` component: slots by canonical name, written without torch's casts."""

from collections.abc import Mapping
from typing import Any, final

import attrs
import torch

from trainfold.adapters.components.component import Fill, Undo, copied, copy_values, kind_of, nothing, wrong_kind
from trainfold.adapters.components.held_optimizers import (
    AsAttached,
    changed_attributes,
    held_optimizers,
    nest_of,
    overrides_state_dict,
)
from trainfold.adapters.components.optimizer_state import NOT_HYPER, base_of, capture_optimizer, names_of
from trainfold.adapters.components.sharded_slots import part_of_slot, slot_cut_problems, slot_for
from trainfold.adapters.components.slot_checks import fits, group_problems, slot_problems
from trainfold.adapters.own_state.plain_form import from_plain, to_plain
from trainfold.adapters.own_state.read_back import first_unequal, unlike_saved
from trainfold.adapters.own_state.remembered import remember
from trainfold.adapters.sharded.parts import as_whole
from trainfold.core import tree
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.state.state import OptimizerState, OwnOptimizerState

_KEPT = (*NOT_HYPER, "initial_lr")  # a scheduler made after a restore needs initial_lr
_ABSENT = object()


@final
@attrs.frozen
class OptimizerPart:
    """A torch optimizer behind a component.

    Attributes:
        optimizer: the live optimizer; its param group dicts stay, because a scheduler keeps references to them.
        names: ``id(parameter)`` -> canonical name.
        path: the component, for messages.
        attached: its settings when it was attached.
        around: the optimizers that hold this one.
        fill: writes the values of slots.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[int, str]
    path: str = "optimizer"
    attached: AsAttached | None = None
    around: tuple[torch.optim.Optimizer, ...] = ()
    fill: Fill = copy_values

    @property
    def has_own_way(self) -> bool:
        """Whether it overrides ``state_dict`` or holds other optimizers; a write must then be read back and checked."""
        return overrides_state_dict(self.optimizer) or bool(held_optimizers(self.optimizer, self.around))

    def capture(self) -> OptimizerState | OwnOptimizerState:
        """Return slots and hyperparameters; tensors are not copied."""
        return capture_optimizer(self.optimizer, self.names, attached=self.attached, around=self.around)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Return all reasons: another class, other parameters or groups, missing slots, slots of another shape or type."""
        if not isinstance(saved, OptimizerState | OwnOptimizerState):
            return [wrong_kind(self.path, "the state of a torch optimizer", saved)]
        base = base_of(saved)
        found: list[TrainfoldError] = []
        if base.kind != kind_of(self.optimizer):
            found.append(
                self._problem("kind", kind_of(self.optimizer), base.kind, "make an optimizer of the class of the state")
            )
        params = self._params()
        mine = {frozenset(group) for group in self.groups()}
        theirs = {frozenset(group.params) for group in base.groups}
        if mine != theirs:
            names = frozenset[str]().union(*theirs)
            found.append(
                self._problem(
                    "groups",
                    f"{len(mine)} groups of {len(params)} parameters in all",
                    f"{len(theirs)} groups of {len(names)}; missing {sorted(set(params) - names)[:8]}, "
                    f"unexpected {sorted(names - set(params))[:8]}",
                    "put the same parameters into the same groups (their order does not matter)",
                )
            )
            return found
        found.extend(self._shared_problems(base))
        unknown = sorted(set(base.slots) - set(params))
        if unknown:
            found.append(self._problem("slots", "slots of parameters in a group", unknown[:8], "repair the state"))
        try:
            slots = {name: from_plain(form, params) for name, form in base.slots.items()}
        except InvalidState as error:
            return [*found, error]
        for name, each in slots.items():
            found.extend(
                slot_cut_problems(each, params[name], f"{self.path}.slots[{name!r}]") if name in params else ()
            )
        slots = {name: {key: as_whole(value) for key, value in each.items()} for name, each in slots.items()}
        is_torchs = base.kind.startswith("torch.optim.") and not found
        present = (
            {name: self.optimizer.state.get(parameter, {}) for name, parameter in params.items()} if base.slots else {}
        )
        found.extend(slot_problems(base.groups, slots, params, present, self.path, is_torchs=is_torchs))
        live = {
            frozenset(names): group for names, group in zip(self.groups(), self.optimizer.param_groups, strict=True)
        }
        found.extend(group_problems(base, live, self.path))
        return found or self._own_problems(saved)

    def _own_problems(self, saved: OptimizerState | OwnOptimizerState) -> list[TrainfoldError]:
        """Check what the state has beside slots and groups."""
        own = saved if isinstance(saved, OwnOptimizerState) else OwnOptimizerState(saved)
        found: list[TrainfoldError] = []
        kind = type(self.optimizer).__qualname__
        if overrides_state_dict(self.optimizer) != (own.own is not None):
            sides = ("the result of its own state_dict()", "slots alone")
            expected, got = sides if own.own is None else sides[::-1]
            fix = f"use the {kind} that the state was captured from; older versions of trainfold lost what only its state_dict() has"
            found.append(self._problem("own", expected, got, fix))
        elif own.own is not None and [group.params for group in own.base.groups] != self.groups():
            fix = f"pass {kind} its parameters in the saved order, because its own state_dict() numbers them"
            found.append(self._problem("groups", "parameters in the order of the saved ones", "another order", fix))
        mine = self.held()
        if set(mine) != set(own.held):
            fix = f"build the {kind} around the same optimizers as when the state was saved"
            found.append(
                self._problem("held", f"the states of {sorted(mine)}", f"the states of {sorted(own.held)}", fix)
            )
        else:
            for name, part in mine.items():
                found.extend(part.problems(own.held[name]))
        for name, value in (own.attributes or {}).items():
            if not self._may_set(name, value):
                found.append(self._problem(name, "a plain attribute", repr(value)[:80], "use another checkpoint"))
        return found

    def _may_set(self, name: str, value: Any) -> bool:
        known = vars(self.optimizer)
        is_reserved = (
            name[:1] == "_" or name in ("state", "param_groups", "defaults") or hasattr(type(self.optimizer), name)
        )
        return not is_reserved and (name not in known or fits(value, to_plain(known[name], self.names)))

    @property
    def may_refuse(self) -> bool:
        """Whether a write may fail although it has no problems; such parts are written first."""
        return self.has_own_way

    def write(self, saved: Any) -> Undo:
        """Write the slots and hyperparameters straight into the optimizer.

        It does not call ``load_state_dict``, which casts slots to the dtype of their parameter. An existing slot tensor of
        the same shape, dtype and strides is overwritten in place. If the class overrides ``state_dict``, or holds other optimizers,
        its own ``load_state_dict`` is called, and the state is captured again and compared.

        Raises:
            InvalidState: if its own method does not restore the state; then nothing is changed.
        """
        if isinstance(saved, OptimizerState) and not self.has_own_way:
            hypers = self._hypers(saved)
            self._write_slots(saved)
            self._write_attributes({})
            self._set_hypers(hypers, set())
            return nothing
        undo = remember(nest_of(self.optimizer))
        try:
            self._load(saved)
            self._check_read_back(saved)
            self._write_groups(saved, set())
        except BaseException:
            undo()
            raise
        return undo

    def write_gradients(self, saved: OptimizerState | OwnOptimizerState) -> None:
        """Set gradients to zeros where the saved state had one, and to None elsewhere, because an optimizer skips None.

        After ``zero_grad(set_to_none=False)``, weight decay and momentum keep moving a parameter that is not used.
        """
        with_grad = frozenset(base_of(saved).with_grad)
        for name, parameter in self._params().items():
            parameter.grad = torch.zeros_like(parameter) if name in with_grad else None

    # --- inside ------------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, "OptimizerPart"]:
        """Return the optimizers in its attributes, by attribute, as parts."""
        return {
            name: OptimizerPart(
                each,
                self.names,
                f"{self.path}.held[{name!r}]",
                self.attached and self.attached.held.get(name),
                (*self.around, self.optimizer),
            )
            for name, each in held_optimizers(self.optimizer, self.around).items()
        }

    def _load(self, saved: OptimizerState | OwnOptimizerState) -> None:
        """Load everything into the optimizer and those that it holds, except hyperparameters: a policy may have changed them."""
        own = saved if isinstance(saved, OwnOptimizerState) else OwnOptimizerState(saved)
        parameters = self._params()
        if own.own is None:
            self._write_slots(own.base)
        else:
            bring_back = _groups_kept(nest_of(self.optimizer))
            self.optimizer.load_state_dict(from_plain(copied(own.own), parameters))
            bring_back()
        if own.loose is not None:
            self.optimizer.state.update(from_plain(copied(own.loose), parameters))
        self._write_attributes(from_plain(copied(own.attributes or {}), parameters))
        for name, part in self.held().items():
            part._load(own.held[name])  # noqa: SLF001 (a part of the same class)

    def _write_attributes(self, values: Mapping[str, Any]) -> None:
        """Set the saved attributes, and reset those that a step has changed since and that were not saved."""
        for name in changed_attributes(self.optimizer, self.attached):
            if name not in values:
                before = self.attached.attributes.get(name, _ABSENT) if self.attached is not None else _ABSENT
                if before is _ABSENT:
                    delattr(self.optimizer, name)
                else:
                    setattr(self.optimizer, name, from_plain(copied(before), {}))
        for name, value in values.items():
            setattr(self.optimizer, name, value)

    def _check_read_back(self, saved: OptimizerState | OwnOptimizerState) -> None:
        found = first_unequal(_without_hyper(saved), _without_hyper(self.capture()), self.path)
        if found is not None:
            kind = type(self.optimizer).__qualname__
            raise unlike_saved(
                found,
                after=f"load_state_dict() of {kind}",
                fix=f"fix the pair of methods of {kind}, whose load_state_dict() does not restore its state_dict(); or train with another class",
            )

    def _write_groups(self, saved: OptimizerState | OwnOptimizerState, seen: set[int]) -> None:
        """Write the hyperparameters; a group that the outer optimizer shares with an inner one gets those of the outer one."""
        self._set_hypers(self._hypers(base_of(saved)), seen)
        if isinstance(saved, OwnOptimizerState):
            for name, part in self.held().items():
                part._write_groups(saved.held[name], seen)  # noqa: SLF001 (as above)

    def _write_slots(self, saved: OptimizerState) -> None:
        slots: dict[torch.Tensor, Any] = {}
        overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        parameters = self._params()
        for (name, parameter), hyper in zip(parameters.items(), self._hyper_of(saved), strict=True):
            if name not in saved.slots:
                continue
            current = self.optimizer.state.get(parameter, {})
            slots[parameter] = {}
            for key, value in from_plain(saved.slots[name], parameters).items():
                present = current.get(key)
                part = part_of_slot(value, parameter)
                if part is not None:
                    slots[parameter][key], memory = slot_for(part, present, parameter)
                    overwritten += [] if memory is None else [(memory, part)]
                elif _same_spec(value, present):
                    overwritten.append((present, value))
                    slots[parameter][key] = present
                else:
                    made = _placed(value, _device_of(key, parameter, hyper), parameter)
                    overwritten += [(made, value)] if isinstance(value, torch.Tensor) and value.is_meta else []
                    slots[parameter][key] = made
        # everything that can fail is done, unless values are still unread, and nothing has changed yet
        self.fill(overwritten)
        self.optimizer.state.clear()
        self.optimizer.state.update(slots)

    def _hypers(self, saved: OptimizerState) -> list[dict[str, Any]]:
        parameters = self._params()
        mine, theirs = (
            list(map(frozenset, each)) for each in (self.groups(), [group.params for group in saved.groups])
        )
        hypers = [group.hyper for group in saved.groups]
        if mine != theirs:  # groups in another order
            hypers = [hypers[theirs.index(group)] for group in mine]
        return [from_plain(copied(dict(hyper)), parameters) for hyper in hypers]

    def _set_hypers(self, hypers: list[dict[str, Any]], seen: set[int]) -> None:
        given = self.attached.groups if self.attached is not None else ()
        for number, (group, hyper) in enumerate(zip(self.optimizer.param_groups, hypers, strict=True)):
            if id(group) in seen:
                continue
            seen.add(id(group))
            settings = given[number] if number < len(given) else group
            for key in [key for key in group if key not in {*hyper, *settings, *_KEPT}]:
                del group[key]  # written by a step that the restored run has not done
            for key, value in hyper.items():
                present = group.get(key)
                if (
                    isinstance(present, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and present.shape == value.shape
                ):
                    present.copy_(value)  # a compiled step or a CUDA graph reads this tensor
                else:
                    group[key] = value

    def _params(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, in the optimizer's order."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return dict(zip(names_of(parameters, self.names, self.path), parameters, strict=True))

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names of the parameters of each group, in the optimizer's order."""
        return [tuple(names_of(group["params"], self.names, self.path)) for group in self.optimizer.param_groups]

    def _hyper_of(self, saved: OptimizerState) -> list[Mapping[str, Any]]:
        """Return the hyperparameters of the group of each parameter, in the order of `_params`."""
        by_name = _hyper_by_name(saved)
        return [by_name[name] for name in self._params()]

    def _shared_problems(self, base: OptimizerState) -> list[InvalidState]:
        """One tensor in several groups, such as a rate that the loop writes into, has one value."""
        by_name = _hyper_by_name(base)
        found, first = [], dict[int, torch.Tensor]()
        for names, group in zip(self.groups(), self.optimizer.param_groups, strict=True):
            saved = by_name[names[0]] if names else {}
            for key, present in group.items():
                value = saved.get(key)
                if not isinstance(present, torch.Tensor) or not isinstance(value, torch.Tensor):
                    continue
                if not torch.equal(other := first.setdefault(id(present), value), value):
                    found.append(self._problem(f"groups[{names[0]!r}].{key}", f"one value of the tensor that several groups share: {other}", value,
                                               "give each group a tensor of its own"))  # fmt: skip
        return found

    def _problem(self, part: str, expected: object, found: object, fix: str) -> InvalidState:
        return InvalidState(f"{self.path}.{part}", expected=expected, found=found, fix=fix)


def _hyper_by_name(saved: OptimizerState) -> dict[str, Mapping[str, Any]]:
    """Parameter -> the hyperparameters of its group."""
    return {name: group.hyper for group in saved.groups for name in group.params}


def _device_of(key: str, parameter: torch.Tensor, hyper: Mapping[str, Any]) -> torch.device:
    """Return the device on which torch keeps a new slot: a step counter is on the CPU unless the kernels read it."""
    if key == "step" and not (hyper.get("capturable") or hyper.get("fused")):
        return torch.device("cpu")
    return parameter.device


def _placed(value: Any, device: torch.device, parameter: torch.Tensor) -> Any:
    """Return a copy of a slot on the device, with its own dtype; for values that are read later, memory in the layout of the parameter."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        like = parameter if parameter.shape == value.shape else value
        return torch.empty_like(like, dtype=value.dtype, device=device, requires_grad=False)
    copies = tree.map_tensors(lambda tensor: tensor.detach().to(device=device, copy=True), value)
    return tree.map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copied(leaf), copies)


def _same_spec(value: Any, present: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)):
        return False
    return value.shape == present.shape and value.dtype == present.dtype and value.stride() == present.stride()


def _groups_kept(optimizers: list[torch.optim.Optimizer]) -> Undo:
    """Return a function that copies the new group dicts made by ``load_state_dict`` into the old dicts.

    A scheduler keeps references to the old dicts, and an optimizer may share them with an inner one.
    """
    kept = [(each, vars(each)["param_groups"]) for each in optimizers if "param_groups" in vars(each)]
    kept_dicts = [(each, groups, list(groups)) for each, groups in kept]

    def bring_back() -> None:
        contents = [(groups, dicts, [dict(group) for group in each.param_groups]) for each, groups, dicts in kept_dicts]
        for (each, _, _), (groups, dicts, new) in zip(kept_dicts, contents, strict=True):
            for group, loaded in zip(dicts, new, strict=True):
                group.clear()
                group.update(loaded)
            groups[:] = dicts
            each.param_groups = groups

    return bring_back


def _without_hyper(saved: OptimizerState | OwnOptimizerState) -> Any:
    """Return what is read back and compared; hyperparameters are written later, because a policy may have changed them."""
    if isinstance(saved, OptimizerState):
        return {"slots": dict(saved.slots)}
    return {
        "slots": dict(saved.base.slots),
        "own": saved.own,
        "loose": saved.loose,
        "attributes": saved.attributes or None,
        "held": {name: _without_hyper(each) for name, each in saved.held.items()},
    }
