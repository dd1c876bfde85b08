"""`save_snapshot`: a save on every rank: describe, agree, plan, write, commit, clean up. Core decides which bytes go to which file.

`trainfold.save` is not here: it is `save` in `trainfold.backends.runs.api`, which checks its arguments and calls `save_snapshot`.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import attrs

from trainfold.backends.formats.native.writer import Writes, write_file
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.hold.hold import Hold
from trainfold.backends.hold.write_watch import LeafName
from trainfold.backends.library_versions import library_versions
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.ranks.left_out import texts_of_left_out, warn_of_left_out
from trainfold.backends.runs.alike.replicas import check_copies, descriptions
from trainfold.backends.runs.alike.stages import check_several, ruled, united_run
from trainfold.backends.runs.begin import begin_checkpoint
from trainfold.backends.runs.commit import (
    SaveResult,
    after_commit,
    clean_up,
    may_still_write,
    proved_bytes,
    write_index,
)
from trainfold.backends.runs.reuse.unchanged import refer_to_unchanged
from trainfold.backends.runs.scan import check_place
from trainfold.backends.runs.snapshot import Snapshot
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.os_errors import failures_elsewhere, named_failures
from trainfold.backends.stores.protocol import Store, glimpse, preference_of
from trainfold.core.component_names import selections_differ
from trainfold.core.data.batches_read import BatchesRead, batches_in_doubt
from trainfold.core.digest import digest_of
from trainfold.core.errors import place
from trainfold.core.format.codec import as_tensor
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.indexes.contributions import contributions_of
from trainfold.core.format.manifest import (
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
)
from trainfold.core.format.structure.outline import (
    Announcement,
    announcement_of,
    own_components,
    stored_by_earlier,
)
from trainfold.core.format.structure.united_contract import contract_digest
from trainfold.core.format.structure.validate import check_kinds
from trainfold.core.json_values import Json
from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference
from trainfold.core.layout.world import Collectives, World
from trainfold.core.save.file_layout import FilePlan, TensorPlacement
from trainfold.core.save.replicas import Proof, absent_optional
from trainfold.core.save.reuse.base import Base, base_from
from trainfold.core.save.save_plan import SavePlan, plan_save
from trainfold.core.save.written import WrittenFile, Wrote, incomplete_file, manifest_of, whole_manifest
from trainfold.core.state.parent_checkpoint import ParentCheckpoint

_LOG: Final = logging.getLogger("trainfold")
T = TypeVar("T")
_MANIFEST_ROOM_BYTES: Final = 2**20


@failures_elsewhere()
def save_snapshot(  # noqa: PLR0913 - keywords
    take: Callable[[], Snapshot],
    store: Store,
    *,
    collectives: Collectives,
    lock: bool = True,
    hold: Hold | None = None,
    descends_from: ParentCheckpoint | None = None,
    base: Base | None = None,
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
        base: what this rank has stored in a checkpoint of the run before, of which the unchanged leaves are not written again; None to write
            all of them.

    Returns:
        What was saved.

    Raises:
        RanksDisagree: on every rank, if something that must be equal on all ranks differs; nothing is written.
        SaveFailed: or its matching subclass (NoSpace, NotWritable, RunLocked, CommitConflict); SaveFailedElsewhere on the ranks that did not
            fail themselves.
    """
    snapshots: list[Snapshot] = []
    began = time.monotonic()
    try:
        result = _saved(
            take,
            store,
            snapshots,
            collectives=collectives,
            lock=lock,
            hold=hold,
            descends_from=descends_from,
            base=base,
        )
        return attrs.evolve(result, secs=time.monotonic() - began)
    except Exception as error:
        if snapshots:
            place(error, step=snapshots[0].step)
        raise


class _Announced(NamedTuple):
    """What a rank says of its state before a save: what it would announce, the digests of its copies, and the rest of its snapshot that counts."""

    said: Announcement
    summary: Mapping[str, str]
    optional: frozenset[str]
    left_out: Mapping[str, str]
    read: BatchesRead | None
    prefers: FilePreference | None


def _warn_of_batches(store: Store, told: Sequence[BatchesRead | None], collectives: Collectives) -> None:
    if collectives.rank == 0:
        for text in batches_in_doubt(told):
            _LOG.warning("%s: %s", store.url, text)


def _saved(  # noqa: PLR0913 - keywords
    take: Callable[[], Snapshot],
    store: Store,
    snapshots: list[Snapshot],
    *,
    collectives: Collectives,
    lock: bool,
    hold: Hold | None,
    descends_from: ParentCheckpoint | None,
    base: Base | None,
) -> SaveResult:
    """`save_snapshot`; appends this rank's snapshot to ``snapshots``."""
    world = World(collectives.rank, collectives.world_size)

    def announced() -> _Announced:
        mine = take()
        for name, each in mine.described.items():
            check_kinds(each.node, name)
        if collectives.world_size > 1 and mine.copies is None:
            mine = mine.with_copies(Proof())
        mine = attrs.evolve(mine, described=ruled(mine.described, world, mine.stage))
        snapshots.append(mine)
        announcement = announcement_of(mine.described, stage=mine.stage, contract=contract_digest(mine.contract))
        summary = {} if mine.copies is None else mine.summary()
        prefers = preference_of(store) if collectives.rank == 0 else None
        return _Announced(announcement, summary, mine.optional, mine.left_out, mine.read, prefers)

    gathered = on_all_ranks(collectives, announced, doing="describe its state")
    prefers = gathered[0].prefers or NO_PREFERENCE  # one for all ranks
    absent = absent_optional([each.said.digests for each in gathered], [each.optional for each in gathered])
    lacking = [
        {name: each.left_out.get(name, "does not exist") for name in sorted(absent - each.said.digests.keys())}
        for each in gathered
    ]
    warn_of_left_out(texts_of_left_out(lacking), collectives)
    _warn_of_batches(store, [each.read for each in gathered], collectives)
    snapshot = snapshots[0].without(absent)
    announcements = [each.said.without(absent) for each in gathered]
    snapshot, announcements = _united(snapshot, announcements, collectives)
    own = own_components(announcements, snapshot.described)
    snapshot = snapshot.stored_elsewhere(stored_by_earlier(announcements, collectives.rank, own))
    ranks = descriptions(snapshot.described, announcements, collectives)
    if snapshot.copies is not None:
        summaries = [_without(each.summary, absent) for each in gathered]
        check_copies(snapshot.copies, snapshot.contract, snapshot.settings, summaries, collectives)
    plans: list[SavePlan] = []
    old: list[bytes | None] = [None]  # on rank 0, which commits
    tensors: dict[str, Mapping[str, Any]] = {}
    with ExitStack() as locked:

        def planned() -> Head | None:
            # the plan of any revision, which is known once the run is locked
            plan = without_collecting(plan_save)(
                ranks, step=snapshot.step, of_rank_zero=snapshot.sent, only=collectives.rank, own=own, prefers=prefers
            )
            tensors.update(snapshot.tensors)
            if hold is not None:
                _read_in_order(hold, plan, snapshot, collectives.rank)
                tensors.update({name: hold.leaves_of(name) for name in tensors if name not in snapshot.own})
            if base is not None:
                plan = refer_to_unchanged(plan, base, tensors, store=store, rank=collectives.rank, hold=hold)
            plans.append(plan)
            return begin(plan) if collectives.rank == 0 else None

        def begin(plan: SavePlan) -> Head:
            with named_failures(store.url):
                if lock:
                    check_place(glimpse(store))  # before the lock, which is a file
                    locked.enter_context(store.lock())
                head, old[0] = begin_checkpoint(store, snapshot.step, descends_from=descends_from)
                # before any rank writes, and without asking the others for their sizes
                store.reserve(plan.whole_bytes + plan.world_size * _MANIFEST_ROOM_BYTES)
                return head

        head = on_all_ranks(collectives, planned, doing="plan its files, and begin a checkpoint")[0]
        assert head is not None, "rank 0 begins it"
        return run_save(
            plans[0].revised(head.revision),
            tensors,
            head=head,
            store=store,
            collectives=collectives,
            contract=snapshot.contract,
            omitted=snapshot.omitted,
            replaces=old[0],
            hold=hold,
            is_base=base is not None,
        )


def _read_in_order(hold: Hold, plan: SavePlan, snapshot: Snapshot, rank: int) -> None:
    """Name to the hold the order in which this rank will read its leaves, and which parts of them."""
    order: dict[LeafName, list[TensorPlacement]] = {}
    for file in plan.files_of(rank):
        for placed in file.tensors:
            if (component := file.component_of(placed.path)) not in snapshot.own:
                order.setdefault((component, placed.path), []).append(placed)
    parts = {
        name: (first.bytes_held[0], placed[-1].bytes_held[1])
        for name, placed in order.items()
        if (first := placed[0]).held is not None and not first.is_first_of_whole
    }
    hold.read_in_order(order, parts=parts)


def _check_written(hold: Hold, file: FilePlan, wrote: WrittenFile) -> None:
    """Compare what was written of each leaf with its bytes when the save was called."""
    digests: dict[str, dict[str, str]] = {name: {} for name in file.components}
    for placed, each in zip(file.tensors, wrote.parts, strict=True):
        if digest := each.digest if placed.held is None else each.whole:
            digests[file.component_of(placed.path)][placed.path] = digest
    for name, found in digests.items():
        hold.check_written(name, found)


def _united(
    snapshot: Snapshot, announced: list[Announcement], world: Collectives
) -> tuple[Snapshot, list[Announcement]]:
    """The snapshot with the stages of all ranks as one model, and what the ranks would have announced of that.

    Raises:
        RanksDisagree: if ranks have other components.
    """
    whole = united_run(snapshot.described, snapshot.contract, announced, world)
    if whole is None:
        differ = selections_differ("components", [list(each.digests) for each in announced])
        if differ is not None:
            raise differ
        return snapshot, announced
    check_several(whole.several, snapshot.tensors, world)
    return attrs.evolve(snapshot, described=whole.described, contract=whole.contract), whole.without_spread(announced)


def _without(each: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in each.items() if name not in names}


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
    is_base: bool = False,
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
        replaces: the bytes of the present manifest, if the step is saved again; rank 0 needs them.
        hold: what held leaves are read through. Before the commit each rank checks that its leaves did not change.
        is_base: whether the result has what the rank has stored, so that the next save can refer to it.

    Returns:
        What was saved; the same on every rank, but for the sizes of the files, which rank 0 has.

    Raises:
        SaveFailed: or its matching subclass. Rank 0 removes what was written, and a checkpoint that was there before stays whole. If a rank
            has died, the files stay until the step is saved again or retention removes them.
        RankFailed: on the other ranks.
    """
    data, files = b"", dict[str, int]()
    directory, rank = plan.directory, collectives.rank
    mine: list[Manifest] = []
    seen = glimpse(store, directory)  # looks when all has been written

    def write() -> Wrote:
        with Writes(store) as writes:
            wrote = write_files(writes)
            writes.finish()
        return wrote

    def write_files(writes: Writes) -> Wrote:
        records = {}
        for file in plan.files_of(rank):
            held = {
                path: leaf if isinstance(leaf, HeldLeaf) else as_tensor(leaf, path)
                for name in file.components
                for path, leaf in tensors[name].items()
            }
            wrote = records[file.name] = write_file(file, held, store=writes, directory=plan.directory)
            if hold is not None:
                _check_written(hold, file, wrote)
        if hold is not None:
            hold.check_unchanged()
        manifest = without_collecting(manifest_of)(
            plan, records, rank=rank, head=head, contract=contract, omitted=omitted, versions=library_versions()
        )
        mine.append(manifest)
        contributions = {each.name: contributions_of(each, manifest, [rank])[rank] for each in manifest.components}
        return Wrote(manifest.files, write_index(manifest, plan, writes, rank), contributions)

    def commit() -> tuple[int, dict[str, str]]:
        nonlocal data
        manifest = without_collecting(whole_manifest)(mine[0], written)
        records: list[FileRecord | IndexRecord] = [*manifest.files, *manifest.indexes]
        with named_failures(f"{store.url}/{directory}"):
            names = [each.path(directory) for each in records]
            sizes = side_by_side([partial(seen.size, name) for name in names])
            error = incomplete_file(records, store.url, directory, dict(zip(names, sizes, strict=True)))
            if error is not None:
                raise error
            files.update({each.path(directory): each.size_bytes for each in records})
        data = proved_bytes(manifest, plan.directory)
        store.commit(f"{plan.directory}/{MANIFEST}", data, replaces=None if replaces is None else digest_of(replaces))
        after_commit(manifest, plan, store, seen)
        return manifest.size_bytes, {component.name: component.fingerprint for component in manifest.components}

    try:
        written = on_all_ranks(collectives, write, doing="write its files")
        size_bytes, fingerprints = on_rank_zero(collectives, commit, doing="commit the checkpoint", is_vote=True)
    except BaseException as error:
        if collectives.rank == 0 and not may_still_write(error):
            clean_up(plan, data, store)
        raise
    return SaveResult(
        store.url, directory, head.step, head.timeline, size_bytes, fingerprints, head.forks, head.run_id, omitted, files,
        base_from(mine[0], directory, rank) if is_base else None,
    )  # fmt: skip
