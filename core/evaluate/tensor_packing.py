"""Tensors of any dtype and shape as two int64 vectors, losslessly, because accumulators may only have int64 leaves."""

import torch

from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import byte_view

_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)  # the index of a dtype is its code in saved accumulators: append only
_WORD_BYTES = 8


def pack(tensors: list[torch.Tensor], where: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """Dense tensors as (header, words): their dtypes and shapes, on the CPU, and their bits, on their device.

    Laws: `unpack` gives the same bits back; the vectors of two lists, concatenated, are those of the lists concatenated.

    Args:
        tensors: dense tensors on one device; they are copied.
        where: the name of the tensors, for the error.

    Raises:
        UnsupportedLeaf: for a dtype that is not a usual one, or a tensor that is not dense.

    Examples:
        >>> pack([torch.tensor([1.0, 2.0])])  # code 8 is float32, then one dimension, of size 2
        (tensor([8, 1, 2]), tensor([4611686019492741120]))
    """
    header: list[int] = []
    words = []
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise UnsupportedLeaf(where, expected=f"a dense tensor of one of {[dtype_name(each) for each in _DTYPES]}",
                                  found=f"{tensor.layout} {tensor.dtype}", fix="convert it to one of these")  # fmt: skip
        header += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        data = byte_view(tensor)
        room = torch.zeros(-(-len(data) // _WORD_BYTES), dtype=torch.int64, device=tensor.device)
        room.view(torch.uint8)[: len(data)] = data
        words.append(room)
    return torch.tensor(header, dtype=torch.int64), torch.cat(words) if words else torch.zeros(0, dtype=torch.int64)


def unpack(header: torch.Tensor, words: torch.Tensor, where: str = "tensor") -> list[torch.Tensor]:
    """The tensors that `pack` was given, as copies on the device of the words.

    Raises:
        UnsupportedLeaf: if `pack` cannot have made the vectors.

    Examples:
        >>> unpack(*pack([torch.tensor([True, False]), torch.tensor(0.5, dtype=torch.bfloat16)]))
        [tensor([ True, False]), tensor(0.5000, dtype=torch.bfloat16)]
    """
    numbers, at, taken, found = header.tolist(), 0, 0, []
    while at < len(numbers):
        code, ndim = (*numbers[at : at + 2], 0)[:2]
        shape = numbers[at + 2 : at + 2 + ndim]
        if not 0 <= code < len(_DTYPES) or ndim < 0 or len(shape) < ndim or min(shape, default=0) < 0:
            raise _malformed(where, numbers)
        dtype, length = _DTYPES[code], 1
        for size in shape:
            length *= size
        size_bytes = length * dtype.itemsize
        count = -(-size_bytes // _WORD_BYTES)
        if taken + count > len(words):
            raise _malformed(where, numbers)
        data = words[taken : taken + count].clone().view(torch.uint8)[:size_bytes]
        found.append(data.view(dtype).reshape(shape))
        at, taken = at + 2 + ndim, taken + count
    if taken != len(words):
        raise _malformed(where, numbers)
    return found


def _malformed(where: str, numbers: list[int]) -> UnsupportedLeaf:
    return UnsupportedLeaf(where, expected="a header and the words that it describes", found=f"the header {numbers[:8]}",
                           fix="pass an accumulator that this metric made")  # fmt: skip
