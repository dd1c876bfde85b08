"""`Template`: a private skeleton of a model that computes with the parameters and buffers of one state after another."""

import copy
from collections.abc import Mapping
from typing import Any, final

import torch

from trainfold.core.errors import InvalidArgument, InvalidState, SpecMismatch
from trainfold.core.layout.leaf_spec import AnySpec, diff_specs
from trainfold.core.layout.shard import Shard
from trainfold.core.state.fqn import BufferSlot, check_real, check_uncut, named_tensors
from trainfold.core.state.spec import leaf_spec
from trainfold.core.state.state import ModelState
from trainfold.core.step.engine.param_hooks import hooks_of

_COMMUNICATE = ("torch.nn.parallel", "torch.distributed")
_SILENT = "torch.distributed.algorithms._checkpoint"  # activation checkpointing: there, but it does not communicate


@final
class ModuleSpec:
    """The structure of a user's model without its parameters, from which templates are made.

    Args:
        model: read once; never changed or kept.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = check_uncut(check_real(model))
        memo: dict[int, Any] = {id(value): _hollow_parameter(value) for value in named.params.values()}
        self.hooks = hooks_of(named.params)
        memo |= {id(value): _hollow(value) for value in named.buffers.values()}
        self._module = _copied(model, memo)  # the memo replaces the large tensors, so they are not copied
        self.ties = named.ties
        self.param_specs = _specs("params", named.params)
        self.specs = self.param_specs | _specs("buffers", named.buffers)
        tensors = [*named.params.values(), *named.buffers.values()]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def template(self) -> "Template":
        """Make a new template."""
        return Template(self, copy.deepcopy(self._module))


@final
class Template:
    """A module that computes with the tensors of the bound state.

    Attributes:
        module: the skeleton.
        params: FQN -> its parameter.
        device: the device of the model.
    """

    def __init__(self, spec: ModuleSpec, module: torch.nn.Module) -> None:
        named = named_tensors(module)
        self.module = module
        self.params = named.params
        for name, hooks in spec.hooks.items():
            hooks.register(self.params[name])
        self.device = spec.device
        self._spec = spec
        self._persistent = [slot for slot in named.slots if slot.persistent]
        self._transient = [(slot, slot.owner[slot.key]) for slot in named.slots if not slot.persistent]
        self._pristine = [_clone(value) for _, value in self._transient]
        self._bound: dict[str, torch.Tensor] | None = None
        self._buffers: dict[str, torch.Tensor] | None = None
        self._scratch: dict[str, torch.Tensor] = {}

    def holds(self, model: ModelState) -> bool:
        """Whether the state's tensors are bound."""
        return model.params.alive() is self._bound and model.buffers.alive() is self._buffers

    def bind(self, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], ties: object) -> None:
        """Compute with these tensors from now on; they are not copied.

        Raises:
            SpecMismatch: listing every name, shape and dtype that differs from the model.
            InvalidState: if the ties differ, or a tensor is on another device.
        """
        check_model(self._spec, params, buffers, ties)
        for name, param in self.params.items():
            param.data = params[name]
        self._place(buffers)
        self._bound, self._buffers = params, buffers
        self._scratch = {}

    def check_params(self, params: Mapping[str, torch.Tensor]) -> None:
        """Check that a user's update returned the parameters of the model.

        Raises:
            SpecMismatch: listing every name, shape and dtype that differs.
        """
        if differences := diff_specs(_specs("params", params), self._spec.param_specs):
            raise SpecMismatch("what update returned", differences)

    def keep_buffers(self) -> None:
        """Make the forward write to copies of the buffers, so that the state does not change within a window."""
        if not self._buffers:
            return
        if self._scratch:
            torch._foreach_copy_(list(self._scratch.values()), list(self._buffers.values()))
        else:
            self._scratch = {name: value.clone() for name, value in self._buffers.items()}
            self._place(self._scratch)

    def undo(self) -> None:
        """Discard what the forward wrote and assigned, and the gradients."""
        self.drop_grads()
        self._reset_transient()
        if self._buffers:
            self._place(self._scratch or self._buffers)

    def harvest(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers after the forward, and reset the others to their values in the model."""
        assert self._buffers is not None, "call bind first"
        self._reset_transient()
        mine = self._scratch or self._buffers
        replaced = {
            slot.name: value for slot in self._persistent if (value := slot.owner[slot.key]) is not mine[slot.name]
        }
        if self._scratch:
            torch._foreach_copy_(list(self._buffers.values()), list(self._scratch.values()))
        if replaced:
            self._replace(replaced)
        return self._buffers

    def drop_grads(self) -> None:
        """Discard the gradients."""
        for param in self.params.values():
            param.grad = None

    def bound_params(self) -> dict[str, torch.Tensor]:
        """The parameters that `bind` received."""
        assert self._bound is not None, "call bind first"
        return self._bound

    def release(self) -> None:
        """Release every tensor of the state."""
        for param in self.params.values():
            param.grad = None
            param.data = _hollow(param)
        for slot in self._persistent:
            value = slot.owner[slot.key]
            slot.owner[slot.key] = None if value is None else _hollow(value)
        self._bound = self._buffers = None
        self._scratch = {}

    def _replace(self, replaced: Mapping[str, torch.Tensor | None]) -> None:
        """Take over buffers that the forward reassigned; as copies, because they may be views of something larger."""
        assert self._buffers is not None
        self._buffers = dict(self._buffers)
        for name, value in replaced.items():
            if value is None:
                raise InvalidState(
                    f"state.model.buffers[{name!r}]",
                    expected="a tensor",
                    found="None, assigned by the forward",
                    fix="register the buffer with persistent=False if it may be absent",
                )
            self._buffers[name] = value.detach().clone()
        self._place(self._buffers)
        self._scratch = {}

    def _place(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for slot in self._persistent:
            slot.owner[slot.key] = buffers[slot.name]

    def _reset_transient(self) -> None:
        for (slot, value), pristine in zip(self._transient, self._pristine, strict=True):
            _reset(slot, value, pristine)


def check_model(
    spec: ModuleSpec, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], ties: object
) -> None:
    """Check that the tensors of a state fit a model.

    Raises:
        SpecMismatch: listing every difference of names, shapes and dtypes.
        InvalidState: if the ties differ, or a tensor is on another device.
    """
    part = next((name for name, value in params.items() if isinstance(value, Shard)), None)
    if part is not None:
        raise InvalidState(
            f"state.model.params[{part!r}]",
            expected="a whole tensor",
            found="a part of one, from a state that is cut over ranks",
            fix="pass parallelism=trainfold.ranks.Sharded(...) to make_step; for anything else gather the state, on all ranks: ranks.whole(state)",
        )
    differences = diff_specs(_specs("params", params) | _specs("buffers", buffers), spec.specs)
    if differences:
        raise SpecMismatch("state.model", differences)
    if ties != spec.ties:
        raise InvalidState(
            "state.model.ties",
            expected=spec.ties,
            found=ties,
            fix="build the model with the ties that it had when it was saved",
        )
    for name, value in [*params.items(), *buffers.items()]:
        if value.device.type != spec.device.type:
            raise InvalidState(
                f"state.model[{name!r}]",
                expected=f"a tensor on {spec.device}, where the model is",
                found=f"a tensor on {value.device}",
                fix="move the model there before you make the step",
            )


def _specs(section: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, AnySpec]:
    return {f"{section}[{name!r}]": leaf_spec(value, name) for name, value in tensors.items()}


def check_silent(model: torch.nn.Module) -> None:
    """Check that a backward of the model does not communicate: a step sums over the ranks itself, once per window.

    It recognises wrappers by the modules of their classes, so it need not import torch.distributed.

    Raises:
        InvalidArgument: naming the first submodule that communicates, such as DDP or FSDP.
    """
    for name, module in model.named_modules():
        origins = [cls.__module__ for cls in type(module).__mro__]
        if any(origin.startswith(_COMMUNICATE) and not origin.startswith(_SILENT) for origin in origins):
            raise InvalidArgument(
                f"model.{name}" if name else "model",
                expected="a module whose backward does not communicate",
                found=f"{type(module).__module__}.{type(module).__qualname__}",
                fix="pass the module inside it (model.module for DDP) and collectives=...; the step averages over the ranks. In place of fully_shard "
                "pass a model without it and parallelism=trainfold.ranks.Sharded(...), and cut the state",
            )


def _copied(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    try:
        return copy.deepcopy(model, dict(memo))
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"model{_uncopyable(model, memo)}",
            expected="a model that copy.deepcopy can copy",
            found=str(error).partition(".")[0],
            fix="replace the old weight_norm by torch.nn.utils.parametrizations, keep locks, files and graphs out of the "
            "model, or give it a __deepcopy__",
        ) from error


def _uncopyable(model: torch.nn.Module, memo: dict[int, Any]) -> str:
    """The path of the first attribute of a submodule that cannot be copied."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                if key != "_modules":
                    copy.deepcopy(value, dict(memo))
            except (RuntimeError, TypeError):
                return "".join(f".{part}" for part in (name, key) if part)
    return ""


def _reset(slot: BufferSlot, value: torch.Tensor | None, pristine: torch.Tensor | None) -> None:
    slot.owner[slot.key] = value
    if value is not None and pristine is not None:
        with torch.no_grad():
            value.copy_(pristine)


def _clone(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


def _hollow(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _hollow_parameter(value: torch.nn.Parameter) -> torch.nn.Parameter:
    hollow = torch.nn.Parameter(_hollow(value), requires_grad=value.requires_grad)
    hollow.__dict__.update(value.__dict__)
    return hollow
