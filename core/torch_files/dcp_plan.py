"""`plan_dcp`: the files of a directory of distributed checkpoints, byte by byte, before any tensor is read."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files.archive_bytes import ALIGNED, archive_around
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.pickle_machine import Made, Name
from trainfold.core.torch_files.pickle_text import pickle_of
from trainfold.core.torch_files.stored_values import row_major

METADATA: Final = ".metadata"
"""The file that says what is in the others."""

_META: Final = "torch.distributed.checkpoint.metadata"
_FULL: Final = {
    kind: f"{_META}.{kind}"
    for kind in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "StorageMeta")
}  # fmt: skip
_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DATA: Final = "data/0"
_TYPED: Final = {
    "bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half", "bfloat16": "BFloat16",
    "float32": "Float", "float64": "Double", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip


@final
@attrs.frozen
class DcpEntry:
    """A tensor or an object in a file.

    Attributes:
        name: in the directory.
        start: where it begins in the file.
        size: its bytes, with what is around them.
        spec: of the tensor; None for an object.
        members: the small members of its archive, with their contents.
    """

    name: str
    start: int
    size: int
    spec: LeafSpec | None
    members: tuple[tuple[str, bytes], ...] = attrs.field(repr=False)

    @property
    def data_bytes(self) -> int:
        """The bytes of the tensor alone."""
        return 0 if self.spec is None else size_bytes(self.spec.dtype, self.spec.shape)

    def around(self, check_sum: int = 0) -> tuple[bytes, bytes]:
        """What is before and after the bytes of the tensor, whose CRC-32 this is."""
        data = None if self.spec is None else (_DATA, self.data_bytes)
        return archive_around(self.members, data, at=self.start, check_sum=check_sum)


@final
@attrs.frozen
class DcpFile:
    """A file of the directory.

    Attributes:
        name: of the file.
        entries: in the order of their bytes.
    """

    name: str
    entries: tuple[DcpEntry, ...] = attrs.field(repr=lambda each: f"<{len(each)} entries>")

    @property
    def size_bytes(self) -> int:
        """The bytes of the file."""
        return self.entries[-1].start + self.entries[-1].size


@final
@attrs.frozen
class DcpPlan:
    """A directory before it is written.

    Attributes:
        files: with the tensors and objects.
        metadata: the contents of `METADATA`.
    """

    files: tuple[DcpFile, ...]
    metadata: bytes = attrs.field(repr=lambda each: f"<{len(each)} bytes>")

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> size in bytes of each file."""
        return {**{each.name: each.size_bytes for each in self.files}, METADATA: len(self.metadata)}


def plan_dcp(
    tensors: Mapping[str, LeafSpec],
    objects: Mapping[str, Any] | None = None,
    *,
    paths: Mapping[str, PathInState] | None = None,
    file_bytes: int = 1 << 30,
) -> DcpPlan:
    """Plan a directory. Each tensor is one chunk; a reader of any number of ranks reads its parts of it.

    Args:
        tensors: name -> dtype and shape, in the order in which they are written.
        objects: name -> what is not a tensor: numbers, text, lists, tuples and dicts of them.
        paths: name -> the keys of a nested state; for a name without them, its parts between dots.
        file_bytes: after which a new file begins. A tensor is never cut.

    Raises:
        InvalidArgument: if a tensor and an object have one name, or the keys of a name are not its parts.
        UnsupportedLeaf: for an object of another kind.
    """
    others = dict(objects or {})
    for name in others.keys() & tensors.keys():
        raise InvalidArgument(
            "plan_dcp.objects", expected="other names than those of tensors", found=name, fix="rename it"
        )
    entries: list[tuple[str, LeafSpec | None, bytes]] = [(name, None, pickle_of(each)) for name, each in others.items()]
    entries += [(name, each, _pickled(each)) for name, each in tensors.items()]
    files: list[DcpFile] = []
    begun: list[DcpEntry] = []
    at = 0
    for name, spec, pickled in entries:
        entry = _entry(name, spec, pickled, at)
        if begun and at + entry.size > file_bytes:
            files.append(DcpFile(_file(len(files)), tuple(begun)))
            begun, at = [], 0
            entry = _entry(name, spec, pickled, 0)
        begun.append(entry)
        at += entry.size
    if begun:
        files.append(DcpFile(_file(len(files)), tuple(begun)))
    return DcpPlan(tuple(files), pickle_of(_metadata(files, paths or {})))


def _file(number: int) -> str:
    return f"__0_{number}.distcp"


def _entry(name: str, spec: LeafSpec | None, pickled: bytes, at: int) -> DcpEntry:
    data_bytes = None if spec is None else size_bytes(spec.dtype, spec.shape)
    return DcpEntry(
        name, at, _size_around(pickled, data_bytes, at % ALIGNED) + (data_bytes or 0), spec, _members(pickled)
    )


def _members(pickled: bytes) -> tuple[tuple[str, bytes], ...]:
    return ("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")


@lru_cache(maxsize=4096)
def _size_around(pickled: bytes, data_bytes: int | None, at: int) -> int:
    """How many bytes an archive has beside those of its tensor."""
    return sum(map(len, archive_around(_members(pickled), None if data_bytes is None else (_DATA, data_bytes), at=at)))


@lru_cache(maxsize=4096)
def _pickled(spec: LeafSpec) -> bytes:
    return pickle_of(_rebuilt(spec))


def _rebuilt(spec: LeafSpec) -> Made:
    """The call that makes a tensor of its memory."""
    view = (0, spec.shape, row_major(spec.shape), False, Made("collections.OrderedDict", ()))
    count = prod(spec.shape)
    typed = _TYPED.get(spec.dtype)
    if typed is not None:
        storage = ("storage", Name(f"torch.{typed}Storage"), "0", "cpu", count)
        return Made("torch._utils._rebuild_tensor_v2", (Made("persistent", storage), *view))
    storage = ("storage", Name("torch.storage.UntypedStorage"), "0", "cpu", count * STORED[spec.dtype].itemsize)
    return Made(
        "torch._utils._rebuild_tensor_v3", (Made("persistent", storage), *view, Name(f"torch.{spec.dtype}"), None)
    )


def _metadata(files: Sequence[DcpFile], paths: Mapping[str, PathInState]) -> Made:
    listed: dict[Any, Any] = {}
    stored: dict[Any, Any] = {}
    planned: dict[Any, Any] = {}
    for file in files:
        for each in file.entries:
            path = paths.get(each.name)
            if path is None:
                path = tuple(each.name.split("."))
            elif ".".join(map(str, path)) != each.name:
                raise InvalidArgument(
                    "plan_dcp.paths",
                    expected=f"keys that are the parts of {each.name}",
                    found=path,
                    fix="correct the keys",
                )
            planned[each.name] = path
            index = {"fqn": each.name, "index": None} if each.spec is None else {"fqn": each.name, "offset": _size((0,) * len(each.spec.shape)), "index": 0}  # fmt: skip
            place = {"relative_path": file.name, "offset": each.start, "length": each.size}
            stored[_object("MetadataIndex", index)] = Made(_INFO, (), state=place, is_new=True)
            listed[each.name] = _object("BytesStorageMetadata", None) if each.spec is None else _listed(each.spec)
    fields = {"state_dict_metadata": listed, "planner_data": planned, "storage_data": stored,
              "storage_meta": _object("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}),
              "version": "1.0.0"}  # fmt: skip
    return _object("Metadata", fields)


@lru_cache(maxsize=4096)
def _listed(spec: LeafSpec) -> Made:
    """What the metadata say of a tensor that is one chunk."""
    chunk = _object("ChunkStorageMetadata", {"offsets": _size((0,) * len(spec.shape)), "sizes": _size(spec.shape)})
    return _object(
        "TensorStorageMetadata", {"properties": _properties(spec.dtype), "size": _size(spec.shape), "chunks": [chunk]}
    )


@lru_cache(maxsize=64)
def _properties(dtype: str) -> Made:
    dense = Made("torch.serialization._get_layout", ("torch.strided",))
    state = (Name(f"torch.{dtype}"), dense, False, Made(f"{_META}._MEM_FORMAT_ENCODING", (0,)), False)
    return Made(f"{_META}.TensorProperties", (), state=state, is_new=True)


def _object(kind: str, state: dict[str, Any] | None) -> Made:
    return Made(_FULL[kind], (), state=state, is_new=True)


@lru_cache(maxsize=4096)
def _size(sizes: tuple[int, ...]) -> Made:
    return Made("torch.Size", (sizes,))


def identity_of(plan: DcpPlan, contents: str) -> str:
    """A digest of a plan and of what says which values its tensors have."""
    return digest_of(plan.metadata + contents.encode())
