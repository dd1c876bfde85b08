"""`compare_sources`: the tensors of two sources beside each other, one pair in memory at a time."""

from collections.abc import Callable, Iterator, Mapping
from typing import final

import attrs
import torch

from trainfold.core.exact.distance import Distance, distance
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.transform.expression import Expression, Read, computed_whole


@final
@attrs.frozen
class ComparedTensor:
    """A tensor of one source beside that of the other.

    Attributes:
        name: its name on both sides.
        a: dtype and shape on one side; None if it is absent.
        b: so on the other.
        distance: how far apart the values are, if the shapes are equal; None for two kinds of numbers, such as integers and floats. With two dtypes of floats, both
            are rounded to the one of fewer bytes first. Of equal widths, and integers, are compared as they are.
    """

    name: str
    a: LeafSpec | None
    b: LeafSpec | None
    distance: Distance | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether one side was rounded to the dtype of the other."""
        if self.distance is None or self.a is None or self.b is None:
            return False
        a, b = torch_dtype(self.a.dtype), torch_dtype(self.b.dtype)
        return a.itemsize != b.itemsize and _kind(a) != "integer"

    @property
    def same(self) -> bool:
        """Whether both sides have the same bits."""
        return self.a == self.b and self.distance is not None and not self.distance.differing


@final
@attrs.frozen
class ReadTable:
    """What one side has, and what reads it.

    Attributes:
        table: name -> what the tensor is made of.
        read: reads the parts of source tensors.
        ties: another name of a tensor -> its first one.
    """

    table: Mapping[str, Expression]
    read: Read
    ties: Mapping[str, str] = attrs.field(factory=dict)

    def spec(self, name: str) -> LeafSpec | None:
        """The dtype and shape of a tensor; None if it is absent."""
        each = self.table.get(name)
        return None if each is None else LeafSpec(each.dtype, each.shape)

    def alone_by_a_tie(self, other: "ReadTable") -> dict[str, str]:
        """Names of tied tensors that the other side has under another of their names alone -> their first names. They are compared once."""
        groups: dict[str, list[str]] = {}
        for name, first in self.ties.items():
            groups.setdefault(first, [first]).append(name)
        return {
            name: first
            for first, names in groups.items()
            if any(each in other.table for each in names)
            for name in names
            if name not in other.table
        }

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, which is read."""
        return computed_whole(self.table[name], self.read)


def compare_sources(
    a: ReadTable, b: ReadTable, *, advance: Callable[[int], None] = lambda _: None
) -> Iterator[ComparedTensor]:
    """Compare all tensors of two sources.

    Memory: two tensors, and what is needed to read them.

    Args:
        a: one side.
        b: the other.
        advance: called with the bytes of each pair that was read.

    Yields:
        Each name that one of them has, in the order of ``a`` and then of ``b``; names of tied tensors that the other side has once, once.
    """
    again = {**a.alone_by_a_tie(b), **b.alone_by_a_tie(a)}
    for name in {**a.table, **b.table}:
        if name in again:
            continue
        mine, theirs = a.spec(name), b.spec(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            yield ComparedTensor(name, mine, theirs)
            continue
        common = _common(mine.dtype, theirs.dtype)
        if common is None:
            yield ComparedTensor(name, mine, theirs)
            continue
        one, other = a.tensor(name), b.tensor(name)
        advance(one.nbytes + other.nbytes)
        yield ComparedTensor(name, mine, theirs, distance(one.to(common), other.to(common)))


def _common(one: str, other: str) -> torch.dtype | None:
    """The dtype in which two are compared; None if there is none without a guess."""
    a, b = torch_dtype(one), torch_dtype(other)
    if a == b:
        return a
    kinds = {_kind(a), _kind(b)}
    if len(kinds) > 1:
        return None
    if kinds == {"integer"}:
        return None if torch.uint64 in (a, b) else torch.int64
    if a.itemsize == b.itemsize:
        return torch.float32
    return a if a.itemsize < b.itemsize else b


def _kind(dtype: torch.dtype) -> str:
    if "float4" in str(dtype):
        return "pair"  # torch converts it to no other dtype
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"
