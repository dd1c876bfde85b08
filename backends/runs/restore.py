"""`run_resume`: carries out a `ResumePlan`. It loads into fresh memory and makes no decisions."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.protocol import Store
from trainfold.core import tree
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.manifest import (
    Manifest,
)
from trainfold.core.format.structure.places import Leaf
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.layout.shard import Shard
from trainfold.core.optim.slot_layout import beside_params
from trainfold.core.resume.reads import plan_reads
from trainfold.core.resume.regroup import regrouped
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.state.components import components_of, state_of
from trainfold.core.state.contract import noted_settings, run_contract
from trainfold.core.state.descent import Descent
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.notes import RATES, notes_of, settings_of_later, without_notes
from trainfold.core.state.state import ModelState, OptimizerState, Origin, OwnOptimizerState, ParamGroup, TrainState


def run_resume(plan: ResumePlan, like: TrainState, *, store: Store) -> TrainState:
    """Load the tensors of a plan into fresh memory and return the new state; ``like`` is not changed.

    Args:
        plan: the decisions.
        like: the state for which the plan was made. It gives the structure, the devices, and the values that are kept.
        store: the run.

    Returns:
        The resumed state.

    Raises:
        CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
        CheckpointTorn: if a file ends too early.
        CheckpointHostile: if what is needed does not fit into memory.
    """
    mine = components_of(like)
    targets = {
        action.name: dict(tree.named_leaves(mine[action.name], action.name))
        for action in plan.actions
        if action.name in mine and action.verb in ("load", "adopt")
    }
    boxes = {
        name: {path: leaf.box if isinstance(leaf, Shard) else None for path, leaf in each.items()}
        for name, each in targets.items()
    }
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
                found[action.name] = _adopted(action, plan.manifest, tensors, mine)
            else:
                found[action.name] = _loaded(action, planned.leaves, tensors, leaves, mine[action.name])
    head = plan.manifest.head
    is_resumed = any(each.name == "trainer" and each.verb not in ("keep", "reset") for each in plan.actions)
    runs = {head.run_id: Descent(head.timeline, head.step, head.forks)} if is_resumed else {}
    adapts = frozenset(drift.where for drift in plan.drifts if drift.adapts_a_scheduler)
    settings = noted_settings(like, found.get("optimizer"))
    state = state_of(found).evolve(
        contract={
            **settings_of_later(plan.manifest.contract, like.contract),
            **without_notes(run_contract(like.contract)),
            **settings,
            **_listed(plan),
            **plan.contract,
            **notes_of(plan.manifest.contract),
        },
        origin=Origin({**like.origin.runs, **runs}, adapts),
    )
    return _with_fresh_masters(state) if plan.fresh_masters else state


def _listed(plan: ResumePlan) -> dict[str, Any]:
    """The keys that the checkpoint lists for the run that continues it, and that are not conditions of a resume."""
    return {key: value for key, value in plan.manifest.contract.items() if key == RATES}


def _with_fresh_masters(state: TrainState) -> TrainState:
    optimizer = state.optimizer
    if state.model is not None and isinstance(optimizer, OptimizerState) and optimizer.masters is not None:
        return state.evolve(optimizer=refresh_masters(optimizer, state.model.params))
    return state


@without_collecting
def _adopted(
    action: ComponentAction, manifest: Manifest, tensors: Mapping[int, torch.Tensor], mine: Mapping[str, Any]
) -> Any:
    """A component in the structure that was saved; an optimizer's state is placed beside this run's parameters."""
    saved = manifest.component(action.name)
    assert saved is not None  # only components that are saved are adopted
    records = saved.tensors[action.part]

    def tensor(index: int, as_numpy: bool) -> Any:  # noqa: FBT001 - the signature of `rebuild`
        return _cast(tensors[index], action.cast.get(records[index].path), as_numpy=as_numpy)

    built = rebuild(saved.nodes[action.part], action.name, tensor)
    model = mine.get("model")
    params = model.params if isinstance(model, ModelState) else None
    return _of_this_run(built, mine.get(action.name), params, action.kept)


@without_collecting
def _loaded(
    action: ComponentAction,
    leaves: Mapping[str, Leaf],
    tensors: Mapping[int, torch.Tensor],
    targets: Mapping[str, Any],
    wanted: Any,
) -> Any:
    """A component in the structure of the target, with the saved values, or the target's own if the plan keeps them."""
    kept = frozenset(action.kept)
    values = []
    for path, target in targets.items():
        saved = None if path in kept else leaves.get(path)
        if saved is None:
            values.append(
                target.clone() if isinstance(target, torch.Tensor) else target
            )  # shares no memory with `like`
        elif saved.tensor is None:
            values.append(saved.value)
        else:
            as_numpy = isinstance(target, np.ndarray)
            value = _cast(tensors[saved.tensor], action.cast.get(path), as_numpy=as_numpy)
            values.append(Shard(value, target.shape, target.starts) if isinstance(target, Shard) else value)
    return tree.unflatten(tree.structure(wanted), values)


def _cast(value: torch.Tensor, dtype: str | None, *, as_numpy: bool) -> Any:
    value = value if dtype is None else value.to(torch_dtype(dtype))
    return value.numpy() if as_numpy else value


def _of_this_run(
    saved: Any, wanted: Any, params: Mapping[str, torch.Tensor] | None, kept: tuple[str, ...], prefix: str = "optimizer"
) -> Any:
    """The state of an optimizer, and of the optimizers inside of it, placed beside the parameters of this run; anything else unchanged."""
    if isinstance(saved, OwnOptimizerState):
        theirs = wanted.held if isinstance(wanted, OwnOptimizerState) else {}
        return attrs.evolve(
            saved,
            base=_of_this_run(saved.base, wanted, params, kept, prefix),
            held={
                name: _of_this_run(each, theirs.get(name), params, kept, f"{prefix}.held[{name!r}]")
                for name, each in saved.held.items()
            },
        )
    if not isinstance(saved, OptimizerState):
        return saved
    placed = saved if params is None else beside_params(saved, params)
    target = wanted.base if isinstance(wanted, OwnOptimizerState) else wanted
    placed = regrouped(placed, target) if isinstance(target, OptimizerState) else placed
    return _with_kept_hyper(placed, target, kept, prefix)


def _with_kept_hyper(saved: OptimizerState, wanted: Any, kept: tuple[str, ...], prefix: str) -> OptimizerState:
    """The saved state with the target's value for each hyperparameter that the policy keeps; ``kept`` has keys of the contract."""
    if not kept or not isinstance(wanted, OptimizerState):
        return saved
    by_fqn = {fqn: group for group in wanted.groups for fqn in group.params}

    def fix(group: ParamGroup) -> ParamGroup:
        label = min(group.params, default="")
        ours = by_fqn.get(label)
        if ours is None:
            return group
        changed = {name: value for name, value in ours.hyper.items() if f"{prefix}.groups[{label!r}].{name}" in kept}
        mine = {  # a hyperparameter that the script has removed is dropped, such as the base rate of a removed scheduler
            name: value
            for name, value in group.hyper.items()
            if name in ours.hyper or f"{prefix}.groups[{label!r}].{name}" not in kept
        }
        return attrs.evolve(group, hyper={**mine, **changed})

    return attrs.evolve(saved, groups=tuple(fix(group) for group in saved.groups))
