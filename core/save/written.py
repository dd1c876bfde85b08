"""`manifest_of`: what a rank knows of the manifest of a save, from its plan and the digests of what it wrote; and what the directory must hold."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import attrs

from trainfold.core.errors import SaveFailed
from trainfold.core.format.file_names import MANIFEST, is_data_file
from trainfold.core.format.indexes.contributions import FingerprintPart, fingerprint_from
from trainfold.core.format.manifest import (
    RANK_FILES_VERSION,
    REFERENCES_VERSION,
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
)
from trainfold.core.format.upgrade import PLAIN_VERSION
from trainfold.core.json_values import Json
from trainfold.core.layout.slices import Box
from trainfold.core.save.save_plan import RANK_FILE, ComponentPlan, SavePlan


class PartDigests(NamedTuple):
    """The digests of a tensor in a file, or of a box of one.

    Attributes:
        digest: of the bytes that were written; of a whole tensor it is the `leaf_digest` of the leaf.
        pieces: the digests of each `PIECE_BYTES` of them, as `ShardRecord` has them.
        whole: the `leaf_digest` of a leaf of which the first elements were written here, and the others by other ranks; otherwise empty.
    """

    digest: str
    pieces: str = ""
    whole: str = ""


@final
@attrs.frozen
class WrittenFile:
    """A file that was written.

    Attributes:
        name: a single path component.
        size_bytes: the size of the whole file.
        digest: the digest of the whole file; after its prefix it is what ``xxhsum -H2`` prints.
        parts: the digests of its tensors, in the order of its plan.
    """

    name: str
    size_bytes: int
    digest: str
    parts: tuple[PartDigests, ...] = ()


@final
@attrs.frozen
class Wrote:
    """What a rank wrote.

    Attributes:
        files: its data files, and those of other checkpoints that it refers to.
        index: its index; None for rank 0, whose index is in the root, and for a rank that has nothing to say.
        contributions: component -> what the rank contributes to its fingerprint.
    """

    files: tuple[FileRecord, ...]
    index: IndexRecord | None
    contributions: Mapping[str, FingerprintPart]


def whole_manifest(mine: Manifest, wrote: Sequence[Wrote]) -> Manifest:
    """The manifest with the files and indexes of all ranks, and the fingerprints.

    Args:
        mine: what rank 0 knows.
        wrote: what each rank wrote.
    """
    components = [
        attrs.evolve(
            component,
            fingerprint=fingerprint_from(
                component.name,
                component.nodes[0],
                [] if component.is_own else [str(record.spec) for record in component.tensors[0]],
                {rank: each.contributions[component.name] for rank, each in enumerate(wrote)},
            ),
        )
        for component in mine.components
    ]
    files = tuple(file for each in wrote for file in each.files)
    return attrs.evolve(
        mine,
        head=attrs.evolve(mine.head, schema_version=version_of(files)),
        components=tuple(components),
        files=files,
        indexes=tuple(each.index for each in wrote if each.index is not None),
    )


def version_of(files: Collection[FileRecord]) -> int:
    """The version of a manifest with such files: the oldest one that has what they need, so that older releases can read it.

    Examples:
        >>> version_of([FileRecord("model-0", ("model",), 0, 8, "")]), version_of([FileRecord("rank-0", ("model", "ema"), 0, 8, "")])
        (3, 5)
    """
    if any(len(file.components) > 1 for file in files):
        return RANK_FILES_VERSION
    return REFERENCES_VERSION if any(file.checkpoint for file in files) else PLAIN_VERSION


def manifest_of(  # noqa: PLR0913 - keywords, one for each part of a manifest
    plan: SavePlan,
    written: Mapping[str, WrittenFile],
    *,
    rank: int = 0,
    head: Head,
    contract: Mapping[str, Json],
    omitted: tuple[str, ...],
    versions: Mapping[str, str],
) -> Manifest:
    """What a rank knows of the manifest of a save: its own files and shards. The fingerprints come from all ranks.

    Args:
        plan: the plan of the save.
        written: file name -> the file, for the files of this rank.
        rank: this rank.
        head: identity and order of the checkpoint.
        contract: what must be equal at a resume.
        omitted: components that the state has and the plan does not.
        versions: library -> its version.
    """
    files = []
    shards: dict[str, list[ShardRecord]] = {}
    for index, file in enumerate(plan.files_of(rank)):
        found = written[file.name]
        files.append(FileRecord(file.name, file.components, file.rank, found.size_bytes, found.digest))
        for placed, (digest, pieces, whole) in zip(file.tensors, found.parts, strict=True):
            shared = whole if placed.is_of_whole else None
            record = ShardRecord(index, placed.start, placed.stop, placed.box, digest, pieces, shared)
            shards.setdefault(placed.path, []).append(record)
    referred = {
        file: len(files) + number for number, file in enumerate(dict.fromkeys(each.file for each in plan.references))
    }
    for each in plan.references:
        here = each.shard._replace(file=referred[each.file])
        shards.setdefault(each.path, []).append(here)
    files += referred
    components = tuple(_component_record(component, shards, rank, plan.world_size) for component in plan.components)
    return Manifest(head, plan.world_size, components, omitted, contract, versions, tuple(files))


def incomplete_file(
    records: Iterable[FileRecord | IndexRecord], url: str, directory: str, sizes: Mapping[str, int | None]
) -> SaveFailed | None:
    """The error for a file that is not there in its size before the commit, or None if all are.

    Args:
        records: the files that were written.
        url: the run, for the message.
        directory: the checkpoint.
        sizes: the name of each file in the run -> its size; None if there is no file.
    """
    for file in records:
        name = file.path(directory)
        if (size := sizes[name]) != file.size_bytes:
            found = "no file" if size is None else f"{size} bytes"
            fix = (
                "check that all ranks write to the same filesystem"
                if name.startswith(f"{directory}/")
                else "delete no checkpoint while a save refers to it; the next save writes all of it"
            )
            return SaveFailed(f"{url}/{name}", expected=f"{file.size_bytes} bytes before the commit", found=found, fix=fix)  # fmt: skip
    return None


def of_this_save(plan: SavePlan, present: Iterable[str]) -> tuple[str, ...]:
    """The files that a save may have written, on any rank.

    Args:
        plan: of this rank.
        present: what the directory holds.

    Examples:
        >>> plan = SavePlan(7, "step-00000007", 2, (ComponentPlan("ema", False, 1, {}),), (), ".r1")
        >>> of_this_save(plan, ["manifest.json", "ema-00001-of-00002.r1.safetensors", "ema-00001-of-00002.safetensors", "index-00001-of-00002.r1.json"])
        ('ema-00001-of-00002.r1.safetensors', 'index-00001-of-00002.r1.json')
        >>> of_this_save(plan, ["rank-00001-of-00002.r1.safetensors", "rank-00001-of-00004.r1.safetensors"])
        ('rank-00001-of-00002.r1.safetensors',)
    """
    ends = f"-of-{plan.world_size:05d}{plan.suffix}"
    names = {RANK_FILE, "index", *(component.name for component in plan.components)}
    return tuple(
        name
        for name in present
        if is_data_file(name) and name.rpartition(".")[0].endswith(ends) and name.split("-")[0] in names
    )


def stale_files(manifest: Manifest, present: Iterable[str]) -> tuple[str, ...]:
    """What may be deleted in the directory of a checkpoint that was committed: what its manifest does not name.

    Args:
        manifest: of the checkpoint.
        present: what the directory holds.

    Examples:
        >>> file = FileRecord("ema-00000-of-00001.r1.safetensors", ("ema",), 0, 8, "xxh3:")
        >>> manifest = Manifest(Head("r", 7), 1, (), (), {}, {}, (file,))
        >>> stale_files(manifest, ["manifest.json", file.name, "ema-00000-of-00001.safetensors"])
        ('ema-00000-of-00001.safetensors',)
    """
    named = {MANIFEST, *manifest.names}
    return tuple(name for name in present if name not in named)


def _component_record(
    component: ComponentPlan, shards: Mapping[str, list[ShardRecord]], rank: int, world_size: int
) -> ComponentRecord:
    table = tuple(
        TensorRecord(
            path,
            spec.dtype,
            spec.shape,
            tuple(sorted(shards.get(path, ()), key=_by_box)),
            None if component.is_own else spec.placement,
        )
        for path, spec in component.tensors.items()
    )
    if not component.is_own:
        return ComponentRecord(component.name, (component.node,), (table,), "")
    alone = [rank == each for each in range(world_size)]  # what the other ranks have is theirs
    nodes = tuple(component.node if mine else None for mine in alone)
    return ComponentRecord(component.name, nodes, tuple(table if mine else () for mine in alone), "")


def _by_box(shard: ShardRecord) -> Box:
    return shard.box
