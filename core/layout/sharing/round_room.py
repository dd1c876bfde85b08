"""`RoundRoom`: which ranks read and send in a round, and how much still fits into it. Imports no torch.

Ranks that need the same are counted as one, and what is sent in a grid by row, so a round costs what it has of ranges, and of rows for each set of ranks.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import final

import attrs
import numpy as np

from trainfold.core.layout.sharing.ranges import SharedRange
from trainfold.core.layout.sharing.rank_grid import RankGrid


@final
@attrs.frozen(eq=False)
class Takers:
    """The ranks that need the same bytes.

    Attributes:
        lists: their lists of spans.
        ranks: the ranks.
        in_columns: how many of them each column of the grid has.
        columns: how many columns have one.
        unit_bytes: what one of them may read for the others, in one range.
    """

    lists: tuple[int, ...]
    ranks: frozenset[int]
    in_columns: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    columns: int
    unit_bytes: int


@final
class RoundRoom:
    """What ranks take and send in the present round, and what they have read in all.

    Args:
        needs: for each rank, which list of spans it needs.
        lists: the number of lists.
        grid: how the ranks are connected.
        unit_bytes: the size of a range at most.
        round_bytes: what a rank may take, or send in either hop.

    Attributes:
        ranges: the present round.
    """

    def __init__(self, needs: Sequence[int], lists: int, grid: RankGrid, *, unit_bytes: int, round_bytes: int) -> None:
        self._grid, self._unit_bytes, self._round_bytes = grid, unit_bytes, round_bytes
        self._ranks: list[list[int]] = [[] for _ in range(lists)]
        for rank, each in enumerate(needs):
            self._ranks[each].append(rank)
        self._known: dict[frozenset[int], Takers] = {}
        self._readers: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.ranges: list[SharedRange] = []
        self._taken: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()
        self._full: set[tuple[tuple[int, ...], int]] = set()
        self._first: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
        self._passed: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def takers(self, lists: frozenset[int]) -> Takers:
        """The ranks that need some lists."""
        if lists not in self._known:
            ranks = frozenset(rank for each in lists for rank in self._ranks[each])
            count = Counter(rank % self._grid.columns for rank in ranks)
            in_columns = np.zeros(self._grid.columns, np.int64)
            in_columns[list(count)] = list(count.values())
            unit = min(self._unit_bytes, self._round_bytes // max(len(count), *count.values()))
            self._known[lists] = Takers(tuple(sorted(lists)), ranks, in_columns, len(count), unit)
        return self._known[lists]

    def fill(self, file: int, start: int, stop: int, takers: Takers, most_bytes: int) -> int:
        """Put as much of a run of bytes into the round as it has room for, at most so many bytes; return where the rest begins."""
        room = min(most_bytes, self._round_bytes - max(self._taken[each] for each in takers.lists))
        first = self._first_of(takers)
        place = start
        while first and place < stop and (size := min(takers.unit_bytes, stop - place)) <= room:
            read, reader, row, each = first[0]
            ranks = self._by_rows(each)[row]
            if ranks[0] != (read, reader):  # it has read for others too
                heapreplace(first, (*ranks[0], row, each))
            elif (takers.lists, row) in self._full or not self._sends(reader, row, size, takers):
                self._full.add((takers.lists, row))  # no rank of the row: all of them pass on what one reads
                heappop(first)
            else:
                heapreplace(ranks, (read + size, reader))
                heapreplace(first, (*ranks[0], row, each))
                self.ranges.append(SharedRange(file, place, place + size, reader, takers.ranks))
                place, room = place + size, room - size
        for each in takers.lists:
            self._taken[each] += place - start
        return place

    def _first_of(self, takers: Takers) -> list[tuple[int, int, int, int]]:
        """A heap of the ranks that may read for these in this round, one of each row and list: what it has read, the rank, the first one of its row, and the list."""
        if takers.lists not in self._first:
            self._first[takers.lists] = [
                (*ranks[0], row, each) for each in takers.lists for row, ranks in self._by_rows(each).items()
            ]
            heapify(self._first[takers.lists])
        return self._first[takers.lists]

    def _by_rows(self, number: int) -> dict[int, list[tuple[int, int]]]:
        """The ranks that need a list, by the first rank of their row: a heap of what each has read."""
        if number not in self._readers:
            rows = self._readers[number] = {}
            for rank in self._ranks[number]:
                rows.setdefault(self._grid.row_start(rank), []).append((0, rank))
        return self._readers[number]

    def _sends(self, reader: int, row: int, size: int, takers: Takers) -> bool:
        """Whether a reader can send a range along its row, and each rank there down its column; if so, they do. A little more is counted than they send."""
        along = self._sent[reader] + size * takers.columns
        down = self._passed.get(row, 0) + size * takers.in_columns
        if along > self._round_bytes or down.max() > self._round_bytes:
            return False
        self._sent[reader], self._passed[row] = along, down
        return True
