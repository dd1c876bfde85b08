"""`plan_dcp`: the files of a directory of distributed checkpoints, byte by byte, before any tensor is read."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument, UnsupportedLeaf
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.torch_files.archive_bytes import ALIGNED, archive_around
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_metadata_text import metadata_text
from trainfold.core.torch_files.pickle_machine import Made, Name
from trainfold.core.torch_files.pickle_text import pickle_of
from trainfold.core.torch_files.stored_values import row_major

METADATA: Final = ".metadata"
"""The file that says what is in the others."""

_DATA: Final = "data/0"
_TYPED: Final = {
    "bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half", "bfloat16": "BFloat16",
    "float32": "Float", "float64": "Double", "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip


@final
class DcpEntry(NamedTuple):
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
    members: tuple[tuple[str, bytes], ...]

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
        UnsupportedLeaf: naming an object of another kind, such as a tuple with a tensor in it.
    """
    others = dict(objects or {})
    for name in others.keys() & tensors.keys():
        raise InvalidArgument(
            "plan_dcp.objects", expected="other names than those of tensors", found=name, fix="rename it"
        )
    entries: list[tuple[str, LeafSpec | None, _Members, int | None]] = [
        (name, None, _members(_pickled(name, each)), None) for name, each in others.items()
    ]
    entries += [(name, each, *_around(each.dtype, each.shape)) for name, each in tensors.items()]
    files: list[DcpFile] = []
    begun: list[DcpEntry] = []
    at = 0
    for name, spec, members, data_bytes in entries:
        size = _entry_size(members, data_bytes, at % ALIGNED)
        if begun and at + size > file_bytes:
            files.append(DcpFile(_file(len(files)), tuple(begun)))
            begun, at = [], 0
            size = _entry_size(members, data_bytes, 0)
        begun.append(DcpEntry(name, at, size, spec, members))
        at += size
    if begun:
        files.append(DcpFile(_file(len(files)), tuple(begun)))
    return DcpPlan(tuple(files), metadata_text([(each.name, each.entries) for each in files], paths or {}))


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle_of(value)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(name, expected=error.expected, found=error.found,
                              fix="put numbers there, or leave it out; an optimizer is left out by state.evolve(optimizer=None)") from None  # fmt: skip


def _file(number: int) -> str:
    return f"__0_{number}.distcp"


_Members: TypeAlias = tuple[tuple[str, bytes], ...]


def _members(pickled: bytes) -> _Members:
    return ("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")


@lru_cache(maxsize=4096)
def _entry_size(members: _Members, data_bytes: int | None, at: int) -> int:
    """The bytes of an archive."""
    around = archive_around(members, None if data_bytes is None else (_DATA, data_bytes), at=at)
    return sum(map(len, around)) + (data_bytes or 0)


@lru_cache(maxsize=4096)
def _around(dtype: str, shape: tuple[int, ...]) -> tuple[_Members, int]:
    """The small members of the archive of a tensor, and the bytes of the tensor."""
    return _members(pickle_of(_rebuilt(LeafSpec(dtype, shape)))), size_bytes(dtype, shape)


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


def identity_of(plan: DcpPlan, contents: str) -> str:
    """A digest of a plan and of what says which values its tensors have."""
    return digest_of(plan.metadata + contents.encode())
