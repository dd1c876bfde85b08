"""`batch_digest`: digests the contents of a batch into a short text, to compare with the same batch drawn again; `logged_digest`: for a flight log."""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, final

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
WHOLE: Final = "xxh3-whole:"


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
    return batch_digests(batch, is_logged=False)[0]


def logged_digest(batch: Any) -> str:
    """Digest every byte of a batch; begins with `WHOLE`. If it has a value that cannot be read, that is `batch_digest`.

    A tensor on an accelerator is copied to the host.

    Examples:
        >>> one, other = torch.zeros(2, 1 << 20), torch.zeros(2, 1 << 20)
        >>> other[0, 9000] = 1.0
        >>> logged_digest(one) == logged_digest(other), batch_digest(one) == batch_digest(other)
        (False, True)
    """
    whole = _Sum(reads_all=True)
    whole.add(batch, _DEPTH)
    return batch_digest(batch) if whole.has_gaps else whole.text


def batch_digests(batch: Any, *, is_logged: bool) -> tuple[str, str]:
    """`batch_digest` and `logged_digest`; if it is not logged, the latter only where it costs nothing more."""
    found = _Sum(reads_all=False)
    found.add(batch, _DEPTH)
    text = PREFIX + found.hexdigest()
    if not found.has_gaps:
        return text, found.text
    return text, logged_digest(batch) if is_logged else text


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


@final
class _Sum:
    """The digest of a batch, as far as it is read.

    Args:
        reads_all: whether to read every byte; else only blocks of large tensors.

    Attributes:
        has_gaps: whether something was not read.
    """

    def __init__(self, *, reads_all: bool) -> None:
        self._reads_all = reads_all
        self._found = xxhash.xxh3_128()
        self.has_gaps = False

    @property
    def text(self) -> str:
        """The digest of a batch that was read without gaps: it is the same, whether all was to be read or not."""
        return WHOLE + self.hexdigest()

    def hexdigest(self) -> str:
        """The digest."""
        return str(self._found.hexdigest())

    def add(self, value: Any, depth: int) -> None:
        """Add a value."""
        kind = type(value)
        if kind is torch.Tensor and value.is_cpu and value.layout is torch.strided and _is_plain(value):
            self._found.update(_heading(value.dtype, value.shape))
            if value.is_contiguous():
                self._add_memory(value, value.data_ptr(), value.nbytes)
            else:
                self._found.update(tensor_bytes(value))
        elif kind is list or kind is tuple:
            self._found.update(b"[%d" % len(value))
            for each in value:
                self.add(each, depth)
        # it has no shape, or one that prints differently each time
        elif isinstance(value, torch.Tensor) and value.is_nested:
            self._found.update(b"nested")
            self.add(value.unbind(), depth)
        elif isinstance(value, torch.Tensor):
            self._found.update(_heading(value.dtype, value.shape))
            digest = _digest(value)
            self.has_gaps |= digest is None
            self._found.update((digest or kind.__qualname__).encode())
        elif isinstance(value, Mapping):  # also classes such as a tokenizer's batch
            for key, each in value.items():
                self._found.update(f"{key}:".encode())
                self.add(each, depth)
        else:
            self._add_other(value, depth)

    def _add_other(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is np.ndarray and value.nbytes > _COPIED and value.flags.c_contiguous and not value.dtype.hasobject:
            self._found.update(f"numpy {value.dtype.str}{value.shape}".encode())
            self._add_memory(value, value.ctypes.data, value.nbytes)
            return
        leaves = tree.leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            self.add(leaves, depth)
            return
        digest = _digest(value)
        self._found.update((digest or kind.__qualname__).encode())
        if digest is not None:
            return
        if depth and getattr(value, "__dict__", None):
            self.add(vars(value), depth - 1)
        elif self._reads_all and (data := _other_bytes(value)) is not None:
            self._found.update(data)
        else:
            self.has_gaps = True

    def _add_memory(self, value: torch.Tensor | np.ndarray[Any, Any], place: int, size: int) -> None:
        """Add the contiguous bytes of a tensor or an array; blocks of them if there are many, unless all are read."""
        if size <= _COPIED:
            self._found.update(ctypes.string_at(place, size) if size else b"")
        elif self._reads_all:
            self._found.update(tensor_bytes(value) if isinstance(value, torch.Tensor) else value.reshape(-1).view(np.uint8).data)  # fmt: skip
        else:
            self.has_gaps = True
            for block in range(_BLOCKS):
                self._found.update(ctypes.string_at(place + (size - _BLOCK) * block // (_BLOCKS - 1), _BLOCK))


def _other_bytes(value: Any) -> bytes | None:
    """The bytes of a value that the format of checkpoints cannot hold, such as an array of texts or dates; None if they are not known."""
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.hasobject else f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if type(value) in (bytearray, memoryview):
        return bytes(value)
    return repr(value).encode() if type(value) in (complex, range) else None


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
