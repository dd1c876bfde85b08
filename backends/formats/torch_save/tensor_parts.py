"""`read_box`: a box of a tensor that `torch.save` has written, read into memory; bytes of other boxes are not read, or not kept."""

from typing import Final

import torch

from trainfold.backends.formats.native.scatter import Inside, Scatter
from trainfold.backends.formats.torch_save.byte_range import ByteRange
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.slices import Box
from trainfold.core.tensor_memory import byte_array
from trainfold.core.torch_files.stored_values import StoredTensor

_BITS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # bits are moved, and some dtypes cannot be copied
_PIECE_BYTES: Final = 8 << 20  # read at once where only a part of it is kept


def read_box(member: ByteRange, stored: StoredTensor, box: Box, into: torch.Tensor) -> None:
    """Read a box of a tensor.

    Args:
        member: the bytes of its storage.
        stored: the tensor.
        box: of it.
        into: memory of the shape of the box and the tensor's dtype, on the CPU.

    Raises:
        CheckpointTorn: if bytes are not there.
    """
    if not into.numel():
        return
    _read(member, stored, box, into)
    if stored.is_conjugate:
        into.conj_physical_()
    if stored.is_negative:
        into.neg_()


def _read(member: ByteRange, stored: StoredTensor, box: Box, into: torch.Tensor) -> None:
    """Read the bits."""
    if not stored.is_contiguous:
        _strided(member, stored, into, box)
        return
    itemsize = STORED[stored.dtype].itemsize
    first = stored.start * itemsize
    inside = Inside(stored.shape, tuple(start for start, _ in box))
    run = inside.run(into.shape)
    if run is not None and into.is_contiguous():
        member.read_into(first + run[0] * itemsize, _memory(into))
        return
    scatter = Scatter(into, inside)
    start, stop = (each * itemsize for each in _reach(stored.shape, box))
    for at, data in member.pieces(first + start, first + stop, _PIECE_BYTES // itemsize * itemsize):
        scatter.put(data, at - first)


def _reach(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """The first element of a box, counted in its tensor row by row, and one past the last."""
    first = last = 0
    for size, (start, stop) in zip(shape, box, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return first, last + 1


def _strided(member: ByteRange, stored: StoredTensor, into: torch.Tensor, box: Box) -> None:
    """From a tensor whose elements have another order: the memory between the first and the last of a box, cut where it is long."""
    dtype = torch_dtype(stored.dtype)
    spans = [(stop - start - 1) * stride for (start, stop), stride in zip(box, stored.strides, strict=True)]
    count = sum(spans) + 1
    if count * dtype.itemsize > _PIECE_BYTES and any(spans):
        dim = spans.index(max(spans))
        start, stop = box[dim]
        middle = (start + stop) // 2
        for part in ((start, middle), (middle, stop)):
            inner = into.narrow(dim, part[0] - start, part[1] - part[0])
            _strided(member, stored, inner, (*box[:dim], part, *box[dim + 1 :]))
        return
    first = stored.start + sum(start * stride for (start, _), stride in zip(box, stored.strides, strict=True))
    kind = _BITS.get(dtype.itemsize, dtype)
    memory = torch.empty(count, dtype=kind)
    member.read_into(first * dtype.itemsize, _memory(memory))
    into.view(kind).copy_(memory.as_strided(into.shape, stored.strides))


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(byte_array(tensor))  # type: ignore[arg-type] # an array is a buffer
