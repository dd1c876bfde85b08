"""`RankTree`: by which other ranks each rank agrees with all of them. Imports no torch.

The first rank of each node leads it, and the leaders form a tree. The ranks below each rank are consecutive, so what they give is in rank order when it is put together.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, final

import attrs

from trainfold.core.errors import InvalidArgument

SAME_NODE: Final = 8  # ranks that are taken for a node where nothing says how many there are
FAN_OUT: Final = 8


@final
class Branch(NamedTuple):
    """A rank with all those that it speaks for: ``start`` up to ``stop``. The rank is ``start``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.stop - self.start


@final
@attrs.frozen
class TreePlace:
    """Where a rank stands in a tree.

    Attributes:
        rank: the rank.
        parent: the rank above it; None for rank 0.
        branch: the ranks that it speaks for.
        children: the branches below it, in rank order: the ranks of its node, if it leads one, and then those of other leaders.
        level: the number of ranks above it.
    """

    rank: int
    parent: int | None
    branch: Branch
    children: tuple[Branch, ...]
    level: int

    @property
    def neighbours(self) -> int:
        """The ranks to which it is connected."""
        return len(self.children) + (self.parent is not None)


@final
@attrs.frozen(slots=False)
class RankTree:
    """Which rank is connected to which.

    Attributes:
        size: the number of ranks.
        node_ranks: the ranks of a node, which are consecutive; the last node may have fewer.
        fan_out: the number of other leaders that report to a leader, at most.

    Examples:
        >>> print(rank_tree(16_384, node_ranks=8))
        16384 ranks in 2048 nodes of 8, fan-out 8: 5 levels below rank 0, at most 16 neighbours of a rank
        >>> place = rank_tree(12, node_ranks=4, fan_out=2).place(0)
        >>> [tuple(each) for each in place.children], place.parent
        ([(1, 2), (2, 3), (3, 4), (4, 8), (8, 12)], None)
    """

    size: int
    node_ranks: int
    fan_out: int

    def place(self, rank: int) -> TreePlace:
        """Where a rank stands; in as many steps as the tree has levels."""
        nodes = -(-self.size // self.node_ranks)
        leader, parent, level = rank // self.node_ranks, None, 0
        start, stop = 0, nodes
        while start != leader:
            parent, level = start, level + 1
            start, stop = next(each for each in self._parts(start, stop) if each[0] <= leader < each[1])
        first, last = self._rank(start), self._rank(stop)
        if rank != first:
            return TreePlace(rank, first, Branch(rank, rank + 1), (), level + 1)
        members = [Branch(each, each + 1) for each in range(first + 1, self._rank(start + 1))]
        others = [Branch(self._rank(low), self._rank(high)) for low, high in self._parts(start, stop)]
        above = None if parent is None else self._rank(parent)
        return TreePlace(rank, above, Branch(first, last), (*members, *others), level)

    def places(self) -> Iterator[TreePlace]:
        """Those of all ranks, in rank order."""
        return map(self.place, range(self.size))

    @cached_property
    def levels(self) -> int:
        """The most ranks that are above one."""
        return max(place.level for place in self.places())

    @cached_property
    def most_neighbours(self) -> int:
        """The most ranks to which one is connected."""
        return max(place.neighbours for place in self.places())

    def __str__(self) -> str:
        nodes = -(-self.size // self.node_ranks)
        return (
            f"{self.size} ranks in {nodes} nodes of {self.node_ranks}, fan-out {self.fan_out}: {self.levels} levels below rank 0, "
            f"at most {self.most_neighbours} neighbours of a rank"
        )

    def _rank(self, node: int) -> int:
        """The first rank of a node."""
        return min(node * self.node_ranks, self.size)

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The branches below the leader of the first of these nodes, as even as they can be."""
        rest = stop - start - 1
        parts = min(self.fan_out, rest)
        ends = [start + 1 + rest * part // parts for part in range(parts + 1)] if parts else []
        return list(pairwise(ends))


def rank_tree(size: int, *, node_ranks: int = SAME_NODE, fan_out: int = FAN_OUT) -> RankTree:
    """Return a checked tree.

    Args:
        size: the number of ranks.
        node_ranks: how many consecutive ranks share a node. If it is wrong, messages go farther than they have to; nothing else changes.
        fan_out: how many leaders report to one of them.

    Raises:
        InvalidArgument: unless all are at least 1.
    """
    for name, given in (("size", size), ("node_ranks", node_ranks), ("fan_out", fan_out)):
        if given < 1:
            raise InvalidArgument(name, expected="at least 1", found=given, fix="count ranks from 1")
    return RankTree(size, min(node_ranks, size), fan_out)
