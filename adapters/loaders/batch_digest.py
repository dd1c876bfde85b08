"""`batch_digest`: what a batch holds, as a text that another draw of it can be compared with."""

from collections.abc import Mapping
from typing import Any, Final

import torch
import xxhash

from trainfold.core import tree
from trainfold.core.codec import DIGEST_PREFIX, leaf_digest, tensor_bytes
from trainfold.core.errors import TrainfoldError

_DEPTH: Final = 4


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
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and _is_plain(value)
    ):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(tensor_bytes(value))
    elif isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(_leaf(value).encode())
    elif isinstance(value, Mapping):  # a class of its own too, such as the batch of a tokenizer
        for key, each in value.items():
            found.update(f"{key}:".encode())
            _add(found, each, depth)
    elif type(value) in (list, tuple):
        found.update(f"[{len(value)}".encode())
        for each in value:
            _add(found, each, depth)
    else:
        leaves = tree.leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            _add(found, leaves, depth)
            return
        digest = _digest(value)
        found.update((digest or type(value).__qualname__).encode())
        if digest is None and depth and hasattr(value, "__dict__"):
            _add(found, vars(value), depth - 1)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)


def _leaf(leaf: Any) -> str:
    return _digest(leaf) or type(leaf).__qualname__


def _digest(leaf: Any) -> str | None:
    try:
        return leaf_digest(leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf)
    except TrainfoldError:
        return None
