"""`ModulePart`: a module as a component, such as ``model``: parameters and persistent buffers by canonical name, written in place."""

from typing import Any, final

import attrs
import torch

from trainfold.adapters.components.component import Fill, Undo, copy_values, nothing, wrong_kind
from trainfold.adapters.sharded.dtensor import is_dtensor, leaf_of, named_shards
from trainfold.adapters.sharded.parts import cut_differs, memory_of, part_for
from trainfold.core.errors import InvalidState, SpecMismatch, TrainfoldError
from trainfold.core.format.codec import DENSE
from trainfold.core.layout.leaf_spec import diff_specs
from trainfold.core.state.fqn import NamedTensors
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.spec import spec_of
from trainfold.core.state.state import ModelState


def module_state(named: NamedTensors, path: str = "model", *, view: bool = False) -> ModelState:
    """Return a module's tensors as a value; they are the module's own, not copies.

    It has no non-persistent buffers, tied parameters once, and names without the prefixes of wrappers. Of a DTensor it has the part
    that this rank holds, as a `Shard`.

    Args:
        named: the tensors of the module, by canonical name.
        path: the component, for messages.
        view: whether parameters may be the module's own objects, which require gradients; for a caller that reads them at once.

    Raises:
        InvalidState: for a DTensor that cannot be saved.

    Examples:
        >>> state = module_state(named_shards(torch.nn.Linear(2, 1)))
        >>> list(state.params), list(state.buffers)
        (['weight', 'bias'], [])
    """
    params: dict[str, torch.Tensor] = dict(named.params)
    if not view or not set(map(type, params.values())) <= DENSE:
        params = {
            name: value if view and type(value) in DENSE else _leaf(value, f"{path}.params[{name!r}]")
            for name, value in params.items()
        }
    buffers = named.buffers
    if not set(map(type, buffers.values())) <= DENSE:
        buffers = {name: leaf_of(value, f"{path}.buffers[{name!r}]") for name, value in buffers.items()}
    return ModelState(params=Leaves(params), buffers=Leaves(buffers), ties=named.ties)


def _leaf(parameter: torch.Tensor, path: str) -> Any:
    return leaf_of(parameter, path) if is_dtensor(parameter) else parameter.detach()


@final
@attrs.frozen
class ModulePart:
    """A module behind a component.

    Attributes:
        module: the live module; its parameter objects stay, which keeps ties and the optimizer's references intact.
        path: the component, for messages.
        can_undo: whether a write can be undone, because a later write may be refused.
        fill: writes the values.
    """

    module: torch.nn.Module
    path: str = "model"
    can_undo: bool = False
    fill: Fill = copy_values

    def capture(self) -> ModelState:
        """Return the module's tensors, not copied."""
        return module_state(named_shards(self.module), self.path)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Return all missing, unexpected and differing tensors."""
        if not isinstance(saved, ModelState):
            return [wrong_kind(self.path, "the parameters and buffers of a module", saved)]
        own = self.capture()
        saved = _as_named_by(saved, own)
        differences = diff_specs(spec_of(saved, self.path), spec_of(own, self.path))
        return [SpecMismatch(self.path, differences)] if differences else self._other_cuts(saved, own)

    @property
    def may_refuse(self) -> bool:
        """Whether a write may fail although it has no problems; such parts are written first."""
        return self.can_undo

    def write(self, saved: Any) -> Undo:
        """Copy the values into the live tensors, and clear the gradients, because a checkpoint is at a boundary.

        The part of the optimizer sets zeros where its state records a gradient.
        """
        own = self.capture()
        saved = _as_named_by(saved, own)
        undo = self._undo(own) if self.can_undo else nothing
        sides = ((own.params, saved.params), (own.buffers, saved.buffers))
        self.fill(
            (memory_of(leaf), part_for(theirs[name], leaf)) for mine, theirs in sides for name, leaf in mine.items()
        )
        for parameter in self.module.parameters():
            parameter.grad = None
        return undo

    def _other_cuts(self, saved: ModelState, own: ModelState) -> list[TrainfoldError]:
        fix = "restore on as many ranks as the state was captured on, or load it from its checkpoint"
        return [
            InvalidState(
                f"{self.path}.params[{name!r}]", expected="the part that this rank holds", found=found, fix=fix
            )
            for name, leaf in own.params.items()
            if (found := cut_differs(saved.params[name], leaf)) is not None
        ]

    def _undo(self, own: ModelState) -> Undo:
        tensors = [memory_of(leaf) for each in (own.params, own.buffers) for leaf in each.values()]
        before = [(tensor, tensor.clone()) for tensor in tensors]
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]

        def undo() -> None:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient

        return undo


def _as_named_by(saved: ModelState, own: ModelState) -> ModelState:
    """Return the saved tensors, each tied tensor under the first name that the live module has for it."""
    if set(saved.ties) == set(own.ties):
        return saved
    known = dict(saved.ties)
    wanted = {known[name]: name for name in own.params if name in known and known[name] not in own.params}
    return attrs.evolve(saved, params=Leaves({wanted.get(name, name): value for name, value in saved.params.items()}))
