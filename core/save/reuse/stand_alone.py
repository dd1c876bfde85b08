"""`plan_alone`: how a checkpoint that refers to others is written again, so that it stands alone: the next revision of its step, with the same contents."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.format.manifest import (
    ComponentRecord,
    FileRecord,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
)
from trainfold.core.format.upgrade import PLAIN_VERSION
from trainfold.core.layout.replica_shares import Piece
from trainfold.core.layout.slices import Box
from trainfold.core.save.file_layout import FilePlan, plan_file
from trainfold.core.save.pruning import LEFT_BEHIND, Pruning
from trainfold.core.save.reuse.referred import is_needed_alone
from trainfold.core.save.save_plan import data_file_name, suffix_of


@final
@attrs.frozen
class Source:
    """Where the bytes of a part of a tensor are.

    Attributes:
        name: the file, by its name in the run.
        start: the first byte.
        stop: one past the last.
        digest: of them.
    """

    name: str
    start: int
    stop: int
    digest: str


@final
@attrs.frozen
class AlonePlan:
    """What is written so that a checkpoint stands alone.

    Attributes:
        directory: of the checkpoint.
        files: the data files.
        sources: for each of them, in the order of its tensors, where their bytes are.
        suffix: of the names of its indexes.
        manifest: with these files, as long as their digests are not known without them, and without indexes.
    """

    directory: str
    files: tuple[FilePlan, ...]
    sources: tuple[tuple[Source, ...], ...]
    suffix: str
    manifest: Manifest = attrs.field(repr=False)

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size_bytes for file in self.files)

    def done(self, digests: Mapping[str, str], indexes: tuple[IndexRecord, ...] = ()) -> Manifest:
        """The manifest that is committed.

        Args:
            digests: the name of each data file -> its digest.
            indexes: those of ranks that have a file of their own for it.
        """
        files = tuple(attrs.evolve(file, digest=digests[file.name]) for file in self.manifest.files)
        return attrs.evolve(self.manifest, files=files, indexes=indexes)


def plan_alone(manifest: Manifest, directory: str) -> AlonePlan:
    """Plan how a checkpoint is written again without references.

    Law: the new manifest says of each tensor what the old one says, but for where its bytes are; and every byte is copied once.

    Args:
        manifest: of the checkpoint, with the shards of all ranks.
        directory: of the checkpoint.
    """
    head = attrs.evolve(manifest.head, revision=manifest.head.revision + 1, schema_version=PLAIN_VERSION)
    suffix = suffix_of(head.revision)
    plans, sources, records = list[FilePlan](), list[tuple[Source, ...]](), list[FileRecord]()
    places: dict[tuple[str, int, str, Box], tuple[int, int, int]] = {}
    for component in manifest.components:
        for rank, found in sorted(_by_writer(component, manifest).items()):
            name = data_file_name(component.name, rank, manifest.world_size, suffix)
            file = plan_file(
                name,
                component.name,
                rank,
                [Piece(record.path, record.spec, shard.box) for record, shard in found.values()],
            )
            taken = []
            for placed in file.tensors:
                _, shard = found[placed.path, placed.box]
                taken.append(Source(manifest.files[shard.file].path(directory), shard.start, shard.stop, shard.digest))
                places[component.name, rank, placed.path, placed.box] = len(plans), placed.start, placed.stop
            plans.append(file)
            sources.append(tuple(taken))
            records.append(FileRecord(name, component.name, rank, file.size_bytes, ""))

    def moved(component: ComponentRecord) -> ComponentRecord:
        tables = tuple(tuple(record_of(component.name, record) for record in table) for table in component.tensors)
        return attrs.evolve(component, tensors=tables)

    def record_of(name: str, record: TensorRecord) -> TensorRecord:
        shards = []
        for shard in record.shards:
            place = places[name, manifest.files[shard.file].rank, record.path, shard.box]
            shards.append(ShardRecord(*place, shard.box, shard.digest, shard.pieces, shard.whole))
        return attrs.evolve(record, shards=tuple(shards))

    components = tuple(map(moved, manifest.components))
    new = attrs.evolve(manifest, head=head, components=components, files=tuple(records), indexes=())
    return AlonePlan(directory, tuple(plans), tuple(sources), suffix, new)


def _by_writer(
    component: ComponentRecord, manifest: Manifest
) -> dict[int, dict[tuple[str, Box], tuple[TensorRecord, ShardRecord]]]:
    """Rank -> what it has written of a component, by path and box, in the order of its table."""
    found: dict[int, dict[tuple[str, Box], tuple[TensorRecord, ShardRecord]]] = {}
    for record in (record for table in component.tensors for record in table):
        for shard in record.shards:
            found.setdefault(manifest.files[shard.file].rank, {})[record.path, shard.box] = record, shard
    return found


def to_stand_alone(plan: Pruning) -> tuple[str, ...]:
    """The checkpoints that stay for a reason of their own and refer to others, newest first.

    Args:
        plan: what stays and what goes.
    """
    behind = {name: (why,) for name, why in plan.left_alone.items() if why == LEFT_BEHIND}
    kept = {**plan.lineage.kept, **plan.left_behind.kept, **behind}
    chosen = (name for name, why in kept.items() if name in plan.refers and not all(map(is_needed_alone, why)))
    return tuple(sorted(chosen, reverse=True))
