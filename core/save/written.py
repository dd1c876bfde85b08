"""`manifest_of`: the manifest of a save, from its plan and the digests of the files written by all ranks."""

from collections.abc import Mapping
from typing import final

import attrs

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
