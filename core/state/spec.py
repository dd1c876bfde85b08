"""Leaf specs: what a tree holds without its values, and all the differences between two of them."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias, final

import attrs
import numpy as np
import torch

from trainfold.core import tree
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.slices import Box

DifferenceKind: TypeAlias = Literal["missing", "unexpected", "shape", "dtype", "kind"]


_DTYPE_NAMES: dict[torch.dtype, str] = {}  # str() of a dtype costs a microsecond, and there are 1e5 leaves


@final
@attrs.frozen
class LeafSpec:
    """A tensor leaf without its values.

    Attributes:
        dtype: torch's name of the dtype, ``"bfloat16"``.
        shape: the global shape.
        slices: the half-open boxes of it that are present here, one (start, stop) pair a dimension; empty = all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Box, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@final
@attrs.frozen
class ScalarSpec:
    """A leaf that is not a tensor: its Python type's name, ``"int"``."""

    kind: str

    def __str__(self) -> str:
        return self.kind


AnySpec: TypeAlias = LeafSpec | ScalarSpec


@final
@attrs.frozen
class Difference:
    """One leaf in which what was saved and what is wanted differ.

    Attributes:
        path: the leaf path.
        kind: ``missing`` (wanted, not saved), ``unexpected`` (saved, not wanted), ``shape``, ``dtype``, or ``kind``
            (one is a tensor, the other a scalar, or scalars of different types).
        saved: what the checkpoint has, or None.
        wanted: what the target has, or None.
    """

    path: str
    kind: DifferenceKind
    saved: AnySpec | None
    wanted: AnySpec | None

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: saved {self.saved or 'nothing'}, wanted {self.wanted or 'nothing'}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as torch does, without the module.

    Examples:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def leaf_spec(leaf: Any, path: str) -> AnySpec:
    """The spec of one leaf.

    Raises:
        UnsupportedLeaf: for a leaf that is neither a tensor, an array, a `Shard` nor a plain scalar.

    Examples:
        >>> print(leaf_spec(torch.zeros(2, 3), "w"), leaf_spec(1, "n"))
        float32[2, 3] int
    """
    if isinstance(leaf, torch.Tensor):
        return _shared_spec(dtype_name(leaf.dtype), tuple(leaf.shape))
    if isinstance(leaf, Shard):
        box = tuple((start, start + size) for start, size in zip(leaf.starts, leaf.tensor.shape, strict=True))
        return LeafSpec(dtype_name(leaf.tensor.dtype), leaf.shape, (box,))
    if isinstance(leaf, np.ndarray):
        return _array_spec(leaf.dtype, leaf.shape)
    if isinstance(leaf, np.generic):
        return ScalarSpec(f"numpy.{leaf.dtype}")
    if leaf is None or type(leaf) in (bool, int, float, str, bytes, Counter):
        return ScalarSpec("none" if leaf is None else type(leaf).__name__.lower())
    if isinstance(leaf, LeafSpec | ScalarSpec):
        return leaf
    raise UnsupportedLeaf(
        path,
        expected="a tensor, a numpy array, None, bool, int, float, str or bytes",
        found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
        fix="turn it into one of these before it enters the state: nothing is pickled",
    )


@lru_cache(maxsize=4096)
def _shared_spec(dtype: str, shape: tuple[int, ...]) -> LeafSpec:
    """One value for all leaves of a shape: a model has 1e5 leaves and a handful of shapes."""
    return LeafSpec(dtype, shape)


@lru_cache(maxsize=4096)
def _array_spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> LeafSpec:
    return LeafSpec(str(dtype), shape)


def spec_of(values: tree.Tree, prefix: str = "") -> dict[str, AnySpec]:
    """The spec of each leaf by its path, in tree order.

    Examples:
        >>> {path: str(spec) for path, spec in spec_of({"w": torch.zeros(2), "n": 3}, prefix="extra").items()}
        {"extra['n']": 'int', "extra['w']": 'float32[2]'}
    """
    return {path: leaf_spec(leaf, path) for path, leaf in tree.named_leaves(values, prefix)}


def diff_specs(saved: Mapping[str, AnySpec], wanted: Mapping[str, AnySpec]) -> tuple[Difference, ...]:
    """Every difference between two specs at once: first in the order wanted, then what was saved and is not wanted.

    Examples:
        >>> wanted = {"w": LeafSpec("float32", (2,)), "b": LeafSpec("float32", (2,))}
        >>> saved = {"w": LeafSpec("float32", (3,)), "c": ScalarSpec("int")}
        >>> [(difference.path, difference.kind) for difference in diff_specs(saved, wanted)]
        [('w', 'shape'), ('b', 'missing'), ('c', 'unexpected')]
    """
    found: list[Difference] = []
    for path, want in wanted.items():
        have = saved.get(path)
        if have is None:
            found.append(Difference(path, "missing", None, want))
        else:
            found.extend(Difference(path, kind, have, want) for kind in _kinds(have, want))
    found.extend(Difference(path, "unexpected", have, None) for path, have in saved.items() if path not in wanted)
    return tuple(found)


def _kinds(have: AnySpec, want: AnySpec) -> list[DifferenceKind]:
    if isinstance(have, LeafSpec) and isinstance(want, LeafSpec):
        differs: list[tuple[DifferenceKind, bool]] = [
            ("shape", have.shape != want.shape),
            ("dtype", have.dtype != want.dtype),
        ]
        return [kind for kind, yes in differs if yes]
    return [] if have == want else ["kind"]
