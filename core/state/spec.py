"""Leaf specs of a tree: dtypes and shapes without the values."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.json_values import scalar_kind
from trainfold.core.layout.leaf_spec import AnySpec, LeafSpec, ScalarSpec
from trainfold.core.layout.placement import Placement
from trainfold.core.layout.shard import Shard

_DTYPE_NAMES: dict[torch.dtype, str] = {}  # str() of a dtype costs a microsecond, and there are 1e5 leaves


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module.

    Examples:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def leaf_spec(leaf: Any, path: str) -> AnySpec:
    """Return the spec of one leaf.

    Raises:
        UnsupportedLeaf: for a leaf that is neither a tensor, an array, a `Shard` nor a plain scalar.

    Examples:
        >>> print(leaf_spec(torch.zeros(2, 3), "w"), leaf_spec(1, "n"))
        float32[2, 3] int
    """
    if isinstance(leaf, torch.Tensor):
        return _shared_spec(dtype_name(leaf.dtype), tuple(leaf.shape))
    if isinstance(leaf, Shard):
        return _cut_spec(
            dtype_name(leaf.tensor.dtype), leaf.shape, leaf.starts, tuple(leaf.tensor.shape), leaf.placement
        )
    if isinstance(leaf, np.ndarray):
        return _array_spec(leaf.dtype, leaf.shape)
    if isinstance(leaf, LeafSpec | ScalarSpec):
        return leaf
    return ScalarSpec(scalar_kind(leaf, path))


@lru_cache(maxsize=4096)
def _shared_spec(dtype: str, shape: tuple[int, ...]) -> LeafSpec:
    """Share one value between all leaves of a shape: a model has 1e5 leaves and a handful of shapes."""
    return LeafSpec(dtype, shape)


@lru_cache(maxsize=4096)
def _cut_spec(
    dtype: str, shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...], placement: Placement | None
) -> LeafSpec:
    box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return LeafSpec(dtype, shape, (box,), placement)


@lru_cache(maxsize=4096)
def _array_spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> LeafSpec:
    return LeafSpec(str(dtype), shape)


def spec_of(values: tree.Tree, prefix: str = "") -> dict[str, AnySpec]:
    """Return the spec of each leaf by its path, in tree order.

    Examples:
        >>> {path: str(spec) for path, spec in spec_of({"w": torch.zeros(2), "n": 3}, prefix="extra").items()}
        {"extra['n']": 'int', "extra['w']": 'float32[2]'}
    """
    return {path: leaf_spec(leaf, path) for path, leaf in tree.named_leaves(values, prefix)}
