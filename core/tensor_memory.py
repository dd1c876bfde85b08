"""The memory of a tensor: its bytes, without a copy if they are contiguous on a CPU, and a check that it is plain memory."""

from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from trainfold.core.errors import InvalidArgument, UnsupportedLeaf

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
