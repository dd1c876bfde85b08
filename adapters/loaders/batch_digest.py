"""`batch_digest`: what a batch holds, as a text that another draw of it can be compared with."""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch
import xxhash

from trainfold.core import tree
from trainfold.core.codec import DIGEST_PREFIX, leaf_digest, tensor_bytes
from trainfold.core.errors import TrainfoldError

_DEPTH: Final = 4
_COPIED: Final = 1 << 16  # a copy of so many bytes costs less than an array over them


def batch_digest(batch: Any) -> str:
    """The digest of a batch's tensors, arrays and plain values, in any containers.

    The attributes of an object are looked at as well. What else it holds counts by its class alone, since its text may
    hold an address.

    Examples:
        >>> one = batch_digest({"x": torch.zeros(2), "y": [1, "a"]})
        >>> one == batch_digest({"x": torch.zeros(2), "y": [1, "a"]}), one == batch_digest({"x": torch.ones(2)})
        (True, False)
    """
    found = xxhash.xxh3_128()
    _add(found, batch, _DEPTH)
    return DIGEST_PREFIX + str(found.hexdigest())


def content(batch: Any) -> str:
    """The digests of a batch's leaves, one after another.

    Examples:
        >>> content([1, 2]).count(" ")
        1
    """
    return " ".join(_leaf(leaf) for leaf in tree.leaves(batch))


def _add(found: Any, value: Any, depth: int) -> None:
    kind = type(value)
    if kind is torch.Tensor and value.is_cpu and value.layout is torch.strided and _is_plain(value):
        size = value.nbytes
        found.update(_heading(value.dtype, value.shape))
        if size <= _COPIED and value.is_contiguous():
            found.update(ctypes.string_at(value.data_ptr(), size) if size else b"")
        else:
            found.update(tensor_bytes(value))
    elif kind is list or kind is tuple:
        found.update(b"[%d" % len(value))
        for each in value:
            _add(found, each, depth)
    elif isinstance(value, torch.Tensor):
        found.update(_heading(value.dtype, value.shape))
        found.update(_leaf(value).encode())
    elif isinstance(value, Mapping):  # a class of its own too, such as the batch of a tokenizer
        for key, each in value.items():
            found.update(f"{key}:".encode())
            _add(found, each, depth)
    else:
        leaves = tree.leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            _add(found, leaves, depth)
            return
        digest = _digest(value)
        found.update((digest or kind.__qualname__).encode())
        if digest is None and depth and hasattr(value, "__dict__"):
            _add(found, vars(value), depth - 1)


@lru_cache(maxsize=1024)
def _heading(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{shape}".encode()


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)


def _leaf(leaf: Any) -> str:
    return _digest(leaf) or type(leaf).__qualname__


def _digest(leaf: Any) -> str | None:
    try:
        return leaf_digest(leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf)
    except TrainfoldError:
        return None
