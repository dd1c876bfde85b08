"""The interpreter of a `ResumePlan`: it reads what the plan says into fresh memory, and decides nothing."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.formats.native.reader import ReadRequest, fresh_tensor, read_tensors
from trainfold.backends.stores.protocol import Store
from trainfold.core import tree
from trainfold.core.data.cursor import DataCursor, check_cursor
from trainfold.core.errors import CheckpointHostile, InvalidState
from trainfold.core.format.codec import STORED, torch_dtype
from trainfold.core.format.manifest import (
    Manifest,
    TensorRecord,
)
from trainfold.core.format.rebuild import places, rebuild
from trainfold.core.json_values import shown
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box, intersect
from trainfold.core.optim.slot_layout import beside_params, laid_out_like
from trainfold.core.resume.regroup import regrouped
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.rng import KEY_BITS, Key
from trainfold.core.state.components import components_of, state_of
from trainfold.core.state.contract import noted_settings, run_contract
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.notes import RATES, notes_of, settings_of_later, without_notes
from trainfold.core.state.state import (
    Descent,
    ModelState,
    OptimizerState,
    Origin,
    OwnOptimizerState,
    ParamGroup,
    TrainState,
)


def run_resume(plan: ResumePlan, like: TrainState, *, store: Store) -> TrainState:
    """Read what a plan says into fresh memory and return the new state; ``like`` is not touched (V12).

    Args:
        plan: the decisions.
        like: the state that the plan was made for: its structure, its devices, and the values that are kept.
        store: the run.

    Returns:
        The resumed state.

    Raises:
        CheckpointDamaged: if bytes that are used have another digest, or the header of their file is not the one that was written.
        CheckpointTorn: if a file ends too early.
        CheckpointHostile: if the saved data position is one that cannot be (G02).
    """
    mine = components_of(like)
    headers = HeaderCheck(store, plan.checkpoint, plan.manifest)
    found: dict[str, Any] = {}
    for action in plan.actions:
        if action.verb in ("keep", "reset"):
            if action.name in mine:
                found[action.name] = mine[action.name]
        else:
            found[action.name] = _component(plan, action, mine, store, headers)
            _check_position(found[action.name], f"{plan.run}/{plan.checkpoint}")
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
    return _with_fresh_masters(state, {action.name: action.verb for action in plan.actions})


def _listed(plan: ResumePlan) -> dict[str, Any]:
    """What the checkpoint lists for the run that goes on from it, and that is no condition of a resume."""
    return {key: value for key, value in plan.manifest.contract.items() if key == RATES}


def _check_position(component: Any, where: str) -> None:
    if isinstance(component, Key) and not 0 <= component.bits < 1 << KEY_BITS:
        raise CheckpointHostile(f"{where}: rng.bits", expected=f"{KEY_BITS} bits", found=shown(component.bits),
                                fix='start a new key with reset={"rng": "why"}, or load an older step')  # fmt: skip
    if not isinstance(component, DataCursor):
        return
    try:
        check_cursor(component, length=component.length)
    except InvalidState as error:
        raise CheckpointHostile(
            f"{where}: {error.where}",
            expected=error.expected,
            found=error.found,
            fix='start the data anew with reset={"dataset": "why"}, or load an older step',
        ) from error


def _with_fresh_masters(state: TrainState, verbs: Mapping[str, str]) -> TrainState:
    """Weights that came without their optimizer make its fp32 masters anew: the old ones would revert them (B08, P19)."""
    kept = verbs.get("optimizer", "keep") in ("keep", "reset") and verbs.get("model") in ("load", "adopt")
    optimizer = state.optimizer
    if kept and state.model is not None and isinstance(optimizer, OptimizerState) and optimizer.masters is not None:
        return state.evolve(optimizer=refresh_masters(optimizer, state.model.params))
    return state


def _component(
    plan: ResumePlan, action: ComponentAction, mine: Mapping[str, Any], store: Store, headers: HeaderCheck
) -> Any:
    saved = plan.manifest.component(action.name)
    assert saved is not None  # the plan names only components that are saved
    records, node = saved.tensors[action.part], saved.nodes[action.part]
    wanted = mine.get(action.name)
    targets: dict[str, Any] = dict(tree.named_leaves(wanted, action.name)) if action.name in mine else {}
    at = {leaf.path: leaf for leaf in places(node, action.name)}
    needed = set(at) if action.verb == "adopt" else set(at) & set(targets)
    indices = sorted({at[path].tensor for path in needed if at[path].tensor is not None and path not in action.kept})  # type: ignore[type-var]
    first_path = {at[path].tensor: path for path in reversed(list(at)) if path in needed}
    chosen = [records[index] for index in indices if index is not None]
    wants = [targets.get(first_path[index]) for index in indices]
    loaded: dict[int | None, Any] = dict(
        zip(indices, _read(store, plan.checkpoint, plan.manifest, chosen, wants), strict=True)
    )
    headers.check(
        chain.from_iterable(map(_files_of, chosen, wants))
    )  # afterwards: what cannot fit into memory is refused by then

    def take(index: int, path: str, *, as_numpy: bool) -> Any:
        value = loaded[index]
        if path in action.cast:
            value = value.to(torch_dtype(action.cast[path]))
        return value.numpy() if as_numpy else value

    if action.verb == "adopt":
        built = rebuild(node, action.name, lambda index, as_numpy: take(index, records[index].path, as_numpy=as_numpy))
        model = mine.get("model")
        return _of_this_run(built, wanted, model.params if isinstance(model, ModelState) else None, action.kept)
    leaves = []
    for path, leaf in targets.items():
        if path in action.kept or path not in at:
            leaves.append(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)  # the new state shares nothing
        elif at[path].tensor is None:
            leaves.append(at[path].value)
        else:
            value = take(at[path].tensor, path, as_numpy=isinstance(leaf, np.ndarray))  # type: ignore[arg-type]
            leaves.append(Shard(value, leaf.shape, leaf.starts) if isinstance(leaf, Shard) else value)
    return tree.unflatten(tree.structure(wanted), leaves)


def _read(
    store: Store, directory: str, manifest: Manifest, records: list[TensorRecord], targets: list[Any]
) -> list[torch.Tensor]:
    """Read tensors, whole or the box that a `Shard` target wants, onto the target's device."""
    whole = [
        len(record.shards) == 1 and not isinstance(target, Shard)
        for record, target in zip(records, targets, strict=True)
    ]
    requests = [_request(directory, manifest, record, 0) for record, yes in zip(records, whole, strict=True) if yes]
    dense = iter(read_tensors(store, requests))
    return [
        _onto(next(dense) if yes else _assemble(store, directory, manifest, record, target), target)
        for record, target, yes in zip(records, targets, whole, strict=True)
    ]


def _request(directory: str, manifest: Manifest, record: TensorRecord, which: int) -> ReadRequest:
    shard = record.shards[which]
    return ReadRequest(
        name=f"{directory}/{manifest.files[shard.file].name}",
        start=shard.start,
        stop=shard.stop,
        dtype=record.dtype,
        stored=STORED[record.dtype].name,
        shape=tuple(stop - start for start, stop in shard.box),
        digest=shard.digest,
        path=record.path,
    )


def _assemble(store: Store, directory: str, manifest: Manifest, record: TensorRecord, target: Any) -> torch.Tensor:
    box = _box_of(record, target)
    where = f"{store.url}/{directory} {record.path}"
    out = fresh_tensor(tuple(stop - start for start, stop in box), record.dtype, where)
    used = _used(record, box)
    pieces = read_tensors(store, [_request(directory, manifest, record, i) for i in used])
    for i, piece in zip(used, pieces, strict=True):
        common = intersect(record.shards[i].box, box) or ()
        source = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, record.shards[i].box, strict=True))
        place = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, box, strict=True))
        out[place] = piece[source]
    return out


def _box_of(record: TensorRecord, target: Any) -> Box:
    """The part of a tensor that a target wants."""
    if isinstance(target, Shard):
        return tuple((start, start + size) for start, size in zip(target.starts, target.tensor.shape, strict=True))
    return tuple((0, size) for size in record.shape)


def _used(record: TensorRecord, box: Box) -> list[int]:
    return [i for i, shard in enumerate(record.shards) if intersect(shard.box, box) is not None or not record.shape]


def _files_of(record: TensorRecord, target: Any) -> list[int]:
    """The files in which the bytes are that a target wants."""
    if len(record.shards) == 1 and not isinstance(target, Shard):
        return [record.shards[0].file]
    return [record.shards[i].file for i in _used(record, _box_of(record, target))]


def _onto(value: torch.Tensor, target: Any) -> torch.Tensor:
    return laid_out_like(value, target.tensor if isinstance(target, Shard) else target)


def _of_this_run(
    saved: Any, wanted: Any, params: Mapping[str, torch.Tensor] | None, kept: tuple[str, ...], prefix: str = "optimizer"
) -> Any:
    """An optimizer's state, and those of the optimizers that it holds, beside this run's parameters; all else as it is."""
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
    """Take from the target's groups the hyperparameters that a policy let drift; the keys are the contract's."""
    if not kept or not isinstance(wanted, OptimizerState):
        return saved
    by_fqn = {fqn: group for group in wanted.groups for fqn in group.params}

    def fix(group: ParamGroup) -> ParamGroup:
        label = min(group.params, default="")
        ours = by_fqn.get(label)
        if ours is None:
            return group
        changed = {name: value for name, value in ours.hyper.items() if f"{prefix}.groups[{label!r}].{name}" in kept}
        mine = {  # what the script has no more is dropped, as the base rates of a scheduler that is gone
            name: value
            for name, value in group.hyper.items()
            if name in ours.hyper or f"{prefix}.groups[{label!r}].{name}" not in kept
        }
        return attrs.evolve(group, hyper={**mine, **changed})

    return attrs.evolve(saved, groups=tuple(fix(group) for group in saved.groups))
