"""What modules keep beside parameters and persistent buffers: a ``state_dict`` of their own, hooks on it, ``get_extra_state`` (W05, B18)."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

import attrs
import torch

from trainfold.adapters.components.component import Undo, copied, wrong_kind
from trainfold.adapters.own_state.plain_form import from_plain, to_plain
from trainfold.adapters.own_state.read_back import first_difference
from trainfold.adapters.own_state.remembered import remember
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.state.fqn import canonical_name, named_tensors
from trainfold.core.state.state import Opaque

_EXTRA: Final = "_extra_state"
Owners: TypeAlias = Mapping[str, torch.nn.Module]


@final
@attrs.frozen
class OwnModulePart:
    """The state that some modules say themselves, as a component beside the one of the weights.

    It is written after the weights, since what a module says may be made of them.

    Attributes:
        module: the whole module.
        path: the component.
        owners: the modules that say more, by name.
        read: what one of them says.
        load: gives it back to one of them.
    """

    module: torch.nn.Module
    path: str
    owners: Owners
    read: Callable[[torch.nn.Module, torch.nn.Module], Any]
    load: Callable[[torch.nn.Module, Any], None]

    def capture(self) -> Opaque:
        """What each of them says now."""
        return Opaque({name: to_plain(self.read(each, self.module), {}) for name, each in self.owners.items()})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Whether it is the state of the same modules."""
        if not isinstance(saved, Opaque) or not isinstance(saved.value, Mapping):
            return [wrong_kind(self.path, "what modules say beside their weights", saved)]
        if set(saved.value) != set(self.owners):
            fix = "build the modules as they were when the state was saved"
            expected, found = sorted(self.owners), sorted(map(str, saved.value))
            return [InvalidState(self.path, expected=f"the states of {expected}", found=f"those of {found}", fix=fix)]
        try:
            from_plain(saved.value, {})
        except InvalidState as error:
            return [error]
        return []

    def write(self, saved: Any) -> Undo:
        """Give each its state, keep the weights as they are, and compare what the modules say now with what was saved.

        Raises:
            InvalidState: if it is not the same, naming the class; nothing is changed then.
        """
        undo = remember(self.owners.values())
        weights = [(tensor, tensor.detach().clone()) for tensor in _tensors(self.module)]
        try:
            for name, value in from_plain(copied(saved.value), {}).items():
                self.load(self.owners[name], value)
            with torch.no_grad():
                for tensor, before in weights:
                    tensor.copy_(before)
            difference = first_difference(saved.value, self.capture().value, self.path)
        except BaseException:
            undo()
            raise
        if difference is not None:
            undo()
            where, was, now = difference
            kinds = ", ".join(sorted({type(each).__qualname__ for each in self.owners.values()}))
            raise InvalidState(
                where,
                expected=f"{was}, as it was saved",
                found=f"{now}, after the load of {kinds}",
                fix="fix the pair of methods or hooks: what one of them saves the other has to take back",
            )
        return undo


def own_module_parts(name: str, module: Any) -> dict[str, OwnModulePart]:
    """The components that a module needs beside its weights, if it needs any; none for what is no module.

    Args:
        name: the component of the weights.
        module: the module, wrapped or not; anything else needs none.

    Examples:
        >>> own_module_parts("model", torch.nn.Linear(1, 1))
        {}
    """
    if not isinstance(module, torch.nn.Module):
        return {}
    prefix = "module" if name == "model" else name
    extra: dict[str, torch.nn.Module] = {}
    own: dict[str, torch.nn.Module] = {}
    for path, each in module.named_modules():
        short = canonical_name(f"{path}._")[:-2] if path else ""
        for found, says in ((extra, _has_extra(each)), (own, _says_own(each, module))):
            if says:
                found[path if short in found else short] = each  # a wrapper has the name of what it wraps
    parts = {
        f"{prefix}_extra_state": OwnModulePart(module, f"{prefix}_extra_state", extra, _extra_of, _set_extra),
        f"{prefix}_own_state": OwnModulePart(module, f"{prefix}_own_state", own, _own_of, _load_own),
    }
    return {name: part for name, part in parts.items() if part.owners}


def late_problems(name: str, module: Any, parts: Mapping[str, OwnModulePart]) -> list[TrainfoldError]:
    """What a module says itself that it did not say when it was attached, such as by a hook that came later.

    Args:
        name: the component of its weights.
        module: the module; anything else has no problems.
        parts: what `own_module_parts` found then.
    """
    known = {(each, owner) for each, part in parts.items() for owner in part.owners}
    now = {(each, owner) for each, part in own_module_parts(name, module).items() for owner in part.owners}
    return [
        InvalidState(
            f"{name}.{owner}" if owner else name,
            expected="a state_dict() that says what it said when the module was attached",
            found="a hook, or a method, that was put there later",
            fix="register hooks on state_dict before trainfold.attach(...)",
        )
        for _, owner in sorted(now - known)
    ]


def _has_extra(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _extra_of(module: torch.nn.Module, _: torch.nn.Module) -> Any:
    return module.get_extra_state()


def _set_extra(module: torch.nn.Module, value: Any) -> None:
    module.set_extra_state(value)


def _says_own(module: torch.nn.Module, whole: torch.nn.Module) -> bool:
    """Whether ``state_dict()`` of this module may have more in it than its tensors; torch's own are believed if they show none."""
    plain = torch.nn.Module
    overrides = [
        getattr(type(module), name)
        for name in ("state_dict", "_save_to_state_dict")
        if getattr(type(module), name) is not getattr(plain, name) or name in vars(module)
    ]
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]  # noqa: SLF001 (torch has no
    # public name for them)
    says = [*overrides, *hooks]
    if not says:
        return False
    return not all(_is_torchs(each) for each in says) or bool(_own_of(module, whole))


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", type(function).__module__)).startswith("torch.nn.")


def _own_of(module: torch.nn.Module, whole: torch.nn.Module) -> dict[str, Any]:
    """The part of ``state_dict()`` that is none of the tensors of the whole module; those are saved already."""
    known = {_place(tensor) for tensor in _tensors(whole)}
    return {
        key: value
        for key, value in module.state_dict().items()
        if not _is_extra(key) and not (isinstance(value, torch.Tensor) and _place(value) in known)
    }


def _load_own(module: torch.nn.Module, own: Mapping[str, Any]) -> None:
    """Load what the module has now, with its own part replaced."""
    present = {key: value for key, value in module.state_dict().items() if not _is_extra(key)}
    stale = set(_own_of(module, module)) - set(own)
    state = {key: value for key, value in present.items() if key not in stale} | dict(own)
    if "strict" in inspect.signature(module.load_state_dict).parameters:
        module.load_state_dict(state, strict=False)  # what is left out is compared afterwards
    else:
        module.load_state_dict(state)


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    found = named_tensors(module)
    return [*found.params.values(), *found.buffers.values()]


def _place(tensor: torch.Tensor) -> Any:
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.dtype, tensor.shape
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
