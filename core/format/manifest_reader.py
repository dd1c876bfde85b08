"""Reads a manifest strictly: every field is checked before any is used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainfold.core.component_names import BUILTIN_COMPONENTS, is_extra_name
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign, CheckpointHostile, InvalidState
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.manifest import (
    DIGEST_DIGITS,
    END,
    PIECE_BYTES,
    TAIL,
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
)
from trainfold.core.format.strict_json import (
    digest_text,
    fields,
    hostile,
    int_of,
    list_of,
    object_of,
    single_name,
    sized,
    strict_json,
    text_of,
)
from trainfold.core.format.structure.places import MAX_DEPTH, Leaf, places
from trainfold.core.format.structure.validate import misfit_of
from trainfold.core.format.upgrade import SCHEMA_VERSION, upgraded
from trainfold.core.json_values import Json, decode_scalar, shown
from trainfold.core.layout.slices import check_cover

if TYPE_CHECKING:
    from trainfold.core.format.indexes.merge import ReadIndex

_MAX_DIMENSIONS = 64
_HEX = frozenset("0123456789abcdef")
_OF_NUMPY = frozenset(
    name
    for name in STORED
    if name != "float4_e2m1fn_x2" and not name.startswith(("bfloat", "float8"))  # torch has these and numpy has not
)
_HEAD_FIELDS = {"format", "schema_version", "run_id", "step", "timeline", "forks", "parent", "revision"}
_BODY_FIELDS = {"world_size", "omitted", "contract", "versions", "files", "components", "indexes"}


def decode_manifest(data: bytes, where: str, *, read: "ReadIndex | None" = None) -> Manifest:
    """The manifest in a file's bytes; every byte is covered by the digest or fixed.

    Args:
        data: the whole file.
        where: its path, for errors.
        read: returns the bytes of a file of the checkpoint by its name and size, or None if there is none: version 2 has an index for each rank
            beside the first.

    Raises:
        CheckpointForeign: if it does not begin as a trainfold manifest.
        CheckpointDamaged: if its digest, or that of an index, does not fit its bytes.
        CheckpointTorn: if an index is missing.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents break the format nevertheless.
    """
    document = _sealed(data, where)
    if document.get("schema_version") != SCHEMA_VERSION or type(document["schema_version"]) is not int:
        return parse_manifest(upgraded(document, where), where)
    from trainfold.core.format.indexes.merge import merged

    return parse_manifest(merged(document, _HEAD_FIELDS, where, read), where)


def check_root(data: bytes, where: str) -> None:
    """Check the root of a manifest without the indexes of other ranks.

    Raises:
        CheckpointError: the matching subclass, as `decode_manifest`.
    """
    document = _sealed(data, where)
    if not document.get("indexes"):
        decode_manifest(data, where)
    read_head(document, where)


def _sealed(data: bytes, where: str) -> dict[str, Any]:
    """The document in a file's bytes, if its digest fits."""
    if not data.startswith(b'{"format":"trainfold",'):
        raise CheckpointForeign(
            where, expected="a trainfold manifest", found=repr(bytes(data[:24])), fix="point at a trainfold checkpoint"
        )
    cut = data.rfind(TAIL)
    covered = data[:cut]
    if cut < 0 or data[cut:] != TAIL + digest_of(covered).encode() + END:
        raise CheckpointDamaged(
            where,
            expected="the digest of its own bytes at its end",
            found=f"{len(data)} bytes that have another digest",
            fix="use an older checkpoint of the run; `trainfold verify` names every damaged file",
        )
    return strict_json(covered + b"}", where)


def check_structures(manifest: Manifest, where: str) -> None:
    """Check that every structure can be rebuilt, holds what its classes say, and agrees with the tensor tables and the head.

    Raises:
        CheckpointHostile: naming the leaf.
    """
    for component in manifest.components:
        for node, table in zip(component.nodes, component.tensors, strict=True):
            first: dict[int, str] = {}
            for leaf in _places(node, component.name, where):
                if leaf.tensor is not None and leaf.tensor >= len(table):
                    raise hostile(f"{where}: {leaf.path}", f"a tensor index below {len(table)}", leaf.tensor)
                if leaf.tensor is not None and table[leaf.tensor].path != first.setdefault(leaf.tensor, leaf.path):
                    raise hostile(f"{where}: {leaf.path}", "its own path in the tensor table", table[leaf.tensor].path)
                if leaf.as_numpy and leaf.tensor is not None and table[leaf.tensor].dtype not in _OF_NUMPY:
                    raise hostile(f"{where}: {leaf.path}", "a dtype of numpy", table[leaf.tensor].dtype)
            misfit = misfit_of(node, component.name)
            if misfit is not None:
                raise hostile(f"{where}: {misfit.path}", misfit.expected, misfit.found)
    _check_step(manifest, where)


def _check_step(manifest: Manifest, where: str) -> None:
    """Check that the head's step, which orders checkpoints, equals the trainer's step, from which a run continues."""
    trainer = manifest.component("trainer")
    for node in () if trainer is None else trainer.nodes:
        step = (
            0
            if node is None
            else decode_scalar({**node["fields"], **node.get("static", {})}.get("step", 0), "trainer.step")
        )
        if node is not None and step != manifest.head.step:
            raise hostile(f"{where}: trainer.step", f"the step of the head, {manifest.head.step}", shown(step))


def _places(node: Json, name: str, where: str) -> list[Leaf]:
    try:
        return places(node, name)
    except CheckpointHostile as error:
        raise hostile(f"{where}: {error.where}", error.expected, error.found) from error


def decode_head(data: bytes, where: str) -> Head:
    """The head in the first bytes of a manifest. A head suffices to order checkpoints; only `decode_manifest` proves one.

    Raises:
        CheckpointForeign: if the first line is not the head of a manifest.
        FutureVersion: if a newer trainfold wrote it.
    """
    line, newline, _ = data.partition(b",\n")
    if not newline or not line.startswith(b'{"format":"trainfold",'):
        raise CheckpointForeign(
            where, expected="a manifest's head", found=repr(bytes(data[:24])), fix="use an older checkpoint"
        )
    document = strict_json(line + b"}", where)
    return read_head(upgraded(document, where), where)


def read_head(document: Mapping[str, Any], where: str) -> Head:
    """The checked head of a document."""
    fields(document, _HEAD_FIELDS, where, exact=False)
    parent = document["parent"]
    forks = tuple(
        (int_of(timeline, where), int_of(step, where))
        for timeline, step in (sized(fork, 2, where) for fork in list_of(document["forks"], where))
    )
    return Head(
        run_id=single_name(document["run_id"], where),
        step=int_of(document["step"], where),
        timeline=int_of(document["timeline"], where),
        forks=forks,
        parent=None if parent is None else single_name(parent, where),
        revision=int_of(document["revision"], where),
        schema_version=int_of(document["schema_version"], where),
    )


def parse_manifest(document: Mapping[str, Any], where: str) -> Manifest:
    """The checked manifest: names stay inside, ranges lie in their files and do not overlap, sizes fit dtypes."""
    fields(document, _HEAD_FIELDS | _BODY_FIELDS, where, exact=True)
    files = tuple(_file(each, where) for each in list_of(document["files"], where))
    indexes = tuple(IndexRecord(**each) for each in document["indexes"])  # checked when they were read
    names = [*(file.name for file in files), *(index.name for index in indexes)]
    if len({*names}) != len(names) or MANIFEST in names:
        raise hostile(where, "each file name once", sorted(names)[:8])
    reader = _Tensors(files, where, version=document["schema_version"])
    components = tuple(reader.component(each) for each in list_of(document["components"], where))
    reader.check_overlaps()
    if len({component.name for component in components}) != len(components):
        raise hostile(where, "each component once", [component.name for component in components])
    return Manifest(
        head=read_head(document, where),
        world_size=int_of(document["world_size"], where, least=1),
        components=components,
        omitted=tuple(single_name(name, where) for name in list_of(document["omitted"], where)),
        contract=_shallow(object_of(document["contract"], where), where),
        versions={key: text_of(value, where) for key, value in object_of(document["versions"], where).items()},
        files=files,
        indexes=indexes,
    )


def _shallow(contract: dict[str, Json], where: str) -> dict[str, Json]:
    """Check that a contract is shallow enough to be compared and printed, which Python does by recursion."""
    level = [value for value in contract.values() if isinstance(value, dict | list)]
    for _ in range(MAX_DEPTH):
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
    if level:
        raise hostile(where, f"a contract of at most {MAX_DEPTH} levels", "more")
    return contract


def _component_name(value: object, where: str) -> str:
    name = single_name(value, where)
    if name not in BUILTIN_COMPONENTS and not is_extra_name(name):
        raise hostile(where, "a component's name", shown(name))
    return name


class _Tensors:
    """Reads tensor tables against the files that they point into."""

    def __init__(self, files: tuple[FileRecord, ...], where: str, *, version: int) -> None:
        self._version = version
        self._files = files
        self._where = where
        self._spans: list[list[tuple[int, int]]] = [[] for _ in files]

    def component(self, document: Json) -> ComponentRecord:
        where = self._where
        fields(document, {"name", "fingerprint", "nodes", "tensors"}, where, exact=True)
        nodes, tables = list_of(document["nodes"], where), list_of(document["tensors"], where)
        if not nodes or len(nodes) != len(tables):
            raise hostile(where, "as many tensor tables as structures", f"{len(tables)} for {len(nodes)}")
        return ComponentRecord(
            name=_component_name(document["name"], where),
            nodes=tuple(nodes),
            tensors=tuple(tuple(self.tensor(each) for each in list_of(table, where)) for table in tables),
            fingerprint=digest_text(document["fingerprint"], where),
        )

    def tensor(self, document: Json) -> TensorRecord:
        rule = document.pop("layout") if self._version > 1 else None  # `merged` has checked it
        fields(document, {"path", "dtype", "shape", "shards"}, self._where, exact=True)
        path, dtype = text_of(document["path"], self._where), document["dtype"]
        where = f"{self._where}: {path[:200]}"
        if not isinstance(dtype, str) or dtype not in STORED:
            raise hostile(where, "a known dtype", shown(dtype))
        shape = tuple(int_of(size, where) for size in list_of(document["shape"], where))
        if len(shape) > _MAX_DIMENSIONS:
            raise hostile(where, f"at most {_MAX_DIMENSIONS} dimensions", len(shape))
        shards = tuple(self.shard(each, dtype, shape, where) for each in list_of(document["shards"], where))
        if len(shards) != 1 or any(side != (0, size) for side, size in zip(shards[0].box, shape, strict=True)):
            try:
                check_cover(path, [shard.box for shard in shards], shape)
            except InvalidState as error:
                raise hostile(where, error.expected, error.found) from None
        return TensorRecord(path, dtype, shape, shards, rule)

    def shard(self, document: Json, dtype: str, shape: tuple[int, ...], where: str) -> ShardRecord:
        index, start, stop, sides, digest, *more = sized(document, 5 if self._version == 1 else 6, where)
        if type(index) is not int or not 0 <= index < len(self._files):
            raise hostile(where, f"a file index below {len(self._files)}", shown(index))
        start, stop = int_of(start, where), int_of(stop, where)
        box = tuple(
            (int_of(low, where), int_of(high, where))
            for low, high in (sized(side, 2, where) for side in list_of(sides, where))
        )
        inside = len(box) == len(shape) and all(
            low <= high <= size for (low, high), size in zip(box, shape, strict=True)
        )
        if not inside:
            raise hostile(where, f"a box inside {list(shape)}", box)
        needed = size_bytes(dtype, tuple(high - low for low, high in box))
        if stop - start != needed or stop > self._files[index].size_bytes or start < 8:
            raise hostile(
                where, f"{needed} bytes inside a file of {self._files[index].size_bytes}", f"the range {start}..{stop}"
            )
        self._spans[index].append((start, stop))
        pieces = _pieces(more[0], stop - start, where) if more else ""
        return ShardRecord(index, start, stop, box, digest_text(digest, where), pieces)

    def check_overlaps(self) -> None:
        for file, spans in zip(self._files, self._spans, strict=True):
            end = 0
            for start, stop in sorted(span for span in spans if span[0] < span[1]):
                if start < end:
                    raise hostile(f"{self._where}: {file.name}", "ranges that do not overlap", f"{start} after {end}")
                end = stop


def _pieces(value: Json, size: int, where: str) -> str:
    """The checked digests of pieces: none for a single piece."""
    count = -(-size // PIECE_BYTES) if size > PIECE_BYTES else 0
    found = text_of(value, where)
    if len(found) != count * DIGEST_DIGITS or not set(found) <= _HEX:
        raise hostile(where, f"{count} digests of pieces", f"{len(found)} characters")
    return found


def _file(document: Json, where: str) -> FileRecord:
    fields(document, {"name", "component", "rank", "size_bytes", "digest"}, where, exact=True)
    return FileRecord(
        name=single_name(document["name"], where),
        component=single_name(document["component"], where),
        rank=int_of(document["rank"], where),
        size_bytes=int_of(document["size_bytes"], where),
        digest=digest_text(document["digest"], where),
    )
