"""Reading the header of a safetensors file that may be hostile, for ``verify`` and ``inspect``."""

from collections.abc import Mapping
from math import prod
from typing import Any, Final, final

import attrs

from trainfold.backends.stores.os_errors import missing
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointTorn
from trainfold.core.format.strict_json import count, fields, hostile, list_of, strict_json, text_of

HEADER_LIMIT_BYTES: Final = 100_000_000  # that of the safetensors library
_LENGTH_BYTES: Final = 8
_DIMENSIONS_LIMIT: Final = 64
_ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@final
@attrs.frozen
class HeaderEntry:
    """One tensor of a safetensors file.

    Attributes:
        dtype: the safetensors dtype.
        shape: the shape in the file.
        start: first byte in the file.
        stop: one past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@final
@attrs.frozen
class FileHeader:
    """The checked header of a safetensors file.

    Attributes:
        tensors: name -> entry, in the order of their bytes; without overlaps and holes.
        metadata: the free text of the file.
        size_bytes: the size of the whole file.
    """

    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    size_bytes: int


def read_header(store: Store, name: str) -> FileHeader:
    """Read and check the header of a file. Memory is bounded by the size of the file.

    Raises:
        CheckpointMissing: if the file does not exist.
        CheckpointTorn: if the file ends before its header or its tensors do.
        CheckpointHostile: for duplicate keys, unknown dtypes, and ranges that overlap, leave holes, leave the file or
            have another size than dtype and shape.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> store.write("a", [(2).to_bytes(8, "little"), b"{}"], size_bytes=10)
        >>> read_header(store, "a")
        FileHeader(tensors={}, metadata={}, size_bytes=10)
    """
    where = f"{store.url}/{name}"
    size = store.size(name)
    if size is None:
        raise missing(where)
    if size < _LENGTH_BYTES:
        raise _torn(where, _LENGTH_BYTES, size)
    length = int.from_bytes(store.read(name, stop=_LENGTH_BYTES), "little")
    if length > HEADER_LIMIT_BYTES:
        raise hostile(where, f"a header of at most {HEADER_LIMIT_BYTES} bytes", f"{length} bytes")
    base = _LENGTH_BYTES + length
    if base > size:
        raise _torn(where, base, size)
    text = store.read(name, start=_LENGTH_BYTES, stop=base)
    if len(text) != length:
        raise _torn(where, base, _LENGTH_BYTES + len(text))
    document = strict_json(text, where)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise hostile(where, "metadata of texts", "something else")
    entries = {key: _entry(value, base, f"{where} {key[:80]!r}") for key, value in document.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_ranges(ordered, base, size, where)
    return FileHeader(ordered, metadata, size)


def _check_ranges(ordered: Mapping[str, HeaderEntry], base: int, size: int, where: str) -> None:
    position = base
    for key, entry in ordered.items():
        if entry.start != position:
            fault = "an overlap" if entry.start < position else "a hole"
            raise hostile(f"{where} {key[:80]!r}", f"a start at byte {position}", f"{fault}: {entry.start}")
        position = entry.stop
    if position > size:
        raise _torn(where, position, size)
    if position < size:
        raise hostile(where, f"{position} bytes", f"{size - position} more that belong to no tensor")


def _entry(value: Any, base: int, where: str) -> HeaderEntry:
    fields(value, {"dtype", "shape", "data_offsets"}, where, exact=True)
    dtype = text_of(value["dtype"], where)
    if dtype not in _ITEM_BYTES:
        raise hostile(where, f"a dtype among {sorted(_ITEM_BYTES)}", repr(dtype)[:40])
    shape = tuple(count(size, where) for size in list_of(value["shape"], where)[: _DIMENSIONS_LIMIT + 1])
    offsets = [count(offset, where) for offset in list_of(value["data_offsets"], where)[:3]]
    if len(shape) > _DIMENSIONS_LIMIT or len(offsets) != 2:
        raise hostile(where, f"two offsets and at most {_DIMENSIONS_LIMIT} dimensions", "more or fewer")
    start, stop = offsets
    if stop - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise hostile(where, f"a range of {prod(shape) * _ITEM_BYTES[dtype]} bytes", f"[{start}, {stop})")
    return HeaderEntry(dtype, shape, base + start, base + stop)


def _torn(where: str, expected_bytes: int, found_bytes: int) -> CheckpointTorn:
    return CheckpointTorn(
        where,
        expected=f"at least {expected_bytes} bytes",
        found=f"{found_bytes}",
        fix="this file was cut off: load an earlier checkpoint",
    )
