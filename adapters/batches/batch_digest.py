"""`batch_digest`: digests the contents of a batch into a short text, to compare with the same batch drawn again."""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
import xxhash

from trainfold.core import tree
from trainfold.core.errors import TrainfoldError
from trainfold.core.format.codec import leaf_digest
from trainfold.core.tensor_memory import tensor_bytes

_DEPTH: Final = 4
_COPIED: Final = 1 << 16  # up to this size a copy is cheaper than a view; above it, only blocks are read
_BLOCKS: Final = 16
_BLOCK: Final = 1 << 12
_SHOWN: Final = 4
PREFIX: Final = "xxh3-blocks:"  # older versions read every byte and wrote "xxh3:"


def batch_digest(batch: Any) -> str:
    """Digest the tensors, arrays and plain values of a batch, in any containers.

    The digest includes the attributes of objects. Any other value counts by its class alone, because its `repr` may contain
    an address.

    For a tensor or array above 64 KiB, only 16 evenly spaced blocks of 4 KiB are read, including the first and the last
    bytes. A different dataset, transform, tokenizer or collate changes nearly every sample, so the blocks show it. A few
    changed pixels may go unseen.

    Examples:
        >>> one = batch_digest({"x": torch.zeros(2), "y": [1, "a"]})
        >>> one == batch_digest({"x": torch.zeros(2), "y": [1, "a"]}), one == batch_digest({"x": torch.ones(2)})
        (True, False)
    """
    found = xxhash.xxh3_128()
    _add(found, batch, _DEPTH)
    return PREFIX + str(found.hexdigest())


def batch_kind(batch: Any, depth: int = 2) -> str:
    """Describe a batch in a few words, so that an error can show what differs.

    Examples:
        >>> batch_kind([torch.zeros(2, 3), {"y": torch.zeros(2, dtype=torch.int64)}, "a"])
        '[float32[2, 3], {y: int64[2]}, str]'
    """
    if isinstance(batch, torch.Tensor) and batch.is_nested:
        return f"nested {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, torch.Tensor | np.ndarray):
        return _kind(batch.dtype, tuple(batch.shape))
    if depth and isinstance(batch, Mapping):
        shown = [f"{key}: {batch_kind(each, depth - 1)}" for key, each in islice(batch.items(), _SHOWN)]
        return f"{{{', '.join(shown)}{', ...' if len(batch) > _SHOWN else ''}}}"[:200]
    if depth and type(batch) in (list, tuple):
        shown = [batch_kind(each, depth - 1) for each in batch[:_SHOWN]]
        return f"[{', '.join(shown)}{f', ... {len(batch)} in all' if len(batch) > _SHOWN else ''}]"[:200]
    return type(batch).__qualname__


def content(batch: Any) -> str:
    """The digests of a batch's leaves, separated by spaces.

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
        if value.is_contiguous():
            _add_memory(found, value.data_ptr(), size)
        else:
            found.update(tensor_bytes(value))
    elif kind is list or kind is tuple:
        found.update(b"[%d" % len(value))
        for each in value:
            _add(found, each, depth)
    # it has no shape, or one that prints differently each time
    elif isinstance(value, torch.Tensor) and value.is_nested:
        found.update(b"nested")
        _add(found, value.unbind(), depth)
    elif isinstance(value, torch.Tensor):
        found.update(_heading(value.dtype, value.shape))
        found.update(_leaf(value).encode())
    elif isinstance(value, Mapping):  # also classes such as a tokenizer's batch
        for key, each in value.items():
            found.update(f"{key}:".encode())
            _add(found, each, depth)
    else:
        _add_other(found, value, depth)


def _add_other(found: Any, value: Any, depth: int) -> None:
    kind = type(value)
    if kind is np.ndarray and value.nbytes > _COPIED and value.flags.c_contiguous and not value.dtype.hasobject:
        found.update(f"numpy {value.dtype.str}{value.shape}".encode())
        _add_memory(found, value.ctypes.data, value.nbytes)
        return
    leaves = tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        _add(found, leaves, depth)
        return
    digest = _digest(value)
    found.update((digest or kind.__qualname__).encode())
    if digest is None and depth and hasattr(value, "__dict__"):
        _add(found, vars(value), depth - 1)


def _add_memory(found: Any, place: int, size: int) -> None:
    """Add contiguous bytes; blocks of them if there are many."""
    if size <= _COPIED:
        found.update(ctypes.string_at(place, size) if size else b"")
        return
    for block in range(_BLOCKS):
        found.update(ctypes.string_at(place + (size - _BLOCK) * block // (_BLOCKS - 1), _BLOCK))


@lru_cache(maxsize=1024)
def _kind(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


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
