"""`write_dcp`: writes a directory that `torch.distributed.checkpoint.load` reads, tensor by tensor; it has its name when all of it is there."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from trainfold.backends.formats.file_sections import bytes_from
from trainfold.backends.formats.staged_directory import staged_directory
from trainfold.backends.stores.protocol import Buffer
from trainfold.core.errors import InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.torch_files.dcp_plan import METADATA, DcpEntry, DcpFile, DcpPlan, identity_of

_PIECE_BYTES: Final = 256 << 10  # summed, hashed and copied while it is in the processor's cache

ReadPart: TypeAlias = Callable[[str, Box], torch.Tensor]
"""Returns a part of a tensor, by its name and a (start, stop) pair for each dimension."""


def write_dcp(
    plan: DcpPlan, read: ReadPart, path: str | Path, *, identity: str = "", check: Callable[[], Any] = lambda: None
) -> None:
    """Write a directory. What a killed process has written of it stays, for a call with an equal plan and identity.

    Memory: one tensor, and what its source needs to read it.

    Args:
        plan: of the directory.
        read: the tensors.
        path: of the directory. It does not exist yet, is empty, or has the very files that are to be written, which are compared.
        identity: a text that is another one if the values are.
        check: called when everything is read; it raises if what was read may not be what was there at the call.

    Raises:
        InvalidArgument: if there is something else at the path.
        InvalidState: if a tensor has another dtype or shape than the plan.
        SaveFailed: if it cannot be written.
    """
    with staged_directory(path, plan=identity_of(plan, identity), files=plan.sizes) as staged:
        for file in plan.files:
            staged.write(file.name, partial(_bytes_from, file, read), size_bytes=file.size_bytes)
        check()
        staged.write(METADATA, [plan.metadata], size_bytes=len(plan.metadata))
        staged.commit()


def _bytes_from(file: DcpFile, read: ReadPart, start: int) -> Iterator[Buffer]:
    return bytes_from(((each.size, partial(_entry_bytes, each, read)) for each in file.entries), start)


def _entry_bytes(entry: DcpEntry, read: ReadPart) -> Iterator[Buffer]:
    if entry.spec is None:
        yield from entry.around()
        return
    tensor = read(entry.name, whole_box(entry.spec.shape))
    found = LeafSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    if found != LeafSpec(entry.spec.dtype, entry.spec.shape):
        raise InvalidState(entry.name, expected=entry.spec, found=found, fix="let the source give what it has listed")
    data = tensor_bytes(tensor)
    del tensor
    check_sum = 0
    yield entry.around()[0]
    for at in range(0, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        check_sum = zlib.crc32(piece, check_sum)
        yield piece
    yield entry.around(check_sum)[1]
