"""The interpreters: they carry out a `SavePlan` or a `ResumePlan` on a store, for every rank, and decide nothing."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any, final

import attrs
import numpy as np
import torch

from trainfold.backends.native_reader import ReadRequest, fresh_tensor, read_tensors
from trainfold.backends.native_writer import WrittenFile, write_file
from trainfold.backends.protocols import Collectives, Store
from trainfold.backends.together import on_all_ranks, on_rank_zero
from trainfold.core import tree
from trainfold.core.boxes import intersect
from trainfold.core.codec import STORED, as_tensor, digest_of, torch_dtype
from trainfold.core.components import components_of, state_of
from trainfold.core.contract import run_contract
from trainfold.core.cursor import DataCursor, check_cursor
from trainfold.core.errors import CheckpointHostile, InvalidState, SaveFailed, TrainfoldError
from trainfold.core.fingerprint import component_fingerprint
from trainfold.core.manifest import (
    HEAD_LIMIT_BYTES,
    ComponentRecord,
    FileRecord,
    Head,
    Manifest,
    ShardRecord,
    TensorRecord,
    encode_manifest,
)
from trainfold.core.manifest_reader import decode_head, decode_manifest
from trainfold.core.masters import refresh_masters
from trainfold.core.resume_plan import ComponentAction, ResumePlan
from trainfold.core.rng import KEY_BITS, Key
from trainfold.core.save_plan import MANIFEST, ComponentPlan, SavePlan
from trainfold.core.scalars import Json, shown
from trainfold.core.shard import Shard
from trainfold.core.slot_homes import beside_params, laid_out_like
from trainfold.core.spec import Box
from trainfold.core.state import ModelState, OptimizerState, ParamGroup, TrainState
from trainfold.core.structure import places, rebuild


@final
@attrs.frozen
class SaveResult:
    """What a save did (C16).

    Attributes:
        run: where the run is.
        checkpoint: the directory.
        step: the step.
        timeline: the timeline that it belongs to.
        size_bytes: bytes of its data files.
        fingerprints: component -> digest.
    """

    run: str
    checkpoint: str
    step: int
    timeline: int
    size_bytes: int
    fingerprints: Mapping[str, str]


def library_versions() -> dict[str, str]:
    """The versions that a manifest records.

    Examples:
        >>> sorted(library_versions())
        ['numpy', 'torch', 'trainfold']
    """
    return {"trainfold": metadata.version("trainfold"), "torch": torch.__version__, "numpy": np.__version__}


def run_save(  # noqa: PLR0913 - keywords
    plan: SavePlan,
    tensors: Mapping[str, Mapping[str, Any]],
    *,
    head: Head,
    store: Store,
    collectives: Collectives,
    contract: Mapping[str, Json],
    omitted: tuple[str, ...] = (),
    replaces: bytes | None = None,
) -> SaveResult:
    """Write what a plan says and commit it; the caller holds the run's lock on rank 0.

    Args:
        plan: the same on every rank.
        tensors: component -> path -> this rank's tensor leaf.
        head: identity and order of the new checkpoint.
        store: the run.
        collectives: the world; every rank calls this.
        contract: the resume contract.
        omitted: components that the state has and the plan does not.
        replaces: the bytes of the manifest that stands there now, if the step is being replaced.

    Returns:
        What was saved; the same on every rank.

    Raises:
        SaveFailed: of the kind that fits; what was written is removed, and what stood there before stands.
        RankFailed: on the other ranks.
    """
    written: list[str] = []
    data = b""

    def write() -> list[WrittenFile]:
        records = []
        for file in plan.files_of(collectives.rank):
            written.append(file.name)
            held = {path: as_tensor(leaf, path) for path, leaf in tensors[file.component].items()}
            records.append(write_file(file, held, store=store, directory=plan.directory))
        return records

    def commit() -> None:
        nonlocal data
        _check_sizes(plan, store)
        data = encode_manifest(manifest)
        decode_manifest(data, plan.directory)
        decode_head(data[:HEAD_LIMIT_BYTES], plan.directory)
        store.commit(f"{plan.directory}/{MANIFEST}", data, replaces=None if replaces is None else digest_of(replaces))
        _after_commit(manifest, plan, store)

    try:
        everyone = {file.name: file for rank in on_all_ranks(collectives, write) for file in rank}
        manifest = _manifest(plan, everyone, head, contract, omitted)
        on_rank_zero(collectives, commit)
    except BaseException:
        _clean_up(plan, written, data, store)
        raise
    fingerprints = {component.name: component.fingerprint for component in manifest.components}
    return SaveResult(store.url, plan.directory, head.step, head.timeline, manifest.size_bytes, fingerprints)


def _clean_up(plan: SavePlan, written: list[str], data: bytes, store: Store) -> None:
    """Remove what a failed save wrote, unless its manifest is visible all the same: then it is a whole checkpoint."""
    with suppress(TrainfoldError, OSError):
        if data and store.read(f"{plan.directory}/{MANIFEST}") == data:
            return
    for name in written:
        with suppress(TrainfoldError, OSError):
            store.delete(f"{plan.directory}/{name}")


def _after_commit(manifest: Manifest, plan: SavePlan, store: Store) -> None:
    """Only hints and garbage: a failure here must not make a durable checkpoint look like a failed save."""
    with suppress(TrainfoldError, OSError):
        store.point("latest", plan.directory)
        named = {MANIFEST, *(file.name for file in manifest.files)}
        for stale in store.list(plan.directory):
            if stale not in named:
                store.delete(f"{plan.directory}/{stale}")


def _check_sizes(plan: SavePlan, store: Store) -> None:
    for file in plan.files:
        size = store.size(f"{plan.directory}/{file.name}")
        if size != file.size_bytes:
            raise SaveFailed(
                f"{store.url}/{plan.directory}/{file.name}",
                expected=f"{file.size_bytes} bytes before the commit",
                found="no file" if size is None else f"{size} bytes",
                mend="check that all ranks write to the same filesystem",
            )


def _manifest(
    plan: SavePlan,
    written: Mapping[str, WrittenFile],
    head: Head,
    contract: Mapping[str, Json],
    omitted: tuple[str, ...],
) -> Manifest:
    files = []
    shards: dict[tuple[str, int, str], list[ShardRecord]] = {}
    for index, file in enumerate(plan.files):
        found = written[file.name]
        files.append(FileRecord(file.name, file.component, file.rank, found.size_bytes, found.digest))
        per_rank = len(next(c for c in plan.components if c.name == file.component).nodes) > 1
        for placed in file.tensors:
            key = (file.component, file.rank if per_rank else 0, placed.path)
            record = ShardRecord(index, placed.start, placed.stop, placed.box, found.tensor_digests[placed.path])
            shards.setdefault(key, []).append(record)
    components = tuple(_component_record(component, shards) for component in plan.components)
    return Manifest(head, plan.world_size, components, omitted, contract, library_versions(), tuple(files))


def _component_record(
    component: ComponentPlan, shards: Mapping[tuple[str, int, str], list[ShardRecord]]
) -> ComponentRecord:
    tables = []
    for part, tensors in enumerate(component.tensors):
        tables.append(
            tuple(
                TensorRecord(
                    path, spec.dtype, spec.shape, tuple(sorted(shards[component.name, part, path], key=lambda s: s.box))
                )
                for path, spec in tensors.items()
            )
        )
    lines = [[(str(record.spec), tensor_digest(record)) for record in table] for table in tables]
    parts = list(zip(component.nodes, lines, strict=True))
    return ComponentRecord(component.name, component.nodes, tuple(tables), component_fingerprint(component.name, parts))


def tensor_digest(record: TensorRecord) -> str:
    """The digest of a stored tensor: its bytes', or, if it is stored in several shards, that of their digests."""
    if len(record.shards) == 1:
        return record.shards[0].digest
    return digest_of("\n".join(f"{shard.box} {shard.digest}" for shard in record.shards).encode())


def run_resume(plan: ResumePlan, like: TrainState, *, store: Store) -> TrainState:
    """Read what a plan says into fresh memory and return the new state; ``like`` is not touched (V12).

    Args:
        plan: the decisions.
        like: the state that the plan was made for: its structure, its devices, and the values that are kept.
        store: the run.

    Returns:
        The resumed state.

    Raises:
        CheckpointDamaged: if bytes that are used have another digest.
        CheckpointTorn: if a file ends too early.
        CheckpointHostile: if the saved data position is one that cannot be (G02).
    """
    mine = components_of(like)
    found: dict[str, Any] = {}
    for action in plan.actions:
        if action.verb in ("keep", "reset"):
            if action.name in mine:
                found[action.name] = mine[action.name]
        else:
            found[action.name] = _component(plan, action, mine, store)
            _check_position(found[action.name], f"{plan.run}/{plan.checkpoint}")
    state = state_of(found).evolve(contract={**run_contract(like.contract), **plan.contract})
    return _with_fresh_masters(state, {action.name: action.verb for action in plan.actions})


def _check_position(component: Any, where: str) -> None:
    if isinstance(component, Key) and not 0 <= component.bits < 1 << KEY_BITS:
        raise CheckpointHostile(f"{where}: rng.bits", expected=f"{KEY_BITS} bits", found=shown(component.bits),
                                mend='start a new key with reset={"rng": "why"}, or load an older step')  # fmt: skip
    if not isinstance(component, DataCursor):
        return
    try:
        check_cursor(component, length=component.length)
    except InvalidState as error:
        raise CheckpointHostile(
            f"{where}: {error.where}",
            expected=error.expected,
            found=error.found,
            mend='start the data anew with reset={"dataset": "why"}, or load an older step',
        ) from error


def _with_fresh_masters(state: TrainState, verbs: Mapping[str, str]) -> TrainState:
    """Weights that came without their optimizer make its fp32 masters anew: the old ones would revert them (B08, P19)."""
    kept = verbs.get("optimizer", "keep") in ("keep", "reset") and verbs.get("model") in ("load", "adopt")
    optimizer = state.optimizer
    if kept and state.model is not None and isinstance(optimizer, OptimizerState) and optimizer.masters is not None:
        return state.evolve(optimizer=refresh_masters(optimizer, state.model.params))
    return state


def _component(plan: ResumePlan, action: ComponentAction, mine: Mapping[str, Any], store: Store) -> Any:
    saved = plan.manifest.component(action.name)
    assert saved is not None  # the plan names only components that are saved
    records, node = saved.tensors[action.part], saved.nodes[action.part]
    wanted = mine.get(action.name)
    targets: dict[str, Any] = dict(tree.named_leaves(wanted, action.name)) if action.name in mine else {}
    at = {leaf.path: leaf for leaf in places(node, action.name)}
    needed = set(at) if action.verb == "adopt" else set(at) & set(targets)
    indices = sorted({at[path].tensor for path in needed if at[path].tensor is not None and path not in action.kept})  # type: ignore[type-var]
    first_path = {at[path].tensor: path for path in reversed(list(at)) if path in needed}
    place = f"{plan.checkpoint}"
    loaded: dict[int | None, Any] = dict(
        zip(indices, _read(store, place, plan.manifest, [records[i] for i in indices if i is not None],  # noqa: B905
                           [targets.get(first_path[i]) for i in indices]))
    )  # fmt: skip

    def take(index: int, path: str, *, as_numpy: bool) -> Any:
        value = loaded[index]
        if path in action.cast:
            value = value.to(torch_dtype(action.cast[path]))
        return value.numpy() if as_numpy else value

    if action.verb == "adopt":
        built = rebuild(node, action.name, lambda index, as_numpy: take(index, records[index].path, as_numpy=as_numpy))
        if not isinstance(built, OptimizerState):
            return built
        model = mine.get("model")
        placed = beside_params(built, model.params) if isinstance(model, ModelState) else built
        return _with_kept_hyper(placed, wanted, action.kept)
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
    box: Box = tuple((0, size) for size in record.shape)
    if isinstance(target, Shard):
        box = tuple((start, start + size) for start, size in zip(target.starts, target.tensor.shape, strict=True))
    where = f"{store.url}/{directory} {record.path}"
    out = fresh_tensor(tuple(stop - start for start, stop in box), record.dtype, where)
    used = [i for i, shard in enumerate(record.shards) if intersect(shard.box, box) is not None or not record.shape]
    pieces = read_tensors(store, [_request(directory, manifest, record, i) for i in used])
    for i, piece in zip(used, pieces, strict=True):
        common = intersect(record.shards[i].box, box) or ()
        source = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, record.shards[i].box, strict=True))
        place = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, box, strict=True))
        out[place] = piece[source]
    return out


def _onto(value: torch.Tensor, target: Any) -> torch.Tensor:
    return laid_out_like(value, target.tensor if isinstance(target, Shard) else target)


def _with_kept_hyper(saved: OptimizerState, wanted: Any, kept: tuple[str, ...]) -> OptimizerState:
    """Take from the target's groups the hyperparameters that a policy let drift; the keys are the contract's."""
    if not kept or not isinstance(wanted, OptimizerState):
        return saved
    by_fqn = {fqn: group for group in wanted.groups for fqn in group.params}

    def mend(group: ParamGroup) -> ParamGroup:
        label = min(group.params, default="")
        ours = by_fqn.get(label)
        if ours is None:
            return group
        changed = {name: value for name, value in ours.hyper.items() if f"optimizer.groups[{label!r}].{name}" in kept}
        return attrs.evolve(group, hyper={**group.hyper, **changed})

    return attrs.evolve(saved, groups=tuple(mend(group) for group in saved.groups))
