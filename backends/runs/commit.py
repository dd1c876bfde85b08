"""The end of a save: what it did, the manifest that is committed, and what is cleaned up after a failure."""

from collections.abc import Mapping
from contextlib import suppress
from typing import final

import attrs

from trainfold.backends.formats.native.writer import Writes
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.scan import listed_run
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import RankFailed, TrainfoldError
from trainfold.core.format.file_names import MANIFEST, can_be_referred_to, index_name
from trainfold.core.format.manifest import (
    HEAD_LIMIT_BYTES,
    INLINE_BYTES,
    IndexRecord,
    Manifest,
    encode_index,
    encode_manifest,
)
from trainfold.core.format.manifest_reader import check_root, decode_first_line
from trainfold.core.save.reuse.base import Base
from trainfold.core.save.save_plan import SavePlan
from trainfold.core.save.written import of_this_save, stale_files
from trainfold.core.state.parent_checkpoint import ParentCheckpoint


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
        omitted: components that the run has and that the selection leaves out. An optional one that could not be saved is not among them.
        files: on the committer, the size of each file that the manifest names, by its name in the run, and which was there at the commit; empty on
            other ranks.
        base: what this rank has stored, if the next save may refer to it.
        secs: how long it took on this rank.
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
    files: Mapping[str, int] = attrs.field(factory=dict, repr=False, eq=False)
    base: Base | None = attrs.field(default=None, repr=False, eq=False)
    secs: float = attrs.field(default=0.0, repr=False, eq=False)

    @property
    def descent(self) -> ParentCheckpoint:
        """The descent of a state that continues from this checkpoint."""
        return ParentCheckpoint(self.timeline, self.step, self.forks)


def may_still_write(error: BaseException) -> bool:
    """Whether another rank may still be writing: it has gone without a report, and a rank that only hangs looks the same.

    Its files are then left to the next save of the step, or to retention.
    """
    return isinstance(error, RankFailed) and not error.has_reported


def clean_up(plan: SavePlan, data: bytes, store: Store) -> None:
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


def after_commit(manifest: Manifest, plan: SavePlan, store: Store, seen: Store) -> None:
    """Point `latest` to the checkpoint and delete stale files. The checkpoint is durable, so failures here are ignored.

    Args:
        manifest: what was committed.
        plan: of the save.
        store: the run.
        seen: the same, where the files of the checkpoint are listed already.
    """
    with suppress(TrainfoldError, OSError):
        store.point("latest", plan.directory)
        delete_stale(manifest, plan.directory, store, seen)


def delete_stale(manifest: Manifest, directory: str, store: Store, seen: Store | None = None) -> None:
    """Delete what the manifest of a checkpoint does not name. Failures are ignored.

    Data files of earlier revisions stay if another checkpoint refers to this directory.
    """
    with suppress(TrainfoldError, OSError):
        stale = stale_files(manifest, (seen or store).list(directory))
        if stale and listed_run(store).refers_to(directory):
            stale = tuple(name for name in stale if not can_be_referred_to(directory, name))
        for name in stale:
            with suppress(TrainfoldError, OSError):  # a sidecar's directory, which is deleted with the checkpoint
                store.delete(f"{directory}/{name}")


@without_collecting
def proved_bytes(manifest: Manifest, directory: str) -> bytes:
    """The bytes of a manifest, after both readers have accepted them."""
    data = encode_manifest(manifest)
    check_root(data, directory)
    decode_first_line(data[:HEAD_LIMIT_BYTES], directory)
    return data


def write_index(manifest: Manifest, plan: SavePlan, store: Writes, rank: int) -> IndexRecord | None:
    """Write the index of a rank, if it wrote anything or has anything of its own; that of rank 0 is in the root, unless it is large."""
    if plan.world_size == 1 or not (manifest.files or any(each.is_own for each in manifest.components)):
        return None
    data = without_collecting(encode_index)(manifest, rank)
    if rank == 0 and len(data) <= INLINE_BYTES:
        return None
    name = index_name(rank, plan.world_size, plan.suffix)
    store.write(f"{plan.directory}/{name}", [data], size_bytes=len(data))
    return IndexRecord(name, rank, len(data), digest_of(data))
