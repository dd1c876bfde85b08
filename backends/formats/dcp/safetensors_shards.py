"""`shards_metadata`: what is in a directory of safetensors files of which each is the part of a rank, as `HuggingFaceStorageWriter` writes them with `save_distributed`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfold.core.errors import CheckpointDamaged, InvalidState
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.slices import Box, check_cover
from trainfold.core.printable import printable
from trainfold.core.torch_files.dcp_metadata import DcpMetadata, DcpTensor, FileRange
from trainfold.core.weights.hub.file_header import HUB_DTYPES, LENGTH_BYTES

_KEY: Final = "DCP_SHARDING_INFO"
_DTYPES: Final = {stored: name for name, stored in HUB_DTYPES.items()}
_FIX: Final = "copy the directory again from where it was written"


def shards_metadata(path: Path) -> DcpMetadata | None:
    """Read the headers of the files. None if they do not say where their parts belong.

    Raises:
        CheckpointDamaged: if a file is not one of safetensors, or the parts do not cover a tensor once.
    """
    found: dict[str, list[tuple[str, Box, FileRange]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, part in _parts(file).items():
            found.setdefault(name, []).append(part)
    if not found:
        return None
    return DcpMetadata({name: _tensor(f"{path}: {printable(name)}", parts) for name, parts in found.items()}, {}, {})


def _parts(file: Path) -> dict[str, tuple[str, Box, FileRange]]:
    """Name -> dtype, place in the whole tensor, and bytes of each part in a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as opened:
            begin = LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
        with safe_open(file, framework="pt") as tensors:
            places = (tensors.metadata() or {}).get(_KEY)
            forms = [
                (name, (each := tensors.get_slice(name)).get_dtype(), tuple(each.get_shape()))
                for name in tensors.offset_keys()
            ]
    except (OSError, SafetensorError) as error:
        raise CheckpointDamaged(str(file), expected="a file of safetensors", found=error, fix=_FIX) from error
    if places is None:
        return {}
    offsets = _offsets(file, places)
    found = {}
    for name, stored, shape in forms:
        starts = offsets.get(name)
        dtype = _DTYPES.get(stored)
        if dtype is None or starts is None or len(starts) != len(shape):
            raise CheckpointDamaged(f"{file}: {printable(name)}", expected=f"a dtype, and {len(shape)} offsets in {_KEY}", found=f"{stored} and {starts}", fix=_FIX)  # fmt: skip
        size = size_bytes(dtype, shape)
        box = tuple((start, start + length) for start, length in zip(starts, shape, strict=True))
        found[name] = dtype, box, FileRange(file.name, begin, size, is_raw=True)
        begin += size
    return found


def _offsets(file: Path, text: str) -> Mapping[str, tuple[int, ...]]:
    try:
        listed: Any = json.loads(text)
        found = {name: tuple(each["saved_offsets"]) for name, each in listed.items()}
        if all(type(start) is int and 0 <= start < 2**62 for each in found.values() for start in each):
            return found
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    raise CheckpointDamaged(
        str(file), expected=f"{_KEY} with saved_offsets for each name", found="another text", fix=_FIX
    )


def _tensor(where: str, parts: list[tuple[str, Box, FileRange]]) -> DcpTensor:
    dtypes = {dtype for dtype, _, _ in parts}
    if len(dtypes) > 1 or len({len(box) for _, box, _ in parts}) > 1:
        raise CheckpointDamaged(
            where, expected="parts of one dtype and number of dimensions", found=sorted(dtypes), fix=_FIX
        )
    shape = tuple(max(sides) for sides in zip(*([stop for _, stop in box] for _, box, _ in parts), strict=True))
    chunks = [(box, place) for _, box, place in parts if place.size]
    try:
        if all(shape):
            check_cover(where, [box for box, _ in chunks], shape)
    except InvalidState as error:
        raise CheckpointDamaged(where, expected=error.expected, found=error.found, fix=_FIX) from None
    return DcpTensor(dtypes.pop(), shape, tuple(chunks))
