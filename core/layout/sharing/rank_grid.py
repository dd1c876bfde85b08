"""`RankGrid`: which other ranks each rank is connected to, where bytes go from any rank to any other. Imports no torch.

A rank that is connected to each other one has as many sockets as there are ranks. In a grid it is connected to those of its row and of its column, and bytes go in two hops: along
the row of the rank that has them, and down the column of the one that needs them.
"""

from math import isqrt
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument


@final
@attrs.frozen
class RankGrid:
    """Where ranks stand, row by row. The last row has all that are left, so every row has a rank in each column, also where the number of ranks is not a product.

    Attributes:
        size: the number of ranks.
        columns: of the grid; with one column each rank is connected to each.

    Examples:
        >>> grid = rank_grid(7, most_connected=6)
        >>> [list(grid.row(rank)) for rank in (0, 2, 4)], [list(grid.column(rank)) for rank in (0, 1)]
        ([[0, 1], [2, 3], [4, 5, 6]], [[0, 2, 4, 6], [1, 3, 5]])
        >>> grid.relay(0, 3), grid.relay(0, 6)
        (1, 0)
    """

    size: int
    columns: int

    def row(self, rank: int) -> range:
        """The ranks of its row."""
        start = self.row_start(rank)
        is_last = start + 2 * self.columns > self.size
        return range(start, self.size if is_last else start + self.columns)

    def column(self, rank: int) -> range:
        """The ranks of its column."""
        return range(rank % self.columns, self.size, self.columns)

    def relay(self, source: int, rank: int) -> int:
        """From which rank of its own column a rank gets what another one has: that one itself, or the first of its row in this column."""
        column = rank % self.columns
        return source if source % self.columns == column else self.row_start(source) + column

    def neighbours(self, rank: int) -> int:
        """The ranks to which it is connected."""
        along = len(self.row(rank)) - 1 if self.columns > 1 else 0
        return along + len(self.column(rank)) - 1

    def row_start(self, rank: int) -> int:
        """The first rank of its row."""
        return min(rank // self.columns, self.size // self.columns - 1) * self.columns


def rank_grid(size: int, *, most_connected: int) -> RankGrid:
    """Return a grid with one column, if each rank may be connected to each; or with about as many rows as columns, and rows of one length where there are such.

    Args:
        size: the number of ranks.
        most_connected: of how many ranks each may be connected to each.

    Raises:
        InvalidArgument: unless there is a rank.

    Examples:
        >>> [rank_grid(size, most_connected=256).neighbours(0) for size in (256, 257, 16_384)]
        [255, 31, 254]
    """
    if size < 1:
        raise InvalidArgument("size", expected="at least 1", found=size, fix="count ranks from 1")
    if size <= most_connected:
        return RankGrid(size, 1)
    root = isqrt(size)
    return RankGrid(size, next((each for each in range(root, root // 2, -1) if size % each == 0), root))
