"""`read_dcp_metadata`: the `.metadata` of a directory of torch's distributed checkpoints as checked values: which tensors it has, and where each chunk is."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, final

import attrs

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, InvalidState, TrainfoldError
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.slices import Box, check_cover, volume, whole_box
from trainfold.core.printable import printable
from trainfold.core.torch_files.pickle_machine import Made, Name, Rows, read_pickle
from trainfold.core.torch_files.text_rows import DIMENSIONS, PlaceRows

_Chunk: TypeAlias = tuple[str, str | None]
"""The name of a tensor and the first index of a chunk, from `_text_of`; of an object the name alone."""

_Kind: TypeAlias = tuple[str, tuple[int, ...], tuple[tuple[str, Box], ...]]
"""The dtype and the shape of a tensor, and the first index and the box of each of its chunks that has elements."""

PathInState: TypeAlias = tuple[str | int, ...]
"""The keys from the top of a nested state to a value in it."""

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_SHARDS: Final = "torch.distributed._shard"
_CLASSES: Final = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                   "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_PATHS: Final = tuple(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"))  # fmt: skip
NAMES: Final = frozenset({
    *(f"{_CHECKPOINT}.metadata.{name}" for name in _CLASSES),
    *(f"{_SHARDS}.checkpoint.metadata.{name}" for name in _CLASSES),  # torch 1.13
    f"{_CHECKPOINT}.filesystem._StorageInfo", f"{_SHARDS}.checkpoint.filesystem._StorageInfo",
    f"{_SHARDS}.sharded_tensor.metadata.TensorProperties", f"{_SHARDS}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # torch 2.0 to 2.2
    "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    *(f"torch.{name}" for name in STORED), *_PATHS,
})  # fmt: skip
_FULL: Final = {
    kind: frozenset(each for each in NAMES if each.endswith(f".{kind}")) for kind in (*_CLASSES, "_StorageInfo")
}
_ALIKE: Final = _FULL["TensorStorageMetadata"]
_ROW: Final = "row"  # what an index is called that was read together with its place
_LIMIT: Final = 2**62
_FIX: Final = "copy the directory again from where it was written"


@final
class FileRange(NamedTuple):
    """Bytes of a file.

    Attributes:
        file: its path in the directory, with ``/``.
        start: where they begin.
        size: how many.
        transforms: what was done to them, such as a compression; empty as a rule.
        is_raw: whether they are those of a tensor alone, and not a file of `torch.save` of it.
    """

    file: str
    start: int
    size: int
    transforms: tuple[str, ...] = ()
    is_raw: bool = False


@final
class DcpTensor(NamedTuple):
    """A tensor of the directory.

    Attributes:
        dtype: torch's name of it.
        shape: of the whole tensor.
        chunks: each box of it that a rank has written, and where. They cover it once; those without elements are left out.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, FileRange], ...]


@final
@attrs.frozen
class DcpMetadata:
    """What a directory holds.

    Attributes:
        tensors: name -> the tensor.
        objects: name -> where an object that is not a tensor was written.
        paths: name -> the keys by which it is found in the state that was saved, if that was nested.
    """

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, FileRange]
    paths: Mapping[str, PathInState]


def read_dcp_metadata(data: bytes, where: str) -> DcpMetadata:
    """Read the metadata, and check that it describes whole tensors in files of the directory.

    Args:
        data: the contents of `.metadata`.
        where: its path, for messages.

    Raises:
        CheckpointHostile: if it names a class that metadata do not have, or a file outside the directory.
        CheckpointDamaged: if it is cut off, or its chunks do not cover a tensor once.
    """
    try:
        return _read(data, where, _rows)
    except TrainfoldError:  # it is damaged, or refers to the inside of a row
        return _read(data, where, lambda _, __: {})


def _read(data: bytes, where: str, rows: Callable[[bytes, list[Any]], Mapping[str, Rows]]) -> DcpMetadata:
    top = _fields(read_pickle(data, NAMES, where, alike=_ALIKE, rows=rows), "Metadata", where)
    listed, stored = top.get("state_dict_metadata"), top.get("storage_data")
    if type(listed) is not dict or type(stored) is not dict:
        raise _damaged(where, "metadata of a state and of its storage", f"{_word(listed)} and {_word(stored)}")
    found = _stored(stored, where)
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, FileRange] = {}
    kinds: dict[int, _Kind] = {}  # of entries that are one object
    for name, entry in listed.items():
        if type(name) is not str:
            raise _damaged(where, "names that are text", _word(name))
        if _is(entry, "BytesStorageMetadata"):
            objects[name] = _found(found, (name, None), where)
            continue
        kind = kinds.get(id(entry))
        if kind is None:
            kinds[id(entry)] = kind = _kind(entry, f"{where}: {printable(name)}")
        dtype, shape, parts = kind
        if len(parts) == 1 and (place := found.get((name, parts[0][0]))) is not None:  # most, so without a call
            tensors[name] = DcpTensor(dtype, shape, ((parts[0][1], place),))
            continue
        tensors[name] = DcpTensor(
            dtype, shape, tuple([(box, _found(found, (name, first), where)) for first, box in parts])
        )
    return DcpMetadata(tensors, objects, _paths_of(top.get("planner_data"), listed, where))


def _rows(data: bytes, memo: list[Any]) -> dict[str, Rows]:
    """What reads the places of chunks."""

    def places(offset: tuple[int, ...] | None, file: Any, size: int) -> Callable[[str, int], tuple[Made, FileRange]] | None:  # fmt: skip
        if type(file) is not str or not _is_inside(file):
            return None
        first = None if offset is None else _text_of(offset)
        return lambda name, start: (Made(_ROW, (name, first)), FileRange(file, start, size))

    rows = PlaceRows(data, memo, (_FULL["MetadataIndex"], _FULL["_StorageInfo"]), places)
    return dict.fromkeys(_FULL["MetadataIndex"], rows)


def _text_of(offset: tuple[int, ...]) -> str:
    """A first index as a key. The writer of a file can choose numbers that all have one hash; hashes of texts differ from process to process."""
    return str(offset)


def _stored(stored: Mapping[Any, Any], where: str) -> dict[_Chunk, FileRange]:
    """Name and first index of a chunk -> where it is."""
    found: dict[_Chunk, FileRange] = {}
    inside: set[str] = set()  # files that were looked at
    for key, info in stored.items():
        if type(info) is FileRange and type(key) is Made and key.name == _ROW:
            found[key.args] = info
            continue
        index = _fields(key, "MetadataIndex", where)
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str:
            raise _damaged(where, "names that are text", _word(name))
        fields = _fields(info, "_StorageInfo", where)
        file, start, size = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if type(file) is not str or (file not in inside and not _is_inside(file)):
            raise CheckpointHostile(f"{where}: {printable(name)}", expected="a file in its directory",
                                    found=printable(file) if type(file) is str else _word(file), fix="do not use this directory")  # fmt: skip
        inside.add(file)
        if not (type(start) is type(size) is int and 0 <= start < _LIMIT and 0 <= size < _LIMIT):
            raise _damaged(f"{where}: {printable(name)}", "a range of bytes", f"{_word(start)} and {_word(size)}")
        transforms = fields.get("transform_descriptors")
        found[name, None if offset is None else _text_of(_sizes(offset, where))] = (
            FileRange(file, start, size)
            if transforms is None
            else FileRange(file, start, size, _names(transforms, f"{where}: {printable(name)}"))
        )
    return found


def _names(transforms: Any, where: str) -> tuple[str, ...]:
    if type(transforms) not in (list, tuple) or not all(type(each) is str for each in transforms):
        raise _damaged(where, "the names of transforms", _word(transforms))
    return tuple(transforms)


def _is_inside(path: str) -> bool:
    """Whether a relative path stays in its directory, on every system."""
    return "\\" not in path and ":" not in path and path.isprintable() and all(part not in ("", ".", "..") for part in path.split("/"))  # fmt: skip


def _found(stored: Mapping[_Chunk, FileRange], key: _Chunk, where: str) -> FileRange:
    found = stored.get(key)
    if found is None:
        part = "the object" if key[1] is None else f"the chunk at {key[1]}"
        raise _damaged(f"{where}: {printable(key[0])}", f"the place of {part}", "none")
    return found


def _kind(entry: Any, where: str) -> _Kind:
    """What an entry says of a tensor."""
    fields = _fields(entry, "TensorStorageMetadata", where)
    dtype, shape = _dtype(fields.get("properties"), where), _sizes(fields.get("size"), where)
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise _damaged(where, "a list of chunks", _word(chunks))
    found = []
    for each in chunks:
        inner = _fields(each, "ChunkStorageMetadata", where)
        offsets, sizes = _sizes(inner.get("offsets"), where), _sizes(inner.get("sizes"), where)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _damaged(
                where, f"chunks of {len(shape)} dimensions", f"offsets {list(offsets)} and sizes {list(sizes)}"
            )
        if all(sizes):
            found.append(
                (_text_of(offsets), tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True)))
            )
    whole = whole_box(shape)
    if len(found) != 1 or found[0][1] != whole:
        _check_chunks([box for _, box in found], shape, where)
    return dtype, shape, tuple(found)


def _check_chunks(boxes: list[Box], shape: tuple[int, ...], where: str) -> None:
    for box in boxes:
        if any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise _damaged(where, f"chunks inside {list(shape)}", f"one of {[list(side) for side in box]}")
    if not volume(whole_box(shape)):
        return
    try:
        check_cover(where, boxes, shape)
    except InvalidState as error:
        raise _damaged(where, str(error.expected), error.found) from None


def _dtype(properties: Any, where: str) -> str:
    if not _is(properties, "TensorProperties"):
        raise _damaged(where, "TensorProperties", _word(properties))
    state = properties.state
    dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    if type(dtype) is not Name or dtype.text[6:] not in STORED:
        raise _damaged(where, "a dtype", _word(dtype))
    return dtype.text[6:]


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if type(value) is Made and value.name == "torch.Size" and len(value.args) == 1:
        inner = value.args[0]
        if type(inner) is tuple and len(inner) <= DIMENSIONS:
            for each in inner:
                if type(each) is not int or not 0 <= each < _LIMIT:
                    break
            else:
                return inner
    raise _damaged(where, "a torch.Size of sizes", _word(value))


def _paths_of(planned: Any, listed: Mapping[Any, Any], where: str) -> dict[str, PathInState]:
    """The flattened mapping of the default planner. Another planner's data are of no use here."""
    if type(planned) is not dict:
        return {}
    found = {}
    for name, path in planned.items():
        if type(path) is not tuple or name not in listed:
            continue
        try:
            text = ".".join(path)
        except TypeError:  # of some keys that are not text
            if not {type(key) for key in path} <= {str, int}:
                continue
            text = ".".join(map(str, path))
        if text != name:
            raise _damaged(where, f"the keys of {printable(name)}", "those of another name")
        found[name] = path
    return found


def _fields(value: Any, kind: str, where: str) -> dict[str, Any]:
    if type(value) is Made and value.name in _FULL[kind] and not value.args:
        state = value.state
        if type(state) is dict and value.items is None:
            return state
    raise _damaged(where, kind, _word(value))


def _is(value: Any, kind: str) -> bool:
    return type(value) is Made and value.name in _FULL[kind]


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LIMIT


def _word(value: Any) -> str:
    """What a value is; values of a file may hold themselves, so they are not shown."""
    if type(value) in (Made, Name):
        return value.name if type(value) is Made else value.text
    return "nothing" if value is None else type(value).__name__


def _damaged(where: str, expected: str, found: object) -> CheckpointDamaged:
    return CheckpointDamaged(where, expected=expected, found=found, fix=_FIX)
