"""The leaves of a state that is cut by rows over ranks: from whole tensors to a rank's parts, and between parts and the plain tensors in them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.state.leaves import Lease, Leaves
from trainfold.core.state.state import ModelState, OptimizerState, TrainState

S = TypeVar("S", bound=TrainState)
Cut: TypeAlias = Callable[[torch.Tensor, tuple[int, ...]], Any]
"""A rank's tensor and the shape of the whole -> the part."""
BoxOf: TypeAlias = Callable[[tuple[int, ...]], Box]
"""The shape of a whole tensor -> the box of it that this rank holds."""

_AGAIN = "make it with ranks.cut(init_state(...)), or load it with such a state as like="
_ATTACH = "train it with trainfold.attach(model, optimizer), which takes models that fully_shard and parallelize_module have cut"


def cut_whole(state: S, cut: Cut, box_of: BoxOf) -> S:
    """Return a state of whole tensors as one whose parameters, and slots of their shapes, are a rank's rows; these are copies.

    Args:
        state: with a model; its optimizer component is an `OptimizerState` without masters, or None.
        cut: makes a part.
        box_of: where it lies.

    Raises:
        InvalidState: naming the component or the leaf that cannot be cut.
    """
    model, optimizer = _components(state)

    def rows(leaf: torch.Tensor, path: str) -> Any:
        if not leaf.dim():
            return leaf
        if type(leaf) is not torch.Tensor or not leaf.is_contiguous():
            raise InvalidState(
                path,
                expected="a plain tensor, row after row in memory",
                found=f"a {type(leaf).__name__} with strides {list(leaf.stride())}",
                fix=_ATTACH
                if type(leaf) is not torch.Tensor
                else "call contiguous() on it, or train with trainfold.ranks.Replicas",
            )
        box = box_of(tuple(leaf.shape))
        return cut(leaf[tuple(slice(*side) for side in box)].detach().clone(), tuple(leaf.shape))

    for name, leaf in model.params.items():
        if isinstance(leaf, Shard):
            raise _unfit(
                f"state.model.params[{name!r}]",
                leaf,
                "the whole tensor",
                "cut a state once: it is a state of parts already",
            )
    params = {name: rows(leaf, f"state.model.params[{name!r}]") for name, leaf in model.params.items()}
    cut_model = attrs.evolve(model, params=Leaves(params))
    if optimizer is None:
        return cast("S", state.evolve(model=cut_model))

    def slot(name: str, leaf: Any) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.shape == model.params[name].shape
        return rows(leaf, f"state.optimizer.slots[{name!r}]") if is_cut else leaf

    slots = {name: tree.map(partial(slot, name), dict(of_one)) for name, of_one in optimizer.slots.items()}
    return cast("S", state.evolve(model=cut_model, optimizer=attrs.evolve(optimizer, slots=Leaves(slots))))


def _components(state: TrainState) -> tuple[ModelState, OptimizerState | None]:
    """Return the components that are cut.

    Raises:
        InvalidState: if there is no model, or the optimizer component cannot be cut.
    """
    if state.model is None:
        raise InvalidState(
            "state.model", expected="a model component", found=None, fix="merge the weights into the state first"
        )
    optimizer = state.optimizer
    if optimizer is not None and not isinstance(optimizer, OptimizerState):
        raise InvalidState(
            "state.optimizer",
            expected="an OptimizerState, whose slots can be cut as their parameters are",
            found=type(optimizer).__name__,
            fix="make the optimizer with trainfold.optimizer(cls, ...), or train with trainfold.ranks.Replicas",
        )
    if optimizer is not None and optimizer.masters is not None:
        raise InvalidState(
            "state.optimizer.masters",
            expected="None, because parts of masters are not kept",
            found=f"{len(optimizer.masters)} masters",
            fix="keep the parameters in float32, and compute under torch.autocast in the loss",
        )
    return state.model, optimizer


def rows_of(state: S, box_of: BoxOf) -> tuple[S, dict[str, tuple[int, ...]]]:
    """Return a state with the plain tensors of a rank's parts, and FQN -> shape of the whole parameter. No tensor is copied.

    Args:
        state: of parts.
        box_of: the box that this rank has to hold.

    Raises:
        InvalidState: naming the first leaf that is whole, or another part than this rank's.
    """
    model, optimizer = _components(state)
    params = {name: held_rows(leaf, f"state.model.params[{name!r}]", box_of) for name, leaf in model.params.items()}
    shapes = {name: tuple(leaf.shape) for name, leaf in model.params.items()}
    plain = attrs.evolve(model, params=Leaves(params))
    if optimizer is None:
        return cast("S", state.evolve(model=plain)), shapes

    def slot(name: str, key: str, leaf: Any) -> Any:
        path = f"state.optimizer.slots[{name!r}][{key!r}]"
        is_whole = isinstance(leaf, torch.Tensor) and tuple(leaf.shape) == shapes.get(name)
        return held_rows(leaf, path, box_of) if is_whole or isinstance(leaf, Shard) else leaf

    slots = {
        name: {key: tree.map(partial(slot, name, key), value) for key, value in of_one.items()}
        for name, of_one in optimizer.slots.items()
    }
    return cast("S", state.evolve(model=plain, optimizer=attrs.evolve(optimizer, slots=Leaves(slots)))), shapes


def in_parts(
    model: ModelState, optimizer: OptimizerState, shapes: Mapping[str, tuple[int, ...]], cut: Cut, lease: Lease
) -> tuple[ModelState, OptimizerState]:
    """Return components of plain tensors as components of parts, under the lease that the tensors have.

    Args:
        model: with this rank's rows.
        optimizer: with slots that have the shape of this rank's rows, or are whole.
        shapes: FQN -> shape of the whole parameter.
        cut: makes a part.
        lease: of the new components.
    """
    rows = model.params

    def part(name: str, leaf: Any) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape == rows[name].shape
        return cut(leaf, shapes[name]) if is_cut else leaf

    params = {name: part(name, leaf) for name, leaf in rows.items()}
    slots = {name: tree.map(partial(part, name), dict(of_one)) for name, of_one in optimizer.slots.items()}
    return (
        attrs.evolve(model, params=Leaves.leased(params, lease)),
        attrs.evolve(optimizer, slots=Leaves.leased(slots, lease)),
    )


def held_rows(leaf: Any, path: str, box_of: BoxOf) -> torch.Tensor:
    """Return the tensor in a part, if it is the part that this rank holds.

    Args:
        leaf: of a state.
        path: of the leaf, for the error.
        box_of: the box that this rank has to hold.

    Raises:
        InvalidState: if it is whole, or another part.
    """
    is_part = isinstance(leaf, Shard)
    plain: torch.Tensor = leaf.tensor if is_part else leaf
    is_plain, shape = type(plain) is torch.Tensor, tuple(leaf.shape)
    if is_plain and (leaf.box == box_of(shape) if is_part else not shape):
        return plain
    wanted = f"{_shown(box_of(shape), shape)}, this rank's part" if shape else "the whole tensor"
    is_of_rows = not is_part or leaf.box[1:] == whole_box(shape)[1:]
    raise _unfit(path, leaf, wanted, _AGAIN if is_plain and is_of_rows else _ATTACH)


def _unfit(path: str, leaf: Any, expected: str, fix: str) -> InvalidState:
    shape = tuple(leaf.shape)
    if isinstance(leaf, Shard):
        found = _shown(leaf.box, shape)
    elif type(leaf) is torch.Tensor:
        found = f"the whole tensor of {list(shape)}"
    else:
        found = f"a {type(leaf).__name__} of {list(shape)} on {getattr(leaf, 'device_mesh', 'a mesh of its own')}"
    return InvalidState(path, expected=expected, found=found, fix=fix)


def _shown(box: Box, shape: tuple[int, ...]) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}] of {list(shape)}"
