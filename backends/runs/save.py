"""`save_snapshot`: a save on every rank: describe, agree, plan, write, commit, clean up. Core decides which bytes go to which file.

`trainfold.save` is not here: it is `save` in `trainfold.backends.runs.api`, which checks its arguments and calls `save_snapshot`.
"""

import logging
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib import metadata
from typing import Any, Final, TypeVar, final

import attrs
import numpy as np
import torch

from trainfold.backends.formats.native.writer import write_file
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.replicas import check_copies, descriptions
from trainfold.backends.runs.scan import check_place, read_inventory, read_run_id
from trainfold.backends.runs.snapshot import Snapshot
from trainfold.backends.stores.os_errors import failures_elsewhere, named_failures
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import CommitConflict, InvalidArgument, RankFailed, SaveFailed, TrainfoldError, place
from trainfold.core.format.codec import as_tensor
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, directory_of, index_name
from trainfold.core.format.indexes.contributions import contribution_of
from trainfold.core.format.manifest import (
    HEAD_LIMIT_BYTES,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    encode_index,
    encode_manifest,
)
from trainfold.core.format.manifest_reader import check_root, decode_head
from trainfold.core.format.run_file import run_document
from trainfold.core.format.structure.outline import Announcement, announcement_of, by_rule, own_components
from trainfold.core.format.structure.validate import check_kinds
from trainfold.core.history.next_checkpoint import next_checkpoint
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.world import Collectives, World
from trainfold.core.save.replicas import Proof, absent_optional, summary
from trainfold.core.save.save_plan import SavePlan, plan_save
from trainfold.core.save.written import Wrote, incomplete_file, manifest_of, of_this_save, stale_files, whole_manifest
from trainfold.core.state.parent_checkpoint import ParentCheckpoint

T = TypeVar("T")
_LOG: Final = logging.getLogger("trainfold")
_MANIFEST_ROOM_BYTES: Final = 2**20


@final
@attrs.frozen
class SaveResult:
    """What a save did.

    Attributes:
        run: the location of the run.
        checkpoint: the directory.
        step: the step.
        timeline: the timeline that the checkpoint belongs to.
        size_bytes: the size of its data files.
        fingerprints: component -> digest.
        forks: the points at which its lineage left earlier timelines, as (timeline, step).
        run_id: the id of the run.
        omitted: components that the run has and that were not saved.
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
    def descent(self) -> ParentCheckpoint:
        """The descent of a state that continues from this checkpoint."""
        return ParentCheckpoint(self.timeline, self.step, self.forks)


def library_versions() -> dict[str, str]:
    """The versions that a manifest records.

    Examples:
        >>> sorted(library_versions())
        ['numpy', 'torch', 'trainfold']
    """
    return {"trainfold": _own_version(), "torch": torch.__version__, "numpy": np.__version__}


@cache
def _own_version() -> str:
    """The version of the running code, read once: another version may be installed while it runs."""
    return metadata.version("trainfold")


@failures_elsewhere()
def save_snapshot(  # noqa: PLR0913 - keywords
    take: Callable[[], Snapshot],
    store: Store,
    *,
    collectives: Collectives,
    lock: bool = True,
    hold: Hold | None = None,
    descends_from: ParentCheckpoint | None = None,
) -> SaveResult:
    """Save a snapshot; it is durable and checked on return.

    Args:
        take: returns this rank's snapshot. If it raises, every rank raises.
        store: the run.
        collectives: the world; every rank calls.
        lock: False if the caller holds the run's lock already.
        hold: what the tensors are read through; None to read them directly.
        descends_from: the checkpoint that the state was loaded from or saved as last; None if unknown, so that the steps decide. The value
            of rank 0 counts.

    Returns:
        What was saved.

    Raises:
        RanksDisagree: on every rank, if something that must be equal on all ranks differs; nothing is written.
        SaveFailed: or its matching subclass (NoSpace, NotWritable, RunLocked, CommitConflict); SaveFailedElsewhere on the ranks that did not
            fail themselves.
    """
    snapshots: list[Snapshot] = []
    try:
        return _saved(
            take, store, snapshots, collectives=collectives, lock=lock, hold=hold, descends_from=descends_from
        )
    except Exception as error:
        if snapshots:
            place(error, step=snapshots[0].step)
        raise


def _saved(  # noqa: PLR0913 - keywords
    take: Callable[[], Snapshot],
    store: Store,
    snapshots: list[Snapshot],
    *,
    collectives: Collectives,
    lock: bool,
    hold: Hold | None,
    descends_from: ParentCheckpoint | None,
) -> SaveResult:
    """`save_snapshot`; appends this rank's snapshot to ``snapshots``."""
    world = World(collectives.rank, collectives.world_size)

    def announced() -> tuple[Announcement, Mapping[str, str], frozenset[str]]:
        mine = take()
        for name, each in mine.described.items():
            check_kinds(each.node, name)
        if collectives.world_size > 1 and mine.copies is None:
            mine = mine.with_copies(Proof())
        mine = attrs.evolve(mine, described={name: by_rule(each, world) for name, each in mine.described.items()})
        snapshots.append(mine)
        copies = {} if mine.copies is None else summary(mine.copies, mine.contract)
        return announcement_of(mine.described), copies, mine.optional

    gathered = on_all_ranks(collectives, announced, doing="describe its state")
    absent = absent_optional([each.digests for each, _, _ in gathered], [names for _, _, names in gathered])
    if absent and collectives.rank == 0:
        _LOG.warning("%s: optional components that not all ranks have are left out: %s", store.url, sorted(absent))
    snapshot = snapshots[0].without(absent)
    announcements = [each.without(absent) for each, _, _ in gathered]
    ranks = descriptions(snapshot.described, announcements, collectives)
    with ExitStack() as locked:

        def begin() -> tuple[Head, bytes | None]:
            with named_failures(store.url):
                check_place(store)  # before the lock, which is a file
                if lock:
                    locked.enter_context(store.lock())
                return begin_checkpoint(store, snapshot.step, descends_from=descends_from)

        head, old = on_rank_zero(collectives, begin, doing="begin a checkpoint")
        plan = without_collecting(plan_save)(
            ranks,
            step=snapshot.step,
            revision=head.revision,
            of_rank_zero=snapshot.sent,
            only=collectives.rank,
            own=own_components(announcements, snapshot.described),
        )
        if snapshot.copies is not None:
            summaries = [_without(each, absent) for _, each, _ in gathered]
            check_copies(snapshot.copies, snapshot.contract, summaries, collectives)
        sizes = collectives.gather(plan.size_bytes, doing="plan its files", is_vote=True)
        on_rank_zero(
            collectives,
            lambda: store.reserve(sum(sizes) + len(sizes) * _MANIFEST_ROOM_BYTES),
            doing="reserve room for the files",
        )
        tensors = snapshot.tensors
        if hold is not None:
            mine = [file for file in plan.files_of(collectives.rank) if file.component not in snapshot.own]
            hold.read_in_order((file.component, placed.path) for file in mine for placed in file.tensors)
            tensors = {
                name: leaves if name in snapshot.own else hold.leaves_of(name)
                for name, leaves in snapshot.tensors.items()
            }
        return run_save(
            plan,
            tensors,
            head=head,
            store=store,
            collectives=collectives,
            contract=snapshot.contract,
            omitted=snapshot.omitted,
            replaces=old,
            hold=hold,
        )


def _without(each: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in each.items() if name not in names}


def begin_checkpoint(
    store: Store, step: int, *, descends_from: ParentCheckpoint | None = None
) -> tuple[Head, bytes | None]:
    """Create the run if it is new, and choose the identity of its next checkpoint. The caller holds the run's lock.

    Args:
        store: the store whose lock the caller holds.
        step: the step of the state to save.
        descends_from: what that state was loaded from; None if unknown, so that the steps decide.

    Returns:
        The head of the checkpoint: which run it belongs to, and what it follows. And the bytes of the manifest that it replaces, if the
        step was saved before.

    Raises:
        InvalidArgument: if ``store`` is not a store.
        SaveFailed: if the run cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> head, replaced = begin_checkpoint(MemoryStore(), 120)
        >>> head.step, replaced
        (120, None)
    """
    if not isinstance(store, Store):
        raise InvalidArgument("store", expected="the store whose lock you hold", found=shown(store),
                              fix="make it with trainfold.LocalStore(directory), and call this inside store.lock()")  # fmt: skip
    run_id = read_run_id(store)
    if run_id is None:
        check_place(store)
        with suppress(CommitConflict):  # another process made the run meanwhile, and its id counts
            store.commit(RUN_FILE, run_document(uuid.uuid4().hex))
        run_id = read_run_id(store)
    assert run_id is not None  # it was committed just now
    inventory = read_inventory(store)
    if inventory.problem is not None:  # such as a directory that could not be listed: its checkpoints are not known
        problem = inventory.problem
        raise SaveFailed(problem.where, expected=problem.expected, found=problem.found, fix=problem.fix)
    name = f"{directory_of(step)}/{MANIFEST}"
    size = store.size(name)
    files = [] if size is None else store.list(directory_of(step))
    old = None if size is None else store.read(name, start=0, stop=size)
    return next_checkpoint(inventory, run_id, step, files=files, descends_from=descends_from), old


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
    """Write the files of a plan and commit the checkpoint. The caller holds the run's lock on rank 0.

    Args:
        plan: with the files of this rank.
        tensors: component -> path -> this rank's tensor leaf, or a held leaf.
        head: identity and order of the new checkpoint.
        store: the run.
        collectives: the world; every rank calls.
        contract: the resume contract.
        omitted: components that the state has and the plan does not.
        replaces: the bytes of the present manifest, if the step is saved again.
        hold: what held leaves are read through. Before the commit each rank checks that its leaves did not change.

    Returns:
        What was saved; the same on every rank.

    Raises:
        SaveFailed: or its matching subclass. Rank 0 removes what was written, and a checkpoint that was there before stays whole. If a rank
            has died, the files stay until the step is saved again or retention removes them.
        RankFailed: on the other ranks.
    """
    data = b""
    url, rank = f"{store.url}/{plan.directory}", collectives.rank
    mine: list[Manifest] = []

    def write() -> Wrote:
        records = {}
        for file in plan.files_of(rank):
            held = {
                path: leaf if isinstance(leaf, HeldLeaf) else as_tensor(leaf, path)
                for path, leaf in tensors[file.component].items()
            }
            records[file.name] = write_file(file, held, store=store, directory=plan.directory)
            if hold is not None:
                hold.check_written(file.component, records[file.name].tensor_digests)
        if hold is not None:
            hold.check_unchanged()
        manifest = without_collecting(manifest_of)(
            plan, records, rank=rank, head=head, contract=contract, omitted=omitted, versions=library_versions()
        )
        mine.append(manifest)
        contributions = {each.name: contribution_of(each, manifest, rank) for each in manifest.components}
        return Wrote(manifest.files, _write_index(manifest, plan, store, rank) if rank else None, contributions)

    def commit() -> tuple[int, dict[str, str]]:
        nonlocal data
        manifest = without_collecting(whole_manifest)(mine[0], written)
        records: list[FileRecord | IndexRecord] = [*manifest.files, *manifest.indexes]
        with named_failures(url):
            error = incomplete_file(
                records, url, {each.name: store.size(f"{plan.directory}/{each.name}") for each in records}
            )
            if error is not None:
                raise error
        data = _proved_bytes(manifest, plan.directory)
        store.commit(f"{plan.directory}/{MANIFEST}", data, replaces=None if replaces is None else digest_of(replaces))
        _after_commit(manifest, plan, store)
        return manifest.size_bytes, {component.name: component.fingerprint for component in manifest.components}

    try:
        written = on_all_ranks(collectives, write, doing="write its files")
        size_bytes, fingerprints = on_rank_zero(collectives, commit, doing="commit the checkpoint", is_vote=True)
    except BaseException as error:
        if collectives.rank == 0 and not _may_still_write(error):
            _clean_up(plan, data, store)
        raise
    return SaveResult(
        store.url, plan.directory, head.step, head.timeline, size_bytes, fingerprints, head.forks, head.run_id, omitted
    )  # fmt: skip


def _may_still_write(error: BaseException) -> bool:
    """Whether another rank may still be writing: it has gone without a report, and a rank that only hangs looks the same.

    Its files are then left to the next save of the step, or to retention.
    """
    return isinstance(error, RankFailed) and error.rank is None


def _clean_up(plan: SavePlan, data: bytes, store: Store) -> None:
    """Remove the files of a failed save on all ranks, unless its manifest is visible: then it is a whole checkpoint.

    Only the committer calls this. It alone knows whether it has committed, and it holds the run's lock. To another rank, a committer that
    died before the commit and one that died after it look the same.

    The absence of the manifest must be durable before its files are deleted. Otherwise a crash could leave a manifest without files.
    """
    manifest = f"{plan.directory}/{MANIFEST}"
    try:
        if data:
            if store.size(manifest) is None:
                store.delete(manifest)  # makes the absence durable
            elif store.read(manifest) == data:
                return
    except (TrainfoldError, OSError):
        return
    with suppress(TrainfoldError, OSError):
        for name in of_this_save(plan, store.list(plan.directory)):
            with suppress(TrainfoldError, OSError):
                store.delete(f"{plan.directory}/{name}")


def _after_commit(manifest: Manifest, plan: SavePlan, store: Store) -> None:
    """Point `latest` to the checkpoint and delete stale files. The checkpoint is durable, so failures here are ignored."""
    with suppress(TrainfoldError, OSError):
        store.point("latest", plan.directory)
        for stale in stale_files(manifest, store.list(plan.directory)):
            with suppress(TrainfoldError, OSError):  # a sidecar's directory, which is deleted with the checkpoint
                store.delete(f"{plan.directory}/{stale}")


@without_collecting
def _proved_bytes(manifest: Manifest, directory: str) -> bytes:
    """The bytes of a manifest, after both readers have accepted them."""
    data = encode_manifest(manifest)
    check_root(data, directory)
    decode_head(data[:HEAD_LIMIT_BYTES], directory)
    return data


def _write_index(manifest: Manifest, plan: SavePlan, store: Store, rank: int) -> IndexRecord | None:
    """Write the index of a rank, if it wrote anything or has anything of its own."""
    if not manifest.files and not any(each.is_own for each in manifest.components):
        return None
    data = without_collecting(encode_index)(manifest, rank)
    name = index_name(rank, plan.world_size, plan.suffix)
    store.write(f"{plan.directory}/{name}", [data], size_bytes=len(data))
    return IndexRecord(name, rank, len(data), digest_of(data))
