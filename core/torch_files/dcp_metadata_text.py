"""`metadata_text`: the `.metadata` of a directory of distributed checkpoints, as torch's classes say it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.pickle_machine import Made, Name
from trainfold.core.torch_files.pickle_text import PickleText, integer_text

_META: Final = "torch.distributed.checkpoint.metadata"
_FULL: Final = {
    kind: f"{_META}.{kind}"
    for kind in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "StorageMeta")
}  # fmt: skip
_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"


class HasPlace(Protocol):
    """A tensor or an object in a file; without a spec, an object."""

    @property
    def name(self) -> str: ...  # noqa: D102 - see DcpEntry

    @property
    def start(self) -> int: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def spec(self) -> LeafSpec | None: ...  # noqa: D102


Files: TypeAlias = Sequence[tuple[str, Sequence[HasPlace]]]
"""The name of each file, and what is in it."""


def metadata_text(files: Files, paths: Mapping[str, PathInState]) -> bytes:
    """The contents of `.metadata`.

    There is a row for each tensor in three tables, so these are written row by row, and no objects are made for them.

    Args:
        files: what is where.
        paths: name -> the keys of a nested state; for a name without them, its parts between dots.

    Raises:
        InvalidArgument: if the keys of a name are not its parts.
    """
    text = PickleText()
    text.put(Name(_FULL["Metadata"]))
    text.found.extend(b")\x81}(")
    text.put("state_dict_metadata")
    _put_listed(text, (each for _, entries in files for each in entries))
    text.put("planner_data")
    _put_paths(text, (each.name for _, entries in files for each in entries), paths)
    text.put("storage_data")
    _put_places(text, files)
    text.put("storage_meta")
    text.put(_object("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}))
    text.put("version")
    text.put("1.0.0")
    text.found.extend(b"ub")
    return text.whole()


def _put_listed(text: PickleText, entries: Iterable[HasPlace]) -> None:
    """Name -> what it is. Each place has an object of its own, of which the text is the same for equal tensors."""
    found, known = text.found, dict[tuple[str, tuple[int, ...]], bytes]()
    found += b"}("
    for each in entries:
        text.put(each.name)
        if each.spec is None:
            text.put(_object("BytesStorageMetadata", None))
            continue
        kind = each.spec.dtype, each.spec.shape
        again = known.get(kind)
        if again is None:
            before = text.remembered
            start = len(found)
            text.put(_listed(*kind))
            if text.remembered == before:  # it needs nothing but what is remembered
                known[kind] = bytes(found[start:])
        else:
            found += again
    found += b"u"


def _put_paths(text: PickleText, names: Iterable[str], paths: Mapping[str, PathInState]) -> None:
    """Name -> its keys."""
    text.found.extend(b"}(")
    for name in names:
        path = paths.get(name)
        if path is None:
            path = tuple(name.split("."))
        elif not _is_path_of(path, name):
            raise InvalidArgument(
                "plan_dcp.paths", expected=f"keys that are the parts of {name}", found=path, fix="correct the keys"
            )
        text.put(name)
        if (
            len(path) == 2 and type(path[1]) is str and type(path[0]) is str
        ):  # most; the second key is a text of its own
            text.put(path[0])
            text.put_once(path[1])
            text.found.append(0x86)
        else:
            text.put(path)
    text.found.extend(b"u")


def _is_path_of(path: PathInState, name: str) -> bool:
    try:
        return ".".join(path) == name  # type: ignore[arg-type] # most keys are text
    except TypeError:
        return ".".join(map(str, path)) == name


def _put_places(text: PickleText, files: Files) -> None:
    """Name and first index -> where it is."""
    found = text.found
    found += b"}("
    for file, entries in files:
        rows: dict[int, tuple[bytes, ...]] = {}  # dimensions -> what is between the values of a row
        for each in entries:
            row = None if each.spec is None else rows.get(len(each.spec.shape))
            name = text.again(each.name)
            if row is not None and name is not None:
                head, middle, between, last = row
                found += b"".join((head, name, middle, integer_text(each.start), between, integer_text(each.size), last))  # fmt: skip
                continue
            origin = None if each.spec is None else _sizes((0,) * len(each.spec.shape))
            text.put(_object("MetadataIndex", {"fqn": each.name, "index": None} if origin is None else {"fqn": each.name, "offset": origin, "index": 0}))  # fmt: skip
            place = {"relative_path": file, "offset": each.start, "length": each.size}
            text.put(Made(_INFO, (), state=place, is_new=True))
            if origin is not None:
                rows[len(origin.args[0])] = _between(text, file, origin)
    found += b"u"


def _between(text: PickleText, file: str, origin: Made) -> tuple[bytes, bytes, bytes, bytes]:
    """What is before, between and after the values of a row: a name, a start and a size. All of it was put."""
    index, info, fqn, offset, number, path, length, place, zeros = (
        text.again(each) or b""
        for each in (Name(_FULL["MetadataIndex"]), Name(_INFO), "fqn", "offset", "index", "relative_path", "length", file, origin)
    )  # fmt: skip
    return (
        index + b")\x81}(" + fqn,
        offset + zeros + number + b"K\x00ub" + info + b")\x81}(" + path + place + offset,
        length,
        b"ub",
    )


@lru_cache(maxsize=4096)
def _listed(dtype: str, shape: tuple[int, ...]) -> Made:
    """What the metadata say of a tensor that is one chunk."""
    chunk = _object("ChunkStorageMetadata", {"offsets": _sizes((0,) * len(shape)), "sizes": _sizes(shape)})
    return _object(
        "TensorStorageMetadata", {"properties": _properties(dtype), "size": _sizes(shape), "chunks": [chunk]}
    )


@lru_cache(maxsize=64)
def _properties(dtype: str) -> Made:
    dense = Made("torch.serialization._get_layout", ("torch.strided",))
    state = (Name(f"torch.{dtype}"), dense, False, Made(f"{_META}._MEM_FORMAT_ENCODING", (0,)), False)
    return Made(f"{_META}.TensorProperties", (), state=state, is_new=True)


def _object(kind: str, state: dict[str, Any] | None) -> Made:
    return Made(_FULL[kind], (), state=state, is_new=True)


@lru_cache(maxsize=4096)
def _sizes(sizes: tuple[int, ...]) -> Made:
    return Made("torch.Size", (sizes,))
