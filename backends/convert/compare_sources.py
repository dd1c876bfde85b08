"""`compare_sources`: the tensors of two sources beside each other, one pair in memory at a time."""

from collections.abc import Callable, Iterator, Mapping
from typing import final

import attrs
import torch

from trainfold.core.exact.distance import Distance, distance
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
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
        distance: how far apart the values are, if the shapes are equal. With two dtypes, both are rounded to the one of fewer bytes first.
    """

    name: str
    a: LeafSpec | None
    b: LeafSpec | None
    distance: Distance | None = None

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
    """

    table: Mapping[str, Expression]
    read: Read

    def spec(self, name: str) -> LeafSpec | None:
        """The dtype and shape of a tensor; None if it is absent."""
        each = self.table.get(name)
        return None if each is None else LeafSpec(each.dtype, each.shape)

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
        Each name that one of them has, in the order of ``a`` and then of ``b``.
    """
    for name in {**a.table, **b.table}:
        mine, theirs = a.spec(name), b.spec(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            yield ComparedTensor(name, mine, theirs)
            continue
        one, other = a.tensor(name), b.tensor(name)
        advance(one.nbytes + other.nbytes)
        if mine.dtype != theirs.dtype:
            narrow = torch_dtype(min((mine.dtype, theirs.dtype), key=lambda each: STORED[each].itemsize))
            one, other = one.to(narrow), other.to(narrow)
        yield ComparedTensor(name, mine, theirs, distance(one, other))
