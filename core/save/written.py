"""`manifest_of`: the manifest of a save, from its plan and the digests of the files written by all ranks; and what its directory must hold."""

from collections.abc import Iterable, Mapping
from typing import final

import attrs

from trainfold.core.errors import SaveFailed
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import recorded_fingerprint
from trainfold.core.format.manifest import ComponentRecord, FileRecord, Head, Manifest, ShardRecord, TensorRecord
from trainfold.core.json_values import Json
from trainfold.core.layout.slices import Box
from trainfold.core.save.save_plan import ComponentPlan, SavePlan


@final
@attrs.frozen
class WrittenFile:
    """A file that was written.

    Attributes:
        name: a single path component.
        size_bytes: the size of the whole file.
        digest: the digest of the whole file; after its prefix it is what ``xxhsum -H2`` prints.
        tensor_digests: leaf path -> digest of the bytes of the tensor, equal to the `leaf_digest` of the leaf.
    """

    name: str
    size_bytes: int
    digest: str
    tensor_digests: Mapping[str, str]


def manifest_of(  # noqa: PLR0913 - keywords, one for each part of a manifest
    plan: SavePlan,
    written: Mapping[str, WrittenFile],
    *,
    head: Head,
    contract: Mapping[str, Json],
    omitted: tuple[str, ...],
    versions: Mapping[str, str],
) -> Manifest:
    """The manifest of a save.

    Args:
        plan: the plan of the save.
        written: file name -> the file, for the files of all ranks.
        head: identity and order of the checkpoint.
        contract: what must be equal at a resume.
        omitted: components that the state has and the plan does not.
        versions: library -> its version.
    """
    is_per_rank = {component.name: len(component.nodes) > 1 for component in plan.components}
    files = []
    shards: dict[tuple[str, int, str], list[ShardRecord]] = {}
    for index, file in enumerate(plan.files):
        found = written[file.name]
        files.append(FileRecord(file.name, file.component, file.rank, found.size_bytes, found.digest))
        part = file.rank if is_per_rank[file.component] else 0
        for placed in file.tensors:
            record = ShardRecord(index, placed.start, placed.stop, placed.box, found.tensor_digests[placed.path])
            shards.setdefault((file.component, part, placed.path), []).append(record)
    components = tuple(_component_record(component, shards) for component in plan.components)
    return Manifest(head, plan.world_size, components, omitted, contract, versions, tuple(files))


def incomplete_file(plan: SavePlan, url: str, sizes: Mapping[str, int | None]) -> SaveFailed | None:
    """The error for a file that is not there in its planned size before the commit, or None if all are.

    Args:
        plan: the plan of the save.
        url: the checkpoint, for the message.
        sizes: file name -> its size; None if there is no file.
    """
    for file in plan.files:
        if (size := sizes[file.name]) != file.size_bytes:
            found = "no file" if size is None else f"{size} bytes"
            return SaveFailed(f"{url}/{file.name}", expected=f"{file.size_bytes} bytes before the commit", found=found,
                              fix="check that all ranks write to the same filesystem")  # fmt: skip
    return None


def stale_files(manifest: Manifest, present: Iterable[str]) -> tuple[str, ...]:
    """What may be deleted in the directory of a checkpoint that was committed: what its manifest does not name.

    Args:
        manifest: of the checkpoint.
        present: what the directory holds.

    Examples:
        >>> file = FileRecord("ema-00000-of-00001.r1.safetensors", "ema", 0, 8, "xxh3:")
        >>> manifest = Manifest(Head("r", 7), 1, (), (), {}, {}, (file,))
        >>> stale_files(manifest, ["manifest.json", file.name, "ema-00000-of-00001.safetensors"])
        ('ema-00000-of-00001.safetensors',)
    """
    named = {MANIFEST, *(file.name for file in manifest.files)}
    return tuple(name for name in present if name not in named)


def _component_record(
    component: ComponentPlan, shards: Mapping[tuple[str, int, str], list[ShardRecord]]
) -> ComponentRecord:
    tables = [
        tuple(
            TensorRecord(path, spec.dtype, spec.shape, tuple(sorted(shards[component.name, part, path], key=_by_box)))
            for path, spec in tensors.items()
        )
        for part, tensors in enumerate(component.tensors)
    ]
    fingerprint = recorded_fingerprint(component.name, component.nodes, tables)
    return ComponentRecord(component.name, component.nodes, tuple(tables), fingerprint)


def _by_box(shard: ShardRecord) -> Box:
    return shard.box
