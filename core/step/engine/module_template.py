"""`Template`: a private skeleton of a model, whose parameters and buffers are those of one state after another."""

import copy
from collections.abc import Mapping
from typing import Any, final

import torch

from trainfold.core.errors import InvalidArgument, InvalidState, SpecMismatch
from trainfold.core.layout.leaf_spec import AnySpec, diff_specs
from trainfold.core.state.fqn import BufferSlot, check_real, named_tensors
from trainfold.core.state.spec import leaf_spec
from trainfold.core.state.state import ModelState
from trainfold.core.step.engine.param_hooks import hooks_of

_COMMUNICATE = ("torch.nn.parallel", "torch.distributed")
_SILENT = "torch.distributed.algorithms._checkpoint"  # activation checkpointing, which lives there all the same


@final
class ModuleSpec:
    """What templates are cast from: the structure of a user's model, and none of its parameters.

    Args:
        model: is read once and never changed or kept.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = check_real(model)
        memo: dict[int, Any] = {id(value): _hollow_parameter(value) for value in named.params.values()}
        self.hooks = hooks_of(named.params)
        memo |= {id(value): _hollow(value) for value in named.buffers.values()}
        self._module = _copied(model, memo)  # the memo stands in for the large tensors: they are not copied
        self.ties = named.ties
        self.param_specs = _specs("params", named.params)
        self.specs = self.param_specs | _specs("buffers", named.buffers)
        tensors = [*named.params.values(), *named.buffers.values()]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def cast(self) -> "Template":
        """A new template."""
        return Template(self, copy.deepcopy(self._module))


@final
class Template:
    """A module that computes with the tensors of the state that is bound to it.

    Attributes:
        module: the skeleton.
        params: FQN -> its parameter.
        device: where the model was built.
    """

    def __init__(self, mould: ModuleSpec, module: torch.nn.Module) -> None:
        named = named_tensors(module)
        self.module = module
        self.params = named.params
        for name, hooks in mould.hooks.items():
            hooks.register(self.params[name])
        self.device = mould.device
        self._mould = mould
        self._persistent = [slot for slot in named.slots if slot.persistent]
        self._transient = [(slot, slot.owner[slot.key]) for slot in named.slots if not slot.persistent]
        self._pristine = [_clone(value) for _, value in self._transient]
        self._bound: dict[str, torch.Tensor] | None = None
        self._buffers: dict[str, torch.Tensor] | None = None
        self._scratch: dict[str, torch.Tensor] = {}

    def holds(self, model: ModelState) -> bool:
        """Whether the state's tensors are bound already."""
        return model.params.alive() is self._bound and model.buffers.alive() is self._buffers

    def bind(self, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], ties: object) -> None:
        """Compute with these tensors from now on, without a copy.

        Raises:
            SpecMismatch: listing every name, shape and dtype that is not the model's.
            InvalidState: if the ties differ, or a tensor is on another device.
        """
        check_model(self._mould, params, buffers, ties)
        for name, param in self.params.items():
            param.data = params[name]
        self._place(buffers)
        self._bound, self._buffers = params, buffers
        self._scratch = {}

    def check_params(self, params: Mapping[str, torch.Tensor]) -> None:
        """Check that parameters from outside are the model's.

        Raises:
            SpecMismatch: listing every name, shape and dtype that is not.
        """
        if differences := diff_specs(_specs("params", params), self._mould.param_specs):
            raise SpecMismatch("what update returned", differences)

    def keep_buffers(self) -> None:
        """Let the forward write to copies of the buffers, so that nobody sees a state change in the middle of a window (A05)."""
        if not self._buffers:
            return
        if self._scratch:
            torch._foreach_copy_(list(self._scratch.values()), list(self._buffers.values()))
        else:
            self._scratch = {name: value.clone() for name, value in self._buffers.items()}
            self._place(self._scratch)

    def undo(self) -> None:
        """Forget what the forward wrote and assigned, and the gradients."""
        self.drop_grads()
        self._reset_transient()
        if self._buffers:
            self._place(self._scratch or self._buffers)

    def harvest(self) -> dict[str, torch.Tensor]:
        """The persistent buffers after the forward; those that are no state are as they were in the model (B17)."""
        assert self._buffers is not None, "bind comes first"
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
        """Forget the gradients."""
        for param in self.params.values():
            param.grad = None

    def bound_params(self) -> dict[str, torch.Tensor]:
        """The tensors that `bind` was given."""
        assert self._bound is not None, "bind comes first"
        return self._bound

    def release(self) -> None:
        """Let go of every tensor of the state."""
        for param in self.params.values():
            param.grad = None
            param.data = _hollow(param)
        for slot in self._persistent:
            value = slot.owner[slot.key]
            slot.owner[slot.key] = None if value is None else _hollow(value)
        self._bound = self._buffers = None
        self._scratch = {}

    def _replace(self, replaced: Mapping[str, torch.Tensor | None]) -> None:
        """Take buffers that the forward assigned anew; copied, since they may be a part of something larger."""
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
    mould: ModuleSpec, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], ties: object
) -> None:
    """Check that a state's tensors fit a model.

    Raises:
        SpecMismatch: listing every difference of names, shapes and dtypes.
        InvalidState: if the ties differ, or a tensor is on another device.
    """
    differences = diff_specs(_specs("params", params) | _specs("buffers", buffers), mould.specs)
    if differences:
        raise SpecMismatch("state.model", differences)
    if ties != mould.ties:
        raise InvalidState(
            "state.model.ties", expected=mould.ties, found=ties, fix="build the model as it was when it was saved"
        )
    for name, value in [*params.items(), *buffers.items()]:
        if value.device.type != mould.device.type:
            raise InvalidState(
                f"state.model[{name!r}]",
                expected=f"a tensor on {mould.device}, where the model is",
                found=f"one on {value.device}",
                fix="move the model there before the step is made",
            )


def _specs(section: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, AnySpec]:
    return {f"{section}[{name!r}]": leaf_spec(value, name) for name, value in tensors.items()}


def check_silent(model: torch.nn.Module) -> None:
    """Check that a backward of the model talks to nobody: a step adds up over the ranks itself, once a window.

    Wrappers are known by where their classes come from, so that nothing of torch.distributed is imported here.

    Raises:
        InvalidArgument: naming the first submodule that communicates: DDP, FSDP, and their like.
    """
    for name, module in model.named_modules():
        origins = [cls.__module__ for cls in type(module).__mro__]
        if any(origin.startswith(_COMMUNICATE) and not origin.startswith(_SILENT) for origin in origins):
            raise InvalidArgument(
                f"model.{name}" if name else "model",
                expected="a module whose backward does not communicate",
                found=f"{type(module).__module__}.{type(module).__qualname__}",
                fix="pass the module inside (model.module for DDP) and collectives=..., and the step averages over ranks",
            )


def _copied(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    try:
        return copy.deepcopy(model, dict(memo))
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"model{_uncopyable(model, memo)}",
            expected="something that copy.deepcopy can copy",
            found=str(error).partition(".")[0],
            fix="use torch.nn.utils.parametrizations in the place of old weight_norm, keep locks, files and graphs out of "
            "the model, or give it a __deepcopy__",
        ) from error


def _uncopyable(model: torch.nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute of a submodule that cannot be copied, as a path."""
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
