"""The manifest: the commit record of a checkpoint, as a value and as bytes that carry their own digest.

The root is one JSON object with everything that ranks have in common; where the bytes of a rank's tensors are is in that rank's index, whose
digest is in the root. The root's first line holds the head (format, version, run, step, timeline), so that a reader that
only orders checkpoints reads a few hundred bytes; its last member is the XXH3-128 digest of all bytes before it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, final

import attrs

from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.format.upgrade import PLAIN_VERSION
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, whole_box

if TYPE_CHECKING:
    from trainfold.core.layout.placement import Placement

FORMAT = "trainfold"
HEAD_BYTES = 4096  # what is read of each manifest to order them; longer heads are read on, up to the limit
HEAD_LIMIT_BYTES = 2**20
MANIFEST_LIMIT_BYTES = 2**29
MAX_DIMENSIONS = 64  # of a tensor
PIECE_BYTES = 2**20  # a digest covers at most so many bytes, so that a part of a shard can be read and verified
INLINE_BYTES = 2**20  # of rank 0's index inside the root, if there are other ranks
DIGEST_DIGITS = 32  # of a digest without its prefix
SUMMARY_VERSION = 3  # the first that has one
REFERENCES_VERSION = 4  # the first that can refer to files of other checkpoints
RANK_FILES_VERSION = 5  # the first in which a file can have tensors of several components
INDEX_FORMAT = "trainfold-index"
TAIL = b',\n"digest":"'
END = b'"}\n'
SEAL_BYTES = len(TAIL) + len(DIGEST_PREFIX) + DIGEST_DIGITS + len(END)  # at the end of a root: its digest


@final
@attrs.frozen
class Head:
    """The identity of a checkpoint, and its position in the order of checkpoints.

    Attributes:
        run_id: the run that it belongs to.
        step: optimizer steps done.
        timeline: 0 for a run that never rewound; each rewind that saves again starts the next one.
        forks: (timeline, step) pairs: where each earlier timeline of this one's lineage was left.
        parent: the directory of the nearest checkpoint of its lineage that existed when it was saved, or None.
        revision: how often this step's checkpoint has been replaced.
        schema_version: of the document as it was written.
    """

    run_id: str
    step: int
    timeline: int = 0
    forks: tuple[tuple[int, int], ...] = ()
    parent: str | None = None
    revision: int = 0
    schema_version: int = PLAIN_VERSION


@final
@attrs.frozen
class Summary:
    """What the first line of a root claims about the rest, so that a list of checkpoints reads no more.

    Attributes:
        size_bytes: of all data files.
        omitted: the components that were left out on purpose.
        fingerprints: component -> its fingerprint, in the state's order.
        refers: the other checkpoints whose files it refers to, in their order.
    """

    size_bytes: int
    omitted: tuple[str, ...]
    fingerprints: Mapping[str, str]
    refers: tuple[str, ...] = ()


@final
@attrs.frozen
class FileRecord:
    """A file with tensors of a checkpoint: its name, its exact size and the XXH3-128 digest of all its bytes.

    Attributes:
        name: the name in its directory.
        components: the components whose tensors it holds; more than one from version 5 on.
        rank: the rank that wrote it.
        size_bytes: its size.
        digest: of all its bytes.
        checkpoint: the checkpoint of the same run that it belongs to, which this one refers to; empty for its own.
    """

    name: str
    components: tuple[str, ...]
    rank: int
    size_bytes: int
    digest: str
    checkpoint: str = ""

    @property
    def label(self) -> str:
        """Its name, after the name of the other checkpoint if it belongs to one."""
        return f"{self.checkpoint}/{self.name}" if self.checkpoint else self.name

    def path(self, directory: str) -> str:
        """Its name in the run.

        Args:
            directory: of the checkpoint whose manifest lists it.
        """
        return f"{self.checkpoint or directory}/{self.name}"


@final
@attrs.frozen
class IndexRecord:
    """The index of a rank: a file, its exact size and the digest of its bytes. Rank 0 has one only if it is too large for the root."""

    name: str
    rank: int
    size_bytes: int
    digest: str

    def path(self, directory: str) -> str:
        """Its name in the run."""
        return f"{directory}/{self.name}"


@final
class ShardRecord(NamedTuple):
    """Stored bytes of a tensor, or of a box of it.

    Attributes:
        file: index into the manifest's files.
        start: first byte in the file.
        stop: one past the last.
        box: the part of the tensor, one (start, stop) pair a dimension.
        digest: of these bytes.
        pieces: the digests of each `PIECE_BYTES` of them, without their prefix and one after the other; empty if they are one piece, and in
            version 1, so that they can only be verified whole.
        whole: for a part of a tensor that ranks held whole and shared: the digest of all of it, or "" if that is with another part.
    """

    file: int
    start: int
    stop: int
    box: Box
    digest: str
    pieces: str = ""
    whole: str | None = None


@final
@attrs.frozen
class OtherShards:
    """Shards of a component in a file that a rank does not need: it knows where they are, and has read no more of them.

    Attributes:
        file: index into the manifest's files.
        component: whose tensors they are of.
        tensors: of each shard, the index of its tensor in the component's table.
        starts: the first byte of each in the file.
        stops: one past its last.
        boxes: place in ``tensors`` -> box, where it is not what the rule gives the rank that wrote the file.
    """

    file: int
    component: str
    tensors: Sequence[int] = attrs.field(repr=False)
    starts: Sequence[int] = attrs.field(repr=False)
    stops: Sequence[int] = attrs.field(repr=False)
    boxes: Mapping[int, Box] = attrs.field(repr=False)


@final
@attrs.frozen
class TensorRecord:
    """A stored tensor: dtype, global shape, where its bytes are, and the rule by which ranks held it, if any."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardRecord, ...]
    placement: "Placement | None" = None

    @property
    def spec(self) -> LeafSpec:
        """The spec of the tensor: what it holds, without the values."""
        return LeafSpec(self.dtype, self.shape)

    @property
    def whole_digest(self) -> str:
        """The digest of all its bytes; empty if only those of its parts are known."""
        if len(self.shards) == 1:
            return self.shards[0].digest
        return next((shard.whole for shard in self.shards if shard.whole), "")


@final
@attrs.frozen
class ComponentRecord:
    """A component: its structure (one for all ranks, or one each) and, for each structure, its tensor table."""

    name: str
    nodes: tuple[Json, ...]
    tensors: tuple[tuple[TensorRecord, ...], ...]
    fingerprint: str

    @property
    def is_own(self) -> bool:
        """Whether each rank has its own."""
        return len(self.nodes) > 1


@final
@attrs.frozen
class Manifest:
    """All information about a checkpoint except the bytes of its tensors.

    Attributes:
        head: identity and order.
        world_size: ranks that saved it.
        components: the components present, in the state's order.
        omitted: components that the run has and that were left out on purpose; ``model`` among them means that the
            weights are external.
        contract: what must be equal for an exact resume.
        versions: library -> version that wrote it.
        files: every data file, and the files of other checkpoints that it refers to.
        indexes: the indexes of the ranks that have a file of their own for it.
        opened: the ranks whose shards and structures are in it, if a rank has opened only the indexes that it needs; None for all.
        others: the shards of these ranks that it does not need. The tables are without them.
        written: as it was written, if its tensors have other names here; the headers of its files have the names that were written.
    """

    head: Head
    world_size: int
    components: tuple[ComponentRecord, ...]
    omitted: tuple[str, ...]
    contract: Mapping[str, Json]
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    indexes: tuple[IndexRecord, ...] = ()
    opened: frozenset[int] | None = None
    others: tuple[OtherShards, ...] = ()
    written: "Manifest | None" = attrs.field(default=None, eq=False, repr=False)

    def component(self, name: str) -> ComponentRecord | None:
        """The component of that name, or None."""
        return next((each for each in self.components if each.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files in its directory except the manifest itself."""
        return (*(file.name for file in self.own_files), *(index.name for index in self.indexes))

    @property
    def own_files(self) -> tuple[FileRecord, ...]:
        """The data files in its directory."""
        return tuple(file for file in self.files if not file.checkpoint)

    def knows_all_of(self, file: FileRecord) -> bool:
        """Whether it has each shard that is in a file: of a rank whose index is not opened, those of what each rank has of its own may be there alone."""
        is_known = self.opened is None or file.rank in self.opened or len(file.components) == 1
        return is_known and not file.checkpoint

    @property
    def references(self) -> tuple[FileRecord, ...]:
        """The files of other checkpoints that it refers to."""
        return tuple(file for file in self.files if file.checkpoint)

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files in its directory."""
        return sum(file.size_bytes for file in self.own_files)

    @property
    def summary(self) -> Summary:
        """What the first line of its root says."""
        refers = tuple(sorted({file.checkpoint for file in self.references}))
        return Summary(self.size_bytes, self.omitted, {each.name: each.fingerprint for each in self.components}, refers)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the root: head and summary on the first line, body on the second, digest on the third.

    Rank 0's index is in the body, unless it has a file.

    Law: ``decode_manifest(encode_manifest(m), "m", read=...) == m`` where ``read`` returns what `encode_index` made for the other ranks; equal manifests
    give equal bytes.

    Args:
        manifest: what rank 0 knows: its own shards, and the files and indexes of all ranks. More of it makes no difference.

    Examples:
        >>> from trainfold.core.format.manifest_reader import decode_manifest
        >>> m = Manifest(Head("run", 7), 1, (), (), {}, {}, ())
        >>> decode_manifest(encode_manifest(m), "m") == m
        True
    """
    has_index_file = any(index.rank == 0 for index in manifest.indexes)
    summary = {**attrs.asdict(manifest.summary), "omitted": list(manifest.omitted)}
    refers, version = list(summary.pop("refers")), manifest.head.schema_version
    references = [{**_file_json(file, version), "checkpoint": file.checkpoint} for file in manifest.references]
    has_references = version >= REFERENCES_VERSION
    assert has_references or not references, "its maker chooses the version"
    assert version >= RANK_FILES_VERSION or all(len(file.components) == 1 for file in manifest.files), "the same"
    summary |= {"refers": refers} if has_references else {}
    head = canonical_json({"format": FORMAT, **_head_json(manifest.head), **summary})[:-1]
    layouts = layouts_of(manifest)
    body = {
        "world_size": manifest.world_size,
        "contract": dict(manifest.contract),
        "versions": dict(manifest.versions),
        "layouts": [rule.row for rule in layouts],
        "files": [_file_json(file, version) for file in manifest.own_files],
        **({"references": references} if has_references else {}),
        "indexes": [attrs.asdict(index) for index in manifest.indexes],
        "components": [_component_json(component, layouts) for component in manifest.components],
        "index": None if has_index_file else index_json(manifest, 0),
    }
    covered = head + b",\n" + canonical_json(body)[1:-1]
    return covered + TAIL + digest_of(covered).encode() + END


def encode_index(manifest: Manifest, rank: int) -> bytes:
    """The bytes of a rank's index: where its shards are, and the structure of what each rank has of its own.

    Args:
        manifest: what the rank knows: its own shards, in files of its own.
        rank: the rank; rank 0's index is in the root, if it has at most `INLINE_BYTES` or there is no other rank.
    """
    return canonical_json({"format": INDEX_FORMAT, "rank": rank, **index_json(manifest, rank)}) + b"\n"


def layouts_of(manifest: Manifest) -> "dict[Placement, int]":
    """The rules by which tensors are cut, numbered."""
    shared = (each.tensors[0] for each in manifest.components if not each.is_own)
    rules = dict.fromkeys(record.placement for table in shared for record in table)
    return {rule: index for index, rule in enumerate(rule for rule in rules if rule is not None)}


def index_json(manifest: Manifest, rank: int) -> dict[str, Json]:
    """The index of a rank, as JSON."""
    own: dict[str, Json] = {}
    shards: dict[str, Json] = {}
    references: dict[str, Json] = {}
    for component in manifest.components:
        table = component.tensors[rank if component.is_own else 0]
        if component.is_own:
            own[component.name] = {"node": component.nodes[rank], "tensors": _table(table, {})}
        rows: dict[tuple[str, str], list[Json]] = {}
        for number, record in enumerate(table):
            for shard in record.shards:
                file = manifest.files[shard.file]
                if file.rank == rank:
                    key = file.checkpoint, file.name if file.checkpoint else ""
                    rows.setdefault(key, []).append(_shard_row(number, record, shard, rank))
        if mine := rows.pop(("", ""), None):
            shards[component.name] = mine
        if rows:
            references[component.name] = [[*key, each] for key, each in sorted(rows.items())]
    return {"own": own, "shards": shards, **({"references": references} if references else {})}


def _file_json(file: FileRecord, version: int) -> dict[str, Json]:
    names: list[Json] = [*file.components]
    held: dict[str, Json] = {"components": names} if version >= RANK_FILES_VERSION else {"component": names[0]}
    return {"name": file.name, **held, "rank": file.rank, "size_bytes": file.size_bytes, "digest": file.digest}


def _head_json(head: Head) -> dict[str, Json]:
    return {
        "schema_version": head.schema_version,
        "run_id": head.run_id,
        "step": head.step,
        "timeline": head.timeline,
        "forks": [list(fork) for fork in head.forks],
        "parent": head.parent,
        "revision": head.revision,
    }


def _component_json(component: ComponentRecord, layouts: "Mapping[Placement, int]") -> Json:
    if component.is_own:
        return {"name": component.name}
    return {"name": component.name, "node": component.nodes[0], "tensors": _table(component.tensors[0], layouts)}


def _table(table: tuple[TensorRecord, ...], layouts: "Mapping[Placement, int]") -> Json:
    """A table of tensors: the kinds of tensors that there are, and the kind of each. Their paths are in the structure."""
    kinds: dict[tuple[str, tuple[int, ...], Placement | None], int] = {}
    of: list[Json] = [kinds.setdefault((record.dtype, record.shape, record.placement), len(kinds)) for record in table]
    rows: list[Json] = [[dtype, list(shape), None if rule is None else layouts[rule]] for dtype, shape, rule in kinds]
    return {"kinds": rows, "of": of}


def _shard_row(number: int, record: TensorRecord, shard: ShardRecord, rank: int) -> list[Json]:
    row: list[Json] = [number, shard.start, _box_json(record, shard, rank), shard.digest, shard.pieces]
    return row if shard.whole is None else [*row, shard.whole]


def _box_json(record: TensorRecord, shard: ShardRecord, rank: int) -> Json:
    """The box of a shard; null where it is what the rule gives the rank, or the whole tensor without a rule."""
    return (
        None if shard.box == box_by_rule(record.shape, record.placement, rank) else [list(side) for side in shard.box]
    )


@lru_cache(maxsize=1024)  # a save asks for that of each leaf several times, and few shapes have many leaves
def box_by_rule(shape: tuple[int, ...], rule: "Placement | None", rank: int) -> Box | None:
    """The box that a rule gives a rank; None if the rank is not in its mesh. Without a rule it is the whole tensor.

    Examples:
        >>> box_by_rule((4, 2), None, 3)
        ((0, 4), (0, 2))
    """
    if rule is None:
        return whole_box(shape)
    coordinate = rule.mesh.coordinate_of(rank)
    return None if coordinate is None else rule.box(shape, coordinate)
