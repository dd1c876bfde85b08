"""The memory of a tensor: its bytes, without a copy if they are contiguous on a CPU, bytes that say that it has no value yet, and a check that it is plain memory."""

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from trainfold.core.errors import InvalidArgument, UnsupportedLeaf

_CHUNK: Final = 1 << 20  # elements
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD: Final = 0xA5  # of dtypes without NaN
_ENOUGH: Final = 8  # bytes: a smaller value without NaN may be what it looks like by chance
_FIXES = {
    "DTensor": "call .full_tensor() on it in forward, on every rank: it is a collective call",
    "AsyncCollectiveTensor": "call .wait() on it in forward",
    "MaskedTensor": "pass the elements that count: .get_data()[.get_mask()]",
}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, contiguous, row-major and little-endian; no copy if the tensor is so already, on a CPU.

    Args:
        tensor: any shape, any dtype of ``STORED``, on any device.

    Returns:
        A one-dimensional view of unsigned bytes; it keeps the memory alive.

    Examples:
        >>> bytes(tensor_bytes(torch.tensor([1, -1], dtype=torch.int16))).hex()
        '0100ffff'
    """
    if not np.little_endian:
        raise UnsupportedLeaf("byte order", expected="little", found="big", fix="use a little-endian host")
    return memoryview(byte_array(byte_view(tensor.cpu())))  # type: ignore[arg-type] # an array is a buffer


def byte_array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU as an array of bytes, which keeps it alive.

    Not ``tensor.numpy()``: torch would then refuse for good to resize the storage, and a save must not change a model.

    Examples:
        >>> weight = torch.ones(2, dtype=torch.int16)
        >>> byte_array(weight), weight.untyped_storage().resizable()
        (array([1, 0, 1, 0], dtype=uint8), True)
    """
    return np.asarray(_Memory(tensor))


@final
class _Memory:
    """The array interface through which numpy reads another object's memory."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept = tensor
        place = (tensor.data_ptr(), False)  # False: it may be written to
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (tensor.nbytes,), "data": place}


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory.

    Examples:
        >>> weight = torch.zeros(2, 2)
        >>> is_same_memory(weight, weight[:]), is_same_memory(weight, weight.t()), is_same_memory(weight, weight.clone())
        (True, False, False)
    """
    forms = [(each.device, each.dtype, each.shape, each.stride(), each.data_ptr()) for each in (one, other)]
    return forms[0] == forms[1]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor on its device, row-major, as uint8; no copy if it is contiguous.

    Examples:
        >>> byte_view(torch.tensor([1, -1], dtype=torch.int16))
        tensor([  1,   0, 255, 255], dtype=torch.uint8)
    """
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # otherwise a copy turns every byte that is not 0 into a 1
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # reshape would keep any stride of one element


def fill_unset(memory: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fill memory with the bytes of tensors that have no value yet: a NaN that no arithmetic makes, or an odd number.

    Being unset is thus in the memory itself: whatever overwrites it is a value, and what computes with it shows.

    Args:
        memory: of new tensors.
        dtype: of its elements.

    Examples:
        >>> weight = torch.zeros(2)
        >>> fill_unset(weight.untyped_storage(), weight.dtype)
        >>> weight, unset_elements(weight), looks_unset(weight)
        (tensor([nan, nan]), 2, True)
    """
    torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory).fill_(_unset_byte(dtype))


def unset_elements(tensor: torch.Tensor) -> int:
    """How many elements of a tensor have no value yet. Of dtypes without NaN it is all of them or none.

    Args:
        tensor: any dtype, on any device; it is read in pieces.

    Examples:
        >>> unset_elements(torch.tensor([1.0, float("nan")]))  # the NaN of arithmetic is another one
        0
    """
    if not tensor.numel() or tensor.is_meta:
        return 0
    words = _as_words(tensor)
    word = _unset_word(tensor.dtype, words.dtype.itemsize)
    starts = range(0, words.numel(), _CHUNK)
    if words.is_cpu:
        numbers = byte_array(words).view(f"i{words.dtype.itemsize}" if words.dtype.itemsize > 1 else "u1")
        found = sum(int(np.count_nonzero(numbers[start : start + _CHUNK] == word)) for start in starts)  # at 15 GB/s
    else:
        found = sum(int(torch.count_nonzero(words[start : start + _CHUNK] == word)) for start in starts)
    found //= tensor.dtype.itemsize // words.dtype.itemsize
    if _has_nan(tensor.dtype):
        return found
    return found if found == tensor.numel() and tensor.nbytes >= _ENOUGH else 0


def looks_unset(tensor: torch.Tensor) -> bool:
    """Whether the first element of a tensor has no value yet; it reads no more than that of tensors with NaN.

    Examples:
        >>> looks_unset(torch.zeros(2))
        False
    """
    if not tensor.numel() or tensor.is_meta:
        return False
    if not _has_nan(tensor.dtype):
        return unset_elements(tensor) > 0
    return unset_elements(tensor[(0,) * tensor.dim()]) > 0


def _unset_byte(dtype: torch.dtype) -> int:
    if not _has_nan(dtype):
        return _ODD
    return 0x80 if str(dtype).endswith("fnuz") else 0xFF  # the one NaN of dtypes without a negative zero


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and "float4" not in str(dtype)


def _unset_word(dtype: torch.dtype, size: int) -> int:
    return int.from_bytes(bytes([_unset_byte(dtype)]) * size, "little", signed=size > 1)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers of their size, in one dimension."""
    values = tensor.detach()
    if values.dtype is torch.complex128:
        values = torch.view_as_real(values.resolve_conj())
    elif values.is_complex():
        values = values.resolve_conj()
    return values.resolve_neg().view(_WORDS[values.dtype.itemsize]).reshape(-1)


def check_plain(where: str, tensor: torch.Tensor) -> None:
    """Refuse DTensors, masked, nested, sparse and wrapped tensors; subclasses that are plain memory, such as parameters, are fine.

    Args:
        where: the name of the tensor, for the message.
        tensor: any tensor.

    Raises:
        InvalidArgument: naming the kind of tensor.

    Examples:
        >>> check_plain("loss", torch.nn.Parameter(torch.ones(2)))
        >>> check_plain("loss", torch.eye(2).to_sparse())
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: loss: expected a tensor that is plain memory, found a tensor with torch.sparse_coo; \
make it a plain tensor in forward, as .to_dense() does
    """
    kind: Any = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found = kind.__name__
    elif tensor.is_nested:
        found = "a nested tensor"
    elif tensor.layout is not torch.strided:
        found = f"a tensor with {tensor.layout}"
    else:
        return
    fix = _FIXES.get(found, "make it a plain tensor in forward, as .to_dense() does")
    raise InvalidArgument(where, expected="a tensor that is plain memory", found=found, fix=fix)
