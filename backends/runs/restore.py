"""`run_resume`: carries out a `ResumePlan`. It loads into fresh memory and makes no decisions."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.local import Run, open_store
from trainfold.core import tree
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.places import Leaf
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.resume.reads import ComponentReads, plan_reads, sharded_params, slot_boxes
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.resume.resumed import leaf_sources, resumed_contract, resumed_optimizer, resumed_origin
from trainfold.core.state.components import components_of, state_of
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.state import ModelState, OptimizerState, TrainState


def run_resume(plan: ResumePlan, like: TrainState, *, store: Run) -> TrainState:
    """Load the tensors of a plan into fresh memory and return the new state; ``like`` is not changed.

    Args:
        plan: the decisions.
        like: the state for which the plan was made. It gives the structure, the devices, and the values that are kept.
        store: the run: a directory, or a store.

    Returns:
        The resumed state.

    Raises:
        CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
        CheckpointTorn: if a file ends too early.
        CheckpointHostile: if what is needed does not fit into memory.
    """
    store, mine = open_store(store), components_of(like)
    targets = {
        action.name: dict(tree.named_leaves(mine[action.name], action.name))
        for action in plan.actions
        if action.name in mine and action.verb in ("load", "adopt")
    }
    boxes: dict[str, dict[str, Box | None]] = {
        name: {path: leaf.box if isinstance(leaf, Shard) else None for path, leaf in each.items()}
        for name, each in targets.items()
    }
    params = sharded_params(mine)
    for action in plan.actions if params else ():
        saved = plan.manifest.component(action.name)
        if saved is not None and action.verb == "adopt":
            boxes.setdefault(action.name, {}).update(slot_boxes(action.name, saved.tensors[action.part], params))
    reads = without_collecting(plan_reads)(plan, boxes)
    reader = PlanReader(store, plan.checkpoint, plan.manifest)
    found: dict[str, Any] = {}
    for action in plan.actions:
        if action.verb in ("keep", "reset"):
            if action.name in mine:
                found[action.name] = mine[action.name]
        else:
            planned, leaves = reads.components[action.name], targets.get(action.name, {})
            tensors = reader.read(planned, leaves)
            if action.verb == "adopt":
                found[action.name] = _adopted(action, plan.manifest, planned, tensors, mine)
            else:
                found[action.name] = _loaded(action, planned.leaves, tensors, leaves, mine[action.name])
    state = state_of(found).evolve(
        contract=resumed_contract(plan, like, found.get("optimizer")), origin=resumed_origin(plan, like.origin)
    )
    return _with_fresh_masters(state) if plan.fresh_masters else state


def _with_fresh_masters(state: TrainState) -> TrainState:
    optimizer = state.optimizer
    if state.model is not None and isinstance(optimizer, OptimizerState) and optimizer.masters is not None:
        return state.evolve(optimizer=refresh_masters(optimizer, state.model.params))
    return state


@without_collecting
def _adopted(
    action: ComponentAction,
    manifest: Manifest,
    planned: ComponentReads,
    tensors: Mapping[int, torch.Tensor],
    mine: Mapping[str, Any],
) -> Any:
    """A component in the structure that was saved; an optimizer's state is placed beside this run's parameters."""
    saved = manifest.component(action.name)
    assert saved is not None  # only components that are saved are adopted
    records = saved.tensors[action.part]

    def tensor(index: int, as_numpy: bool) -> Any:  # noqa: FBT001 - the signature of `rebuild`
        value = _cast(tensors[index], action.cast.get(records[index].path), as_numpy=as_numpy)
        box = planned.tensors[index].box
        return value if box is None else Shard(value, records[index].shape, tuple(start for start, _ in box))

    built = rebuild(saved.nodes[action.part], action.name, tensor)
    model = mine.get("model")
    params = model.params if isinstance(model, ModelState) else None
    return resumed_optimizer(built, mine.get(action.name), params, action.kept)


@without_collecting
def _loaded(
    action: ComponentAction,
    leaves: Mapping[str, Leaf],
    tensors: Mapping[int, torch.Tensor],
    targets: Mapping[str, Any],
    wanted: Any,
) -> Any:
    """A component in the structure of the target, with the saved values, or the target's own if the plan keeps them."""
    values = []
    for path, saved in leaf_sources(action, leaves, targets).items():
        target = targets[path]
        if saved is None:
            values.append(
                target.clone() if isinstance(target, torch.Tensor) else target
            )  # shares no memory with `like`
        elif saved.tensor is None:
            values.append(saved.value)
        else:
            as_numpy = isinstance(target, np.ndarray)
            value = _cast(tensors[saved.tensor], action.cast.get(path), as_numpy=as_numpy)
            values.append(attrs.evolve(target, tensor=value) if isinstance(target, Shard) else value)
    return tree.unflatten(tree.structure(wanted), values)


def _cast(value: torch.Tensor, dtype: str | None, *, as_numpy: bool) -> Any:
    value = value if dtype is None else value.to(torch_dtype(dtype))
    return value.numpy() if as_numpy else value
