"""`run_resume`: carries out a `ResumePlan`. It loads into fresh memory and makes no decisions."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.shared_reads import SharedReads
from trainfold.backends.stores.local import Run, open_store
from trainfold.core import tree
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.indexes.needed import nowhere_else
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.places import Leaf
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box
from trainfold.core.resume.reads import (
    ComponentReads,
    ReadPlan,
    held_elsewhere,
    plan_reads,
    sharded_params,
    slot_boxes,
)
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.resume.resumed import (
    leaf_sources,
    resumed_contract,
    resumed_optimizer,
    resumed_origin,
    with_rates_of,
)
from trainfold.core.state.components import components_of, state_of
from trainfold.core.state.contract_kinds import prefix_of_optimizer
from trainfold.core.state.masters import refresh_masters, with_fitting_masters
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.transform.rounding import converted_to

_Targets: TypeAlias = dict[str, dict[str, Any]]


def run_resume(
    plan: ResumePlan,
    like: TrainState,
    *,
    store: Run,
    unread: UnreadTensors | None = None,
    sharing: SharedReads | None = None,
) -> TrainState:
    """Load the tensors of a plan into fresh memory and return the new state; ``like`` is not changed.

    Args:
        plan: the decisions.
        like: the state for which the plan was made. It gives the structure, the devices, and the values that are kept.
        store: the run: a directory, or a store.
        unread: gets the parameters, buffers and slots of its components that need no cast, which are read later; None for none.
        sharing: the ranks, all of which call this with the same plan and read for each other; None to read alone.

    Returns:
        The resumed state.

    Raises:
        CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
        CheckpointTorn: if a file ends too early.
        CheckpointHostile: if what is needed does not fit into memory.
        InvalidState: if a number is beyond the dtype to which a policy casts it.
        RankFailed: if another rank fails with which this one shares its reads.
    """
    store, mine = open_store(store), components_of(like)
    targets: _Targets = {}

    @without_collecting
    def make_plan() -> ReadPlan:
        targets.update(_targets(plan, mine))
        elsewhere = nowhere_else if like.stage is None else held_elsewhere(mine)
        return plan_reads(plan, _boxes(plan, mine, targets), elsewhere=elsewhere)

    planned = nullcontext((make_plan(), store)) if sharing is None else sharing.planned(plan.manifest, make_plan)
    with planned as (reads, source):
        reader = PlanReader(source, plan.checkpoint, plan.manifest)
        return _resumed(plan, like, mine=mine, targets=targets, reads=reads, reader=reader, unread=unread)


def _targets(plan: ResumePlan, mine: Mapping[str, Any]) -> _Targets:
    """The leaves of this run that get values, by component and path."""
    return {
        action.name: dict(tree.named_leaves(mine[action.name], action.name))
        for action in plan.actions
        if action.name in mine and action.verb in ("load", "adopt")
    }


def _boxes(plan: ResumePlan, mine: Mapping[str, Any], targets: _Targets) -> dict[str, dict[str, Box | None]]:
    """The slice of each leaf that this rank holds; slots take that of their parameter."""
    boxes: dict[str, dict[str, Box | None]] = {
        name: {path: leaf.box if isinstance(leaf, Shard) else None for path, leaf in each.items()}
        for name, each in targets.items()
    }
    params = sharded_params(mine)
    for action in plan.actions if params else ():
        saved = plan.manifest.component(action.name)
        if saved is not None and action.verb == "adopt":
            boxes.setdefault(action.name, {}).update(slot_boxes(action.name, saved.tensors[action.part], params))
    return boxes


def _resumed(  # noqa: PLR0913 - keywords
    plan: ResumePlan,
    like: TrainState,
    *,
    mine: Mapping[str, Any],
    targets: _Targets,
    reads: ReadPlan,
    reader: PlanReader,
    unread: UnreadTensors | None,
) -> TrainState:
    found: dict[str, Any] = {}
    makes_masters = plan.fresh_masters and getattr(mine.get("optimizer"), "masters", None) is not None  # from values
    for action in plan.actions:
        if action.verb in ("keep", "reset"):
            if action.name in mine:
                found[action.name] = _at_rates(mine[action.name], action, plan.manifest)
        else:
            planned, leaves = reads.components[action.name], targets.get(action.name, {})
            waits = unread is not None and action.name in unread.components and not makes_masters
            later = _later(planned, action, mine.get(action.name)) if waits else ()
            tensors = reader.read(planned, leaves, unread=unread, later=later)
            if action.verb == "adopt":
                found[action.name] = _adopted(
                    action, plan.manifest, planned, tensors, mine, is_stage=like.stage is not None
                )
            else:
                found[action.name] = _loaded(action, planned.leaves, tensors, leaves, mine[action.name])
            if action.rates == "script":
                found[action.name] = with_rates_of(found[action.name], mine[action.name])
    state = state_of(found).evolve(
        contract=resumed_contract(plan, like, found.get("optimizer")),
        origin=resumed_origin(plan, like.origin),
        stage=like.stage,
    )
    return _with_masters_of_its_weights(state, plan)


def _at_rates(mine: Any, action: ComponentAction, manifest: Manifest) -> Any:
    """A component that is not loaded; of an optimizer whose scheduler is, at the saved rates."""
    saved = manifest.component(action.name)
    if action.rates != "checkpoint" or saved is None:
        return mine
    return with_rates_of(
        mine, rebuild(saved.nodes[0], action.name, lambda *_: None)
    )  # rates that are tensors were refused


def _later(planned: ComponentReads, action: ComponentAction, mine: Any) -> frozenset[int]:
    """Which tensors can be read later: parameters, buffers and slots, not those inside of a slot, and none without dimensions or with a cast."""
    owners: set[str] = set()
    if isinstance(mine, ModelState):
        owners = {f"{action.name}.params", f"{action.name}.buffers"}
    elif isinstance(mine, OptimizerState):
        owners = {f"{action.name}.slots[{name!r}]" for group in mine.groups for name in group.params}
    now = {
        leaf.tensor
        for path, leaf in planned.leaves.items()
        if path.rpartition("[")[0] not in owners or leaf.as_numpy or path in action.cast
    }
    return frozenset(index for index, read in planned.tensors.items() if read.record.shape and index not in now)


def _with_masters_of_its_weights(state: TrainState, plan: ResumePlan) -> TrainState:
    """The state with masters of the weights that it has: those of other weights would revert them in the next step."""
    optimizer = state.optimizer
    if state.model is None or not isinstance(optimizer, OptimizerState) or optimizer.masters is None:
        return state
    if plan.fresh_masters:
        return state.evolve(optimizer=refresh_masters(optimizer, state.model.params))
    loaded = {action.name for action in plan.actions if action.verb not in ("keep", "reset")}
    if "optimizer" in loaded and "model" not in loaded:
        return state.evolve(optimizer=with_fitting_masters(optimizer, state.model.params))
    return state


@without_collecting
def _adopted(  # noqa: PLR0913 - keywords
    action: ComponentAction,
    manifest: Manifest,
    planned: ComponentReads,
    tensors: Mapping[int, torch.Tensor],
    mine: Mapping[str, Any],
    *,
    is_stage: bool,
) -> Any:
    """A component in the structure that was saved; an optimizer's state is placed beside this run's parameters."""
    saved = manifest.component(action.name)
    assert saved is not None  # only components that are saved are adopted
    records = saved.tensors[action.part]

    def tensor(index: int, as_numpy: bool) -> Any:  # noqa: FBT001 - the signature of `rebuild`
        if is_stage and index not in tensors:
            return None  # of a parameter that this rank does not have
        path = records[index].path
        value = _cast(tensors[index], action.cast.get(path), path, as_numpy=as_numpy)
        box = planned.tensors[index].box
        return value if box is None else Shard(value, records[index].shape, tuple(start for start, _ in box))

    built = rebuild(saved.nodes[action.part], action.name, tensor)
    model = mine.get("model")
    params = model.params if isinstance(model, ModelState) else None
    prefix = prefix_of_optimizer(action.name)
    return resumed_optimizer(built, mine.get(action.name), params, action.kept, prefix=prefix, is_stage=is_stage)


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
            # shares no memory with `like`
            values.append(target.clone() if isinstance(target, torch.Tensor) else target)
        elif saved.tensor is None:
            values.append(saved.value)
        else:
            as_numpy = isinstance(target, np.ndarray)
            value = _cast(tensors[saved.tensor], action.cast.get(path), path, as_numpy=as_numpy)
            values.append(attrs.evolve(target, tensor=value) if isinstance(target, Shard) else value)
    return tree.unflatten(tree.structure(wanted), values)


def _cast(value: torch.Tensor, dtype: str | None, path: str, *, as_numpy: bool) -> Any:
    if dtype is not None:
        fix = "build the state in a dtype that has them, such as the one that was saved, or bfloat16, which has the range of float32"
        value = converted_to(value, torch_dtype(dtype), path.__str__, fix=fix)
    return value.numpy() if as_numpy else value
