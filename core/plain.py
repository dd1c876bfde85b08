"""`check_plain`: refuse tensors whose elements are not all here, or not all elements: a sum of what lies in memory would be another number."""

from typing import Any

import torch

from trainfold.core.errors import InvalidArgument

_FIXES = {
    "DTensor": "call .full_tensor() on it in forward, on every rank: it is a collective call",
    "AsyncCollectiveTensor": "call .wait() on it in forward",
    "MaskedTensor": "give the elements that count: .get_data()[.get_mask()]",
}


def check_plain(where: str, tensor: torch.Tensor) -> None:
    """Refuse DTensors, masked, nested, sparse and wrapped tensors; subclasses that are plain memory, such as parameters, are fine.

    Args:
        where: what it is, for the message.
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
