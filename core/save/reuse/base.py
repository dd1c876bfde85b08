"""`Base`: what a rank has stored in the checkpoint before, and which leaves of a new save may be the same."""

from collections.abc import Collection, Mapping
from typing import Final, final

import attrs

from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.manifest import FileRecord, Manifest, ShardRecord
from trainfold.core.layout.slices import Box
from trainfold.core.save.file_layout import FilePlan, TensorPlacement
from trainfold.core.save.save_plan import SavePlan

LEAST_BYTES: Final = 2**14
"""A smaller leaf is written again: a reference makes a whole checkpoint stay."""


@final
@attrs.frozen
class StoredLeaf:
    """What a rank has stored of a leaf.

    Attributes:
        dtype: of the leaf.
        shape: of all of it.
        shards: box -> its file, with the checkpoint that it belongs to, and where it lies there.
    """

    dtype: str
    shape: tuple[int, ...]
    shards: Mapping[Box, tuple[FileRecord, ShardRecord]]


@final
@attrs.frozen
class Base:
    """What a rank has stored in a checkpoint, there or in those that it refers to.

    Attributes:
        world_size: the ranks that saved it; 0 for no checkpoint.
        leaves: (component, leaf path) -> what the rank has stored of it.
    """

    world_size: int
    leaves: Mapping[tuple[str, str], StoredLeaf] = attrs.field(repr=False)


NO_BASE: Final = Base(0, {})
"""Of the first save of a run."""


def base_from(manifest: Manifest, directory: str, rank: int) -> Base:
    """What a rank has stored in a checkpoint.

    Args:
        manifest: with at least the shards of the rank.
        directory: of the checkpoint.
        rank: the rank.
    """
    files = [attrs.evolve(file, checkpoint=file.checkpoint or directory) for file in manifest.files]
    leaves = {}
    for component in manifest.components:
        part = rank if component.is_own else 0
        for record in component.tensors[part] if part < len(component.tensors) else ():
            mine = {shard.box: (files[shard.file], shard) for shard in record.shards if files[shard.file].rank == rank}
            if mine:
                leaves[component.name, record.path] = StoredLeaf(record.dtype, record.shape, mine)
    return Base(manifest.world_size, leaves)


@final
@attrs.frozen
class Candidate:
    """A leaf that a rank may refer to, if it holds the same bytes as before.

    Attributes:
        component: of the leaf.
        path: of the leaf.
        parts: for each part that the rank would write: where it would lie, the file that has it, and the shard there.
    """

    component: str
    path: str
    parts: tuple[tuple[TensorPlacement, FileRecord, ShardRecord], ...]

    @property
    def files(self) -> frozenset[FileRecord]:
        """The files that it would refer to."""
        return frozenset(file for _, file, _ in self.parts)


def candidates(plan: SavePlan, base: Base, rank: int, *, least_bytes: int = LEAST_BYTES) -> list[Candidate]:
    """The leaves that may be the same as before: the rank writes the same parts of them, of the same dtype and shape.

    Args:
        plan: with the files of the rank.
        base: of the rank.
        rank: the rank.
        least_bytes: of what a rank writes of a leaf; less is written again.
    """
    if base.world_size != plan.world_size:
        return []
    shapes = {(each.name, path): spec.shape for each in plan.components for path, spec in each.tensors.items()}
    found = []
    for file in plan.files_of(rank):
        for path, parts in _by_leaf(file).items():
            component = file.component_of(path)
            stored = base.leaves.get((component, path))
            size = sum(placed.stop - placed.start for placed in parts)
            if stored is None or size < least_bytes or stored.shape != shapes[component, path]:
                continue
            pairs = [stored.shards.get(placed.box) for placed in parts]
            each = [(placed, *pair) for placed, pair in zip(parts, pairs, strict=True) if pair is not None]
            if len(each) == len(parts) and all(
                placed.dtype == stored.dtype
                and before.checkpoint != plan.directory
                and shard.stop - shard.start == placed.stop - placed.start
                for placed, before, shard in each
            ):
                found.append(Candidate(component, path, tuple(each)))
    return found


def there(found: Collection[Candidate], sizes: Mapping[str, int | None]) -> list[Candidate]:
    """The candidates whose files are there in their sizes, in checkpoints that are: files that have lost their manifest can be read, and not copied.

    Args:
        found: from `candidates`.
        sizes: the name of each of `needed_files` in the run -> its size; None if there is no such file.
    """
    return [
        each
        for each in found
        if all(
            sizes[file.path(file.checkpoint)] == file.size_bytes and sizes[f"{file.checkpoint}/{MANIFEST}"] is not None
            for file in each.files
        )
    ]


def needed_files(found: Collection[Candidate]) -> list[str]:
    """The names, in the run, of the files that candidates refer to, and of the manifests of their checkpoints."""
    files = {file for each in found for file in each.files}
    return sorted({file.path(file.checkpoint) for file in files} | {f"{file.checkpoint}/{MANIFEST}" for file in files})


def _by_leaf(file: FilePlan) -> dict[str, list[TensorPlacement]]:
    found: dict[str, list[TensorPlacement]] = {}
    for placed in file.tensors:
        found.setdefault(placed.path, []).append(placed)
    return found
