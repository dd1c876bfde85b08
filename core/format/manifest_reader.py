"""Reads a manifest strictly: every field is checked before any is used."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trainfold.core.component_names import BUILTIN_COMPONENTS, is_extra_name
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointForeign, CheckpointHostile, InvalidState
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.file_names import MANIFEST, can_be_referred_to, directory_of
from trainfold.core.format.indexes.files import components_in
from trainfold.core.format.indexes.summary import summary_of
from trainfold.core.format.manifest import (
    END,
    MAX_DIMENSIONS,
    RANK_FILES_VERSION,
    SUMMARY_VERSION,
    TAIL,
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    OtherShards,
    ShardRecord,
    Summary,
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
from trainfold.core.layout.slices import check_cover, overlap, whole_box

if TYPE_CHECKING:
    from trainfold.core.format.indexes.merge import Merged
    from trainfold.core.format.indexes.needed import Needs
    from trainfold.core.format.indexes.proved import ReadIndex
    from trainfold.core.layout.placement import Placement

_OF_NUMPY = frozenset(
    name
    for name in STORED
    if name != "float4_e2m1fn_x2" and not name.startswith(("bfloat", "float8"))  # torch has these and numpy has not
)
_HEAD_FIELDS = {"format", "schema_version", "run_id", "step", "timeline", "forks", "parent", "revision"}
_INDEXED = range(2, SCHEMA_VERSION + 1)  # the versions with indexes
_BODY_FIELDS = {"world_size", "omitted", "contract", "versions", "files", "references", "components", "indexes"}


def decode_manifest(
    data: bytes,
    where: str,
    *,
    read: "ReadIndex | None" = None,
    needs: "Needs | None" = None,
    document: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest in a file's bytes; every byte is covered by the digest or fixed.

    Args:
        data: the whole file.
        where: its path, for errors.
        read: returns the bytes of a file of the checkpoint by its name and size, or None if there is none: version 2 has an index for each rank
            beside the first.
        needs: what a rank needs: then only the indexes are opened in which that is. None for all.
        document: what `opened_root` has returned for the same bytes, if it was called already.

    Raises:
        CheckpointForeign: if it does not begin as a trainfold manifest.
        CheckpointDamaged: if its digest, or that of an index, does not fit its bytes.
        CheckpointTorn: if an index is missing.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents break the format nevertheless.
    """
    document = opened_root(data, where) if document is None else document
    if document.get("schema_version") not in _INDEXED or type(document["schema_version"]) is not int:
        return parse_manifest(upgraded(dict(document), where), where)
    from trainfold.core.format.indexes.merge import merged

    return parse_manifest(document, where, merged=merged(document, _HEAD_FIELDS, where, read, needs))


def check_root(data: bytes, where: str) -> None:
    """Check the root of a manifest without the indexes of other ranks.

    Raises:
        CheckpointError: the matching subclass, as `decode_manifest`.
    """
    document = opened_root(data, where)
    if not document.get("indexes"):
        decode_manifest(data, where)
    read_head(document, where)


def opened_root(data: bytes, where: str) -> dict[str, Any]:
    """The document in the bytes of a manifest file, if its digest fits. Nothing else of it is checked.

    Raises:
        CheckpointError: the matching subclass, as `decode_manifest`.
    """
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
        for part, (node, table) in enumerate(zip(component.nodes, component.tensors, strict=True)):
            if node is None and component.is_own and manifest.opened is not None and part not in manifest.opened:
                continue
            first = _first_places(node, component.name, table, where)
            misfit = misfit_of(node, component.name)
            if misfit is not None:
                raise hostile(f"{where}: {misfit.path}", misfit.expected, misfit.found)
            if len(first) < len(table):
                raise hostile(f"{where}: {component.name}", f"places for {len(table)} tensors", f"{len(first)} tensors")
    _check_step(manifest, where)


def _first_places(node: Json, name: str, table: Sequence[TensorRecord], where: str) -> dict[int, str]:
    """Index of a tensor -> the path of its first place, which the table has too."""
    first: dict[int, str] = {}
    for path, index, _, as_numpy in _places(node, name, where):
        if index is None:
            continue
        if index >= len(table):
            raise hostile(f"{where}: {path}", f"a tensor index below {len(table)}", index)
        if table[index].path != first.setdefault(index, path):
            raise hostile(f"{where}: {path}", "its own path in the tensor table", table[index].path)
        if as_numpy and table[index].dtype not in _OF_NUMPY:
            raise hostile(f"{where}: {path}", "a dtype of numpy", table[index].dtype)
    return first


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


def decode_first_line(data: bytes, where: str) -> tuple[Head, Summary | None]:
    """The head in the first bytes of a manifest, and the summary; None before version 3.

    They suffice to order checkpoints and to list them; only `decode_manifest` proves one.

    Raises:
        CheckpointForeign: if the first line is not the head of a manifest.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if it breaks the format.
    """
    line, newline, _ = data.partition(b",\n")
    if not newline or not line.startswith(b'{"format":"trainfold",'):
        raise CheckpointForeign(
            where, expected="a manifest's head", found=repr(bytes(data[:24])), fix="use an older checkpoint"
        )
    document = upgraded(strict_json(line + b"}", where), where)
    has_summary = document["schema_version"] >= SUMMARY_VERSION
    return read_head(document, where), summary_of(document, where) if has_summary else None


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


def parse_manifest(document: Mapping[str, Any], where: str, *, merged: "Merged | None" = None) -> Manifest:
    """The checked manifest: names stay inside, ranges lie in their files and do not overlap, sizes fit dtypes."""
    document, opened, is_whole, others = (document, None, True, ()) if merged is None else merged
    fields(document, _HEAD_FIELDS | _BODY_FIELDS, where, exact=True)
    head = read_head(document, where)
    version = document["schema_version"]
    files = tuple(_file(each, version, where) for each in list_of(document["files"], where))
    own = directory_of(head.step)
    files += tuple(_reference(each, version, where, own) for each in list_of(document["references"], where))
    indexes = tuple(IndexRecord(**each) for each in document["indexes"])  # checked when they were read
    names = [*(file.label for file in files), *(index.name for index in indexes)]
    if len({*names}) != len(names) or MANIFEST in names:
        raise hostile(where, "each file name once", sorted(names)[:8])
    reader = _Tensors(files, where, version=version, is_whole=is_whole)
    components = tuple(reader.component(each) for each in list_of(document["components"], where))
    reader.check_overlaps(others)
    world_size = int_of(document["world_size"], where, least=1)
    _check_ranks(world_size, [*files, *indexes], components, where)
    if len({component.name for component in components}) != len(components):
        raise hostile(where, "each component once", [component.name for component in components])
    return Manifest(
        head=head,
        world_size=world_size,
        components=components,
        omitted=tuple(single_name(name, where) for name in list_of(document["omitted"], where)),
        contract=_shallow(object_of(document["contract"], where), where),
        versions={key: text_of(value, where) for key, value in object_of(document["versions"], where).items()},
        files=files,
        indexes=indexes,
        opened=opened,
        others=others,
    )


def _check_ranks(
    world_size: int, records: Iterable[FileRecord | IndexRecord], components: Iterable[ComponentRecord], where: str
) -> None:
    """Check that files and structures belong to the ranks that saved."""
    for record in records:
        if record.rank >= world_size:
            raise hostile(f"{where}: {record.name}", f"a rank below {world_size}", record.rank)
    for component in components:
        if len(component.nodes) not in (1, world_size):
            raise hostile(
                f"{where}: {component.name}", f"one structure, or {world_size}", f"{len(component.nodes)} of them"
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

    def __init__(self, files: tuple[FileRecord, ...], where: str, *, version: int, is_whole: bool) -> None:
        self._is_merged, self._is_whole = version > 1, is_whole
        self._files = files
        self._where = where
        self._spans: list[list[tuple[int, int]]] = [[] for _ in files]
        self._tiled: set[Any] = set()  # shapes with boxes that are known to be right: many tensors are cut alike

    def component(self, document: Json) -> ComponentRecord:
        where = self._where
        fields(document, {"name", "fingerprint", "nodes", "tensors"}, where, exact=True)
        nodes, tables = list_of(document["nodes"], where), list_of(document["tensors"], where)
        read = self.merged if self._is_merged else self.tensor
        if not nodes or len(nodes) != len(tables):
            raise hostile(where, "as many tensor tables as structures", f"{len(tables)} for {len(nodes)}")
        return ComponentRecord(
            name=_component_name(document["name"], where),
            nodes=tuple(nodes),
            tensors=tuple(tuple(map(read, list_of(table, where))) for table in tables),
            fingerprint=digest_text(document["fingerprint"], where),
        )

    def merged(self, record: Mapping[str, Any]) -> TensorRecord:
        """The tensor of a row that `merged` has checked, with shards that `ShardRows` has checked."""
        return self._tensor(record["path"], record["dtype"], record["sizes"], tuple(record["shards"]), record["layout"])

    def tensor(self, document: Json) -> TensorRecord:
        fields(document, {"path", "dtype", "shape", "shards"}, self._where, exact=True)
        path, dtype = text_of(document["path"], self._where), document["dtype"]
        where = self._at(path)
        if not isinstance(dtype, str) or dtype not in STORED:
            raise hostile(where, "a known dtype", shown(dtype))
        shape = tuple(int_of(size, where) for size in list_of(document["shape"], where))
        if len(shape) > MAX_DIMENSIONS:
            raise hostile(where, f"at most {MAX_DIMENSIONS} dimensions", len(shape))
        shards = tuple(self.shard(each, dtype, shape, where) for each in list_of(document["shards"], where))
        return self._tensor(path, dtype, shape, shards)

    def shard(self, document: Json, dtype: str, shape: tuple[int, ...], where: str) -> ShardRecord:
        index, start, stop, sides, digest = sized(document, 5, where)
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
        if stop - start != needed:
            raise hostile(where, f"{needed} bytes", f"the range {start}..{stop}")
        return ShardRecord(index, start, stop, box, digest_text(digest, where))

    def _at(self, path: str) -> str:
        return f"{self._where}: {path[:200]}"

    def _tensor(
        self,
        path: str,
        dtype: str,
        shape: tuple[int, ...],
        shards: tuple[ShardRecord, ...],
        rule: "Placement | None" = None,
    ) -> TensorRecord:
        for shard in shards:
            span = shard.start, shard.stop
            size = self._files[shard.file].size_bytes
            if span[0] < 8 or span[1] > size:
                wanted = f"{span[1] - span[0]} bytes inside a file of {size}"
                raise hostile(self._at(path), wanted, f"the range {span[0]}..{span[1]}")
            self._spans[shard.file].append(span)
        self._check_boxes(path, shape, shards)
        shared = [shard.whole for shard in shards if shard.whole is not None]
        if shared and (len(shared) != len(shards) or not self._is_whole <= sum(map(bool, shared)) <= 1):
            raise hostile(self._at(path), "one digest of the whole tensor, in all its parts", shown(shared[:4]))
        return TensorRecord(path, dtype, shape, shards, rule)

    def _check_boxes(self, path: str, shape: tuple[int, ...], shards: tuple[ShardRecord, ...]) -> None:
        """Check that the shards tile the tensor; if not all are known, that they do not overlap: `merged` has checked that what is needed is there."""
        if len(shards) == 1 and shards[0].box == whole_box(shape):
            return
        boxes = tuple(shard.box for shard in shards)
        if (shape, boxes) in self._tiled:
            return
        try:
            if self._is_whole:
                check_cover(path, boxes, shape)
            elif overlap(boxes):
                raise hostile(self._at(path), "shards that do not overlap", f"{len(shards)} that do")
        except InvalidState as error:
            raise hostile(self._at(path), error.expected, error.found) from None
        self._tiled.add((shape, boxes))

    def check_overlaps(self, others: Iterable[OtherShards]) -> None:
        beside: dict[int, list[OtherShards]] = {}
        for each in others:
            beside.setdefault(each.file, []).append(each)
        for number, (file, spans) in enumerate(zip(self._files, self._spans, strict=True)):
            where, end, held = f"{self._where}: {file.name}", 0, spans
            for other in beside.get(number, ()):
                first, last = min(other.starts), max(other.stops)
                if first < 8 or last > file.size_bytes:
                    raise hostile(where, f"ranges inside a file of {file.size_bytes} bytes", f"{first}..{last}")
                held = [*held, *zip(other.starts, other.stops, strict=True)]
            for start, stop in sorted(held):
                if start >= end:
                    end = stop
                elif start < stop:
                    raise hostile(where, "ranges that do not overlap", f"{start} after {end}")


def _reference(document: Json, version: int, where: str, own: str) -> FileRecord:
    """A file of another checkpoint of the run: its name must not lead anywhere else."""
    row = object_of(document, where)
    checkpoint = single_name(row.get("checkpoint"), where)
    found = _file({name: value for name, value in row.items() if name != "checkpoint"}, version, where)
    if checkpoint == own or not can_be_referred_to(checkpoint, found.name):
        raise hostile(where, f"a data file of another checkpoint than {own}", shown([checkpoint, found.name]))
    return attrs.evolve(found, checkpoint=checkpoint)


def _file(document: Json, version: int, where: str) -> FileRecord:
    held = "components" if version >= RANK_FILES_VERSION else "component"
    fields(document, {"name", held, "rank", "size_bytes", "digest"}, where, exact=True)
    return FileRecord(
        name=single_name(document["name"], where),
        components=components_in(document, version, where),
        rank=int_of(document["rank"], where),
        size_bytes=int_of(document["size_bytes"], where),
        digest=digest_text(document["digest"], where),
    )
