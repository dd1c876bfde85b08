"""`FilePlan`: one safetensors file, byte by byte: its header and the byte range of each tensor.

A piece here is what a file stores of one tensor, all of it or a slice; in `backends` a piece is a run of bytes of a copy or a write.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, final

import attrs

from trainfold.core.format.dtypes import STORED, size_bytes, stored_shape
from trainfold.core.format.file_names import storage_key
from trainfold.core.format.manifest import Manifest
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box

ALIGNMENT_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8  # of the header's length, before its text


@final
@attrs.frozen
class TensorPlacement:
    """The byte range of a tensor, or of a slice of one, in a file. It says nothing of memory; see `Place` of the stores for that.

    Attributes:
        path: the leaf path.
        dtype: torch's name of the dtype.
        stored: the safetensors dtype.
        shape: the shape of the stored part, in torch's dtype.
        start: first byte in the file.
        stop: one past its last byte.
        box: the part of the global tensor, as one (start, stop) pair for each dimension.
    """

    path: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box


@final
@attrs.frozen
class FilePlan:
    """One safetensors file: its name, its writer and its exact size.

    Attributes:
        name: a single path component.
        component: the component whose tensors it holds.
        rank: the rank that writes it.
        header: the 8-byte length and the JSON header, padded so that the data begins at a multiple of 4096.
        size_bytes: the size of the whole file.
        tensors: a placement for each stored tensor, in the order of the bytes; the values are elsewhere, in `Snapshot.tensors`.
    """

    name: str
    component: str
    rank: int
    header: bytes
    size_bytes: int
    tensors: tuple[TensorPlacement, ...]


def plan_file(name: str, component: str, rank: int, pieces: Iterable[tuple[str, LeafSpec, Box]]) -> FilePlan:
    """Lay out one file: the header, then every piece, without gaps.

    Args:
        name: a single path component.
        component: the component whose tensors it holds.
        rank: the rank that writes it.
        pieces: the leaf path, spec and box of each stored tensor, or of the stored slice of it.
    """
    # Wide dtypes first: the format allows no gaps between tensors, and this order keeps each one aligned to its item size.
    ordered = sorted(pieces, key=lambda piece: -STORED[piece[1].dtype].itemsize)
    offset = 0
    spans = []
    for path, spec, box in ordered:
        shape, stored, listed, nbytes = _layout(spec.dtype, box)
        end = offset + nbytes
        spans.append((path, spec.dtype, stored, shape, listed, offset, end, box))
        offset = end
    header = _header(
        component, ((path, stored, listed, start, end) for path, _, stored, _, listed, start, end, _ in spans)
    )
    base = len(header)
    placements = tuple(
        TensorPlacement(path, dtype, stored_name, shape, base + start, base + stop, box)
        for path, dtype, stored_name, shape, _, start, stop, box in spans
    )
    return FilePlan(name, component, rank, header, base + offset, placements)


def _header(component: str, spans: Iterable[tuple[str, str, list[int], int, int]]) -> bytes:
    """The first bytes of a file. A span is the path, stored dtype, listed shape, start and stop of a tensor, in the order of the bytes."""
    header: dict[str, Json] = {"__metadata__": {"format": "pt", "trainfold": component}}
    for path, stored, listed, start, stop in spans:
        key = storage_key(path)
        header[path if key in header else key] = {"dtype": stored, "shape": listed, "data_offsets": [start, stop]}
    text = canonical_json(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_of(manifest: Manifest, index: int) -> bytes | None:
    """The header that a save writes into a file, rebuilt from the manifest; None for a file without tensors.

    Law: it equals the header in the plan of the file. So a load can compare the bytes of a header, padding included, although it reads no other
    byte that it does not use.

    Args:
        manifest: the manifest of the checkpoint.
        index: the index of the file in the manifest.
    """
    file = manifest.files[index]
    component = manifest.component(file.component)
    found = [
        (shard.start, shard.stop, record.path, record.dtype, shard.box)
        for table in (() if component is None else component.tensors)
        for record in table
        for shard in record.shards
        if shard.file == index
    ]
    # empty tensors may share a start: then the wider dtype comes first, and otherwise the order of the table, as in `plan_file`
    found.sort(key=lambda piece: (piece[0], piece[1], -STORED[piece[3]].itemsize))
    if not found:
        return None
    base = found[0][0]
    return _header(
        file.component,
        ((path, *_layout(dtype, box)[1:3], start - base, stop - base) for start, stop, path, dtype, box in found),
    )


@lru_cache(maxsize=4096)
def _layout(dtype: str, box: Box) -> tuple[tuple[int, ...], str, list[int], int]:
    """Shape, safetensors dtype, listed shape and size in bytes of a box."""
    shape = tuple(stop - start for start, stop in box)
    return shape, STORED[dtype].name, list(stored_shape(dtype, shape)), size_bytes(dtype, shape)
