"""The codec between a tensor leaf and its bytes: the dense tensor behind a leaf, and its digest."""

from typing import Any

import numpy as np
import torch

from trainfold.core.digest import digest_of
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.format.dtypes import STORED
from trainfold.core.json_values import canonical_json, encode_scalar
from trainfold.core.layout.shard import Shard
from trainfold.core.printable import with_article
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes

_PLAIN = frozenset(getattr(torch, name) for name in STORED)
_ARRAYS = frozenset(np.dtype(name) for name in STORED if name in np.sctypeDict)  # those of this machine's byte order


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`, for the dtypes in ``STORED`` only.

    Examples:
        >>> torch_dtype("bfloat16")
        torch.bfloat16
    """
    found = getattr(torch, name) if name in STORED else None
    if not isinstance(found, torch.dtype):
        raise UnsupportedLeaf(name, expected=f"one of {sorted(STORED)}", found=name, fix="convert the leaf first")
    return found


# the types of nearly all leaves; a tensor of one of them is not made of other tensors
DENSE = frozenset({torch.Tensor, torch.nn.Parameter})
_TENSOR_LEAVES = (torch.Tensor, Shard, np.ndarray)  # a tuple, because a union would be built at each of the 1e5 calls


def is_tensor_leaf(leaf: Any) -> bool:
    """Whether a leaf is stored as a tensor: a torch tensor, a `Shard` or a numpy array."""
    return isinstance(leaf, _TENSOR_LEAVES)


def as_tensor(leaf: Any, path: str) -> torch.Tensor:
    """The dense tensor behind a tensor leaf, detached; copied only if it has to be.

    Args:
        leaf: a tensor, a `Shard` (its local part) or a numpy array.
        path: the leaf path, for the error.

    Raises:
        UnsupportedLeaf: for sparse, quantized, meta and nested tensors, and dtypes outside ``STORED``.

    Examples:
        >>> as_tensor(np.float32([1, 2]), "x")
        tensor([1., 2.])
    """
    if isinstance(leaf, Shard):
        leaf = leaf.tensor
    if isinstance(leaf, np.ndarray):
        if leaf.dtype not in _ARRAYS:
            raise _unsupported(path, f"a numpy array of dtype {leaf.dtype}")
        if type(leaf) is not np.ndarray:
            raise _loses_its_type(path, leaf)
        return torch.from_numpy(leaf if leaf.flags.writeable and leaf.flags.c_contiguous else leaf.copy(order="C"))
    if type(leaf) not in DENSE and hasattr(type(leaf), "__tensor_flatten__"):
        raise _made_of_others(path, leaf)
    found: torch.Tensor = leaf.detach() if leaf.requires_grad else leaf
    if found.layout is torch.strided and found.dtype in _PLAIN and not found.is_meta and not found.is_nested:
        return found  # nearly every leaf of a model: one check each, because there are 1e5 of them
    if found.layout is not torch.strided or found.is_quantized or found.is_nested:
        raise _unsupported(
            path, f"{with_article(str(found.layout))} tensor" if not found.is_quantized else "a quantized tensor"
        )
    if dtype_name(found.dtype) not in STORED:
        raise _unsupported(path, f"a tensor of dtype {found.dtype}")
    if found.is_meta:
        raise _unsupported(path, "a tensor on the meta device, which has no values")
    return found


def check_type(leaf: Any, path: str) -> None:
    """Refuse a leaf whose type a load would lose: outside of modules and optimizers, a load returns a plain tensor or array.

    Args:
        leaf: a tensor, a `Shard` or a numpy array that is not a parameter, buffer or slot of an object.
        path: the leaf path, for the error.

    Raises:
        UnsupportedLeaf: for a ``Parameter``, a ``Buffer``, any other subclass of tensor or array, and a tensor with names.

    Examples:
        >>> check_type(torch.nn.Parameter(torch.ones(2)), "extra['scale']")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnsupportedLeaf: extra['scale']: expected a plain tensor, found a torch.nn.parameter.Parameter; \
save leaf.detach(), and copy what is loaded into your own object
    """
    kind = type(leaf)
    if kind is torch.Tensor:
        names = getattr(leaf, "names", ())  # newer torch has no names
        if any(names):
            raise UnsupportedLeaf(path, expected="a plain tensor", found=f"a tensor with dimension names {names}",
                                  fix="save leaf.rename(None), and name the dimensions again after the load")  # fmt: skip
        if not getattr(leaf, "_is_buffer", False):
            return
    elif not isinstance(leaf, torch.Tensor | np.ndarray) or kind is np.ndarray:
        return
    raise _loses_its_type(path, leaf)


def leaf_digest(leaf: Any, path: str = "leaf") -> str:
    """The digest of a leaf: of a tensor's bytes, or of a scalar's canonical JSON.

    Examples:
        >>> leaf_digest(torch.zeros(0)) == digest_of(b"")
        True
    """
    if is_tensor_leaf(leaf):
        return digest_of(tensor_bytes(as_tensor(leaf, path)))
    return digest_of(canonical_json(encode_scalar(leaf, path)))


def _loses_its_type(path: str, leaf: Any) -> UnsupportedLeaf:
    kind = type(leaf)
    name = "torch.nn.Buffer" if kind is torch.Tensor else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(leaf, np.ma.MaskedArray):
        fix = "save leaf.data and leaf.mask, and put them together again after the load"
    elif isinstance(leaf, np.ndarray):
        fix = "save numpy.array(leaf, subok=False), and make it what it was after the load"
    elif kind is torch.Tensor or isinstance(leaf, torch.nn.Parameter):
        fix = "save leaf.detach(), and copy what is loaded into your own object"
    else:
        fix = "save leaf.as_subclass(torch.Tensor), and make it what it was after the load"
    plain = "array" if isinstance(leaf, np.ndarray) else "tensor"
    return UnsupportedLeaf(path, expected=f"a plain {plain}", found=f"{with_article(name)}", fix=fix)


def _made_of_others(path: str, leaf: Any) -> UnsupportedLeaf:
    """As quantised weights and the slots of optimizers in 8 bits are."""
    names = ", ".join(leaf.__tensor_flatten__()[0])
    return UnsupportedLeaf(
        path, expected="a tensor with values of its own", found=f"{with_article(type(leaf).__name__)}, which is made of other tensors: {names}",
        fix="train plain tensors that forward quantises, as float8 training does, with an optimizer whose slots are plain; in a state of your own, store the tensors that it is made of",
    )  # fmt: skip


def _unsupported(path: str, found: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        path,
        expected=f"a dense tensor with values, of a dtype among {sorted(STORED)}",
        found=found,
        fix="store a dense equivalent (values and indices, int_repr and scale, ...)",
    )
