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
from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference
from trainfold.core.layout.replica_shares import Piece
from trainfold.core.layout.slices import Box
from trainfold.core.save.file_layout import FilePlan
from trainfold.core.save.pruning import LEFT_BEHIND, Pruning
from trainfold.core.save.reuse.referred import is_needed_alone
from trainfold.core.save.save_plan import files_of_parts, suffix_of
from trainfold.core.save.written import version_of


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


def plan_alone(manifest: Manifest, directory: str, prefers: FilePreference = NO_PREFERENCE) -> AlonePlan:
    """Plan how a checkpoint is written again without references.

    Law: the new manifest says of each tensor what the old one says, but for where its bytes are; and every byte is copied once.

    Args:
        manifest: of the checkpoint, with the shards of all ranks.
        directory: of the checkpoint.
        prefers: the files that the store prefers.
    """
    suffix = suffix_of(manifest.head.revision + 1)
    parts, held = [], dict[tuple[int, str, Box], ShardRecord]()
    for component in manifest.components:
        for rank, found in sorted(_by_writer(component, manifest).items()):
            parts.append(
                (component.name, rank, [Piece(record.path, record.spec, shard.box) for record, shard in found])
            )
            held |= {(rank, record.path, shard.box): shard for record, shard in found}
    plans = files_of_parts(parts, manifest.world_size, suffix, prefers)
    places: dict[tuple[int, str, Box], tuple[int, int, int]] = {}
    sources = []
    for number, file in enumerate(plans):
        keys = [(file.rank, placed.path, placed.box) for placed in file.tensors]
        sources.append(tuple(_source(held[key], manifest, directory) for key in keys))
        bounds = ((number, placed.start, placed.stop) for placed in file.tensors)
        places |= dict(zip(keys, bounds, strict=True))
    records = tuple(FileRecord(file.name, file.components, file.rank, file.size_bytes, "") for file in plans)

    def moved(component: ComponentRecord) -> ComponentRecord:
        tables = tuple(tuple(map(record_of, table)) for table in component.tensors)
        return attrs.evolve(component, tensors=tables)

    def record_of(record: TensorRecord) -> TensorRecord:
        shards = []
        for shard in record.shards:
            place = places[manifest.files[shard.file].rank, record.path, shard.box]
            shards.append(ShardRecord(*place, shard.box, shard.digest, shard.pieces, shard.whole))
        return attrs.evolve(record, shards=tuple(shards))

    components = tuple(map(moved, manifest.components))
    head = attrs.evolve(manifest.head, revision=manifest.head.revision + 1, schema_version=version_of(records))
    new = attrs.evolve(manifest, head=head, components=components, files=records, indexes=())
    return AlonePlan(directory, tuple(plans), tuple(sources), suffix, new)


def _by_writer(component: ComponentRecord, manifest: Manifest) -> dict[int, list[tuple[TensorRecord, ShardRecord]]]:
    """Rank -> what it has written of a component, in the order of its table."""
    found: dict[int, list[tuple[TensorRecord, ShardRecord]]] = {}
    for record in (record for table in component.tensors for record in table):
        for shard in record.shards:
            found.setdefault(manifest.files[shard.file].rank, []).append((record, shard))
    return found


def _source(shard: ShardRecord, manifest: Manifest, directory: str) -> Source:
    return Source(manifest.files[shard.file].path(directory), shard.start, shard.stop, shard.digest)


def to_stand_alone(plan: Pruning) -> tuple[str, ...]:
    """The checkpoints that stay for a reason of their own and refer to others, newest first.

    Args:
        plan: what stays and what goes.
    """
    behind = {name: (why,) for name, why in plan.left_alone.items() if why == LEFT_BEHIND}
    kept = {**plan.lineage.kept, **plan.left_behind.kept, **behind}
    chosen = (name for name, why in kept.items() if name in plan.refers and not all(map(is_needed_alone, why)))
    return tuple(sorted(chosen, reverse=True))
