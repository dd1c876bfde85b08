"""The manifest: the commit record of a checkpoint, as a value and as bytes that carry their own digest.

The file is one JSON object. Its first line holds the head (format, version, run, step, timeline), so that a reader that
only orders checkpoints reads a few hundred bytes; its last member is the XXH3-128 digest of all bytes before it.
"""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.upgrade import SCHEMA_VERSION
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box

FORMAT = "trainfold"
HEAD_BYTES = 4096  # what is read of each manifest to order them; longer heads are read on, up to the limit
HEAD_LIMIT_BYTES = 2**20
MANIFEST_LIMIT_BYTES = 2**29
TAIL = b',\n"digest":"'
END = b'"}\n'


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
    schema_version: int = SCHEMA_VERSION


@final
@attrs.frozen
class FileRecord:
    """A file of a checkpoint: its name, its exact size and the XXH3-128 digest of all its bytes."""

    name: str
    component: str
    rank: int
    size_bytes: int
    digest: str


@final
@attrs.frozen
class ShardRecord:
    """Stored bytes of a tensor, or of a box of it.

    Attributes:
        file: index into the manifest's files.
        start: first byte in the file.
        stop: one past the last.
        box: the part of the tensor, one (start, stop) pair a dimension.
        digest: of these bytes.
    """

    file: int
    start: int
    stop: int
    box: Box
    digest: str


@final
@attrs.frozen
class TensorRecord:
    """A stored tensor: dtype, global shape and where its bytes are."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardRecord, ...]

    @property
    def spec(self) -> LeafSpec:
        """The spec of the tensor: what it holds, without the values."""
        return LeafSpec(self.dtype, self.shape)


@final
@attrs.frozen
class ComponentRecord:
    """A component: its structure (one for all ranks, or one each) and, for each structure, its tensor table."""

    name: str
    nodes: tuple[Json, ...]
    tensors: tuple[tuple[TensorRecord, ...], ...]
    fingerprint: str


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
        files: every data file.
    """

    head: Head
    world_size: int
    components: tuple[ComponentRecord, ...]
    omitted: tuple[str, ...]
    contract: Mapping[str, Json]
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]

    def component(self, name: str) -> ComponentRecord | None:
        """The component of that name, or None."""
        return next((each for each in self.components if each.name == name), None)

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size_bytes for file in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes: head on the first line, body on the second, digest on the third.

    Law: ``decode_manifest(encode_manifest(m), "m") == m``; equal manifests give equal bytes.

    Examples:
        >>> from trainfold.core.format.manifest_reader import decode_manifest
        >>> m = Manifest(Head("run", 7), 1, (), (), {}, {}, ())
        >>> decode_manifest(encode_manifest(m), "m") == m
        True
    """
    head = canonical_json({"format": FORMAT, **_head_json(manifest.head)})[:-1]
    body = {
        "world_size": manifest.world_size,
        "omitted": list(manifest.omitted),
        "contract": dict(manifest.contract),
        "versions": dict(manifest.versions),
        "files": [attrs.asdict(file) for file in manifest.files],
        "components": [_component_json(component) for component in manifest.components],
    }
    covered = head + b",\n" + canonical_json(body)[1:-1]
    return covered + TAIL + digest_of(covered).encode() + END


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


def _component_json(component: ComponentRecord) -> Json:
    return {
        "name": component.name,
        "fingerprint": component.fingerprint,
        "nodes": list(component.nodes),
        "tensors": [[_tensor_json(record) for record in table] for table in component.tensors],
    }


def _tensor_json(record: TensorRecord) -> Json:
    shards = [[s.file, s.start, s.stop, [list(side) for side in s.box], s.digest] for s in record.shards]
    return {"path": record.path, "dtype": record.dtype, "shape": list(record.shape), "shards": shards}
