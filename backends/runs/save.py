"""The interpreter of a `SavePlan`: it writes, commits and cleans up, for every rank, and decides nothing."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any, final

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.writer import WrittenFile, write_file
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.hold.hold import HeldLeaf, Hold
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import SaveFailed, TrainfoldError
from trainfold.core.format.codec import as_tensor
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import recorded_fingerprint
from trainfold.core.format.manifest import (
    HEAD_LIMIT_BYTES,
    ComponentRecord,
    FileRecord,
    Head,
    Manifest,
    ShardRecord,
    TensorRecord,
    encode_manifest,
)
from trainfold.core.format.manifest_reader import decode_head, decode_manifest
from trainfold.core.json_values import Json
from trainfold.core.layout.world import Collectives
from trainfold.core.save.save_plan import ComponentPlan, SavePlan
from trainfold.core.state.descent import Descent


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
        forks: where the earlier timelines of its lineage were left, (timeline, step) each.
        run_id: the run's.
        omitted: components that the run has and that were left out.
    """

    run: str
    checkpoint: str
    step: int
    timeline: int
    size_bytes: int
    fingerprints: Mapping[str, str]
    forks: tuple[tuple[int, int], ...] = ()
    run_id: str = ""
    omitted: tuple[str, ...] = ()

    @property
    def descent(self) -> Descent:
        """What a state that goes on from here descends from."""
        return Descent(self.timeline, self.step, self.forks)


def library_versions() -> dict[str, str]:
    """The versions that a manifest records.

    Examples:
        >>> sorted(library_versions())
        ['numpy', 'torch', 'trainfold']
    """
    return {"trainfold": _own_version(), "torch": torch.__version__, "numpy": np.__version__}


@cache
def _own_version() -> str:
    """That of the code that runs, whatever is installed meanwhile; it is in a file, which no later save needs any more."""
    return metadata.version("trainfold")


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
    hold: Hold | None = None,
) -> SaveResult:
    """Write what a plan says and commit it; the caller holds the run's lock on rank 0.

    Args:
        plan: the same on every rank.
        tensors: component -> path -> this rank's tensor leaf, or a held one.
        head: identity and order of the new checkpoint.
        store: the run.
        collectives: the world; every rank calls this.
        contract: the resume contract.
        omitted: components that the state has and the plan does not.
        replaces: the bytes of the manifest that stands there now, if the step is being replaced.
        hold: what held leaves are read through; each rank asks its own, before the commit, whether they stayed as they were.

    Returns:
        What was saved; the same on every rank.

    Raises:
        SaveFailed: of the kind that fits; what was written is removed by rank 0, and what stood there before stands. Where
            rank 0 has died, the files stay until the next save of the step, or retention, removes them.
        RankFailed: on the other ranks.
    """
    data = b""

    def write() -> list[WrittenFile]:
        records = []
        for file in plan.files_of(collectives.rank):
            held = {
                path: leaf if isinstance(leaf, HeldLeaf) else as_tensor(leaf, path)
                for path, leaf in tensors[file.component].items()
            }
            records.append(write_file(file, held, store=store, directory=plan.directory))
            if hold is not None:
                hold.check_written(file.component, records[-1].tensor_digests)
        if hold is not None:
            hold.check_unchanged()
        return records

    def commit() -> None:
        nonlocal data
        with named_failures(f"{store.url}/{plan.directory}"):
            _check_sizes(plan, store)
        data = _proved_bytes(manifest, plan.directory)
        store.commit(f"{plan.directory}/{MANIFEST}", data, replaces=None if replaces is None else digest_of(replaces))
        _after_commit(manifest, plan, store)

    try:
        everyone = {file.name: file for rank in on_all_ranks(collectives, write) for file in rank}
        manifest = _manifest(plan, everyone, head, contract, omitted)
        on_rank_zero(collectives, commit)
    except BaseException:
        if collectives.rank == 0:
            _clean_up(plan, data, store)
        raise
    fingerprints = {component.name: component.fingerprint for component in manifest.components}
    return SaveResult(
        store.url, plan.directory, head.step, head.timeline, manifest.size_bytes, fingerprints, head.forks, head.run_id, omitted
    )  # fmt: skip


def _clean_up(plan: SavePlan, data: bytes, store: Store) -> None:
    """Remove what all ranks wrote for a failed save, unless its manifest is visible all the same: then it is a whole checkpoint.

    Only the committer calls this: it alone knows whether it has committed, and it holds the run's lock (W25). A rank that hears of
    a failure after its vote to write cannot tell a committer that died before the commit from one that died after it.

    A manifest that was taken back has to be gone for good before the files that it names go: else a crash leaves a half.
    """
    manifest = f"{plan.directory}/{MANIFEST}"
    try:
        if data:
            if store.size(manifest) is None:
                store.delete(manifest)  # of what is absent it makes the absence durable
            elif store.read(manifest) == data:
                return
    except (TrainfoldError, OSError):
        return
    for file in plan.files:
        with suppress(TrainfoldError, OSError):
            store.delete(f"{plan.directory}/{file.name}")


def _after_commit(manifest: Manifest, plan: SavePlan, store: Store) -> None:
    """Only hints and garbage: a failure here must not make a durable checkpoint look like a failed save."""
    with suppress(TrainfoldError, OSError):
        store.point("latest", plan.directory)
        named = {MANIFEST, *(file.name for file in manifest.files)}
        for stale in store.list(plan.directory):
            if stale not in named:
                with suppress(TrainfoldError, OSError):  # a sidecar's directory: it goes with the checkpoint
                    store.delete(f"{plan.directory}/{stale}")


def _check_sizes(plan: SavePlan, store: Store) -> None:
    for file in plan.files:
        size = store.size(f"{plan.directory}/{file.name}")
        if size != file.size_bytes:
            raise SaveFailed(
                f"{store.url}/{plan.directory}/{file.name}",
                expected=f"{file.size_bytes} bytes before the commit",
                found="no file" if size is None else f"{size} bytes",
                fix="check that all ranks write to the same filesystem",
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
    fingerprint = without_collecting(recorded_fingerprint)(component.name, component.nodes, tables)
    return ComponentRecord(component.name, component.nodes, tuple(tables), fingerprint)


@without_collecting
def _proved_bytes(manifest: Manifest, directory: str) -> bytes:
    """A manifest as bytes that have been read back, whole and as a head."""
    data = encode_manifest(manifest)
    decode_manifest(data, directory)
    decode_head(data[:HEAD_LIMIT_BYTES], directory)
    return data
