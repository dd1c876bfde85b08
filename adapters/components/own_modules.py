"""State of modules beside parameters and persistent buffers: an overridden ``state_dict``, hooks on it, ``get_extra_state``."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

import attrs
import torch

from trainfold.adapters.components.component import Undo, copied, wrong_kind
from trainfold.adapters.own_state.plain_form import from_plain, to_plain
from trainfold.adapters.own_state.read_back import first_unequal, unlike_saved
from trainfold.adapters.own_state.remembered import remember
from trainfold.adapters.sharded.dtensor import local_part, named_shards
from trainfold.core.errors import InvalidState, TrainfoldError
from trainfold.core.state.names.wrapper_names import short_path_in
from trainfold.core.state.state import Opaque

_EXTRA: Final = "_extra_state"
Owners: TypeAlias = Mapping[str, torch.nn.Module]


@final
@attrs.frozen
class OwnModulePart:
    """The state that some modules return themselves, as a component beside the weights.

    It is written after the weights, because it may be computed from them.

    Attributes:
        module: the whole module.
        path: the component.
        owners: the modules with such state, by name.
        read: returns the state of an owner.
        load: loads the state of an owner.
    """

    module: torch.nn.Module
    path: str
    owners: Owners
    read: Callable[[torch.nn.Module, torch.nn.Module], Any]
    load: Callable[[torch.nn.Module, Any], None]

    def capture(self) -> Opaque:
        """Return the current state of each owner."""
        return Opaque({name: to_plain(self.read(each, self.module), {}) for name, each in self.owners.items()})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Check that it is the state of the same modules."""
        if not isinstance(saved, Opaque) or not isinstance(saved.value, Mapping):
            return [wrong_kind(self.path, "the state of modules beside their weights", saved)]
        if set(saved.value) != set(self.owners):
            fix = "build the modules as they were when the state was saved"
            expected, found = sorted(self.owners), sorted(map(str, saved.value))
            return [
                InvalidState(self.path, expected=f"the states of {expected}", found=f"the states of {found}", fix=fix)
            ]
        try:
            from_plain(saved.value, {})
        except InvalidState as error:
            return [error]
        return []

    def write(self, saved: Any) -> Undo:
        """Load each owner, keep the weights unchanged, and compare the state that the modules return now with the saved one.

        Raises:
            InvalidState: if they differ, naming the classes; then nothing is changed.
        """
        undo = remember(self.owners.values())
        weights = [(tensor, tensor.detach().clone()) for tensor in _tensors(self.module)]
        try:
            for name, value in from_plain(copied(saved.value), {}).items():
                self.load(self.owners[name], value)
            with torch.no_grad():
                for tensor, before in weights:
                    tensor.copy_(before)
            difference = first_unequal(saved.value, self.capture().value, self.path)
        except BaseException:
            undo()
            raise
        if difference is not None:
            undo()
            kinds = ", ".join(sorted({type(each).__qualname__ for each in self.owners.values()}))
            raise unlike_saved(
                difference,
                after=f"the load of {kinds}",
                fix="fix the pair of methods or hooks, so that the second restores what the first saves",
            )
        return undo


def own_module_parts(name: str, module: Any) -> dict[str, OwnModulePart]:
    """Return the components that a module needs beside its weights; empty for an ordinary module.

    Args:
        name: the component of the weights.
        module: the module, wrapped or not; for any other object the result is empty.

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
        short = short_path_in(module, path)
        for found, has_state in ((extra, _has_extra(each)), (own, _has_own(each, module))):
            if has_state:
                found[path if short in found else short] = each  # a wrapper has the name of the module that it wraps
    parts = {
        f"{prefix}_extra_state": OwnModulePart(module, f"{prefix}_extra_state", extra, _extra_of, _set_extra),
        f"{prefix}_own_state": OwnModulePart(module, f"{prefix}_own_state", own, _own_of, _load_own),
    }
    return {name: part for name, part in parts.items() if part.owners}


def late_owner_problems(name: str, module: Any, parts: Mapping[str, OwnModulePart]) -> list[TrainfoldError]:
    """Return a problem for each owner that has appeared since the module was attached, for example through a later hook.

    Args:
        name: the component of its weights.
        module: the module; any other object has no problems.
        parts: the result of `own_module_parts` when it was attached.
    """
    known = {(each, owner) for each, part in parts.items() for owner in part.owners}
    now = {(each, owner) for each, part in own_module_parts(name, module).items() for owner in part.owners}
    return [
        InvalidState(
            f"{name}.{owner}" if owner else name,
            expected="a state_dict() with the hooks and methods that the module had when it was attached",
            found="a hook or a method that was added later",
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


def _has_own(module: torch.nn.Module, whole: torch.nn.Module) -> bool:
    """Whether ``state_dict()`` of this module may contain more than its tensors; torch's own modules are called to find out."""
    plain = torch.nn.Module
    overrides = [
        getattr(type(module), name)
        for name in ("state_dict", "_save_to_state_dict")
        if getattr(type(module), name) is not getattr(plain, name) or name in vars(module)
    ]
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]  # noqa: SLF001 (torch has no
    # public name for them)
    sources = [*overrides, *(each for each in hooks if not _is_fsdps(each))]
    if not sources:
        return False
    return not all(_is_torchs(each) for each in sources) or bool(_own_of(module, whole))


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", type(function).__module__)).startswith(
        ("torch.nn.", "torch.distributed.")
    )


def _is_fsdps(hook: Any) -> bool:
    """Whether it is FSDP2's hook, which frees gathered parameters before a ``state_dict()`` and adds nothing to it."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def _own_of(module: torch.nn.Module, whole: torch.nn.Module) -> dict[str, Any]:
    """Return the part of ``state_dict()`` without the tensors of the whole module, which are saved already."""
    known = {_place(tensor) for tensor in _tensors(whole)}
    return {
        key: value
        for key, value in module.state_dict().items()
        if not _is_extra(key) and not (isinstance(value, torch.Tensor) and _place(value) in known)
    }


def _load_own(module: torch.nn.Module, own: Mapping[str, Any]) -> None:
    """Load the current state of the module, with its own part replaced."""
    present = {key: value for key, value in module.state_dict().items() if not _is_extra(key)}
    stale = set(_own_of(module, module)) - set(own)
    state = {key: value for key, value in present.items() if key not in stale} | dict(own)
    if "strict" in inspect.signature(module.load_state_dict).parameters:
        module.load_state_dict(state, strict=False)  # missing keys show in the comparison afterwards
    else:
        module.load_state_dict(state)


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    found = named_shards(module)
    return [local_part(each) for each in (*found.params.values(), *found.buffers.values())]


def _place(tensor: torch.Tensor) -> Any:
    tensor = local_part(tensor)
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.dtype, tensor.shape
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
