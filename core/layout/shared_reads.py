"""`share_ranges`: which rank reads the stored bytes that several ranks need, and who receives them; `hops_of`: over which other ranks. Imports no torch.

Bytes that several ranks need are read by one of them, which sends them to the others (ADR-0037). Ranges are of bytes, and nothing else is known of them: who
receives bytes verifies them as if it had read them. Ranks that need the same are counted as one: the cost is linear in ranges, in distinct lists of spans, and in ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple, final

import attrs
import numpy as np

from trainfold.core.layout.agreement.rank_grid import RankGrid


@final
class ByteSpan(NamedTuple):
    """Bytes of a file that a rank needs.

    Attributes:
        file: the number of the file, in the order in which files are read.
        start: the first byte.
        stop: one past the last.
    """

    file: int
    start: int
    stop: int


@final
class SharedRange(NamedTuple):
    """Bytes that one rank reads for all that need them.

    Attributes:
        file: the number of the file.
        start: the first byte.
        stop: one past the last.
        reader: the rank that reads them; one of the takers.
        takers: the ranks that need them.
    """

    file: int
    start: int
    stop: int
    reader: int
    takers: frozenset[int]

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.stop - self.start


def share_ranges(
    wanted: Sequence[Sequence[ByteSpan]],
    *,
    needs: Sequence[int],
    grid: RankGrid,
    unit_bytes: int,
    round_bytes: int,
) -> Iterator[list[SharedRange]]:
    """Decide what ranks read for each other, in rounds. Every rank decides the same.

    Laws: each byte that a rank needs is in one range, whose takers are the ranks that need it; no other byte is in any. The ranges of a rank come in the order
    of its spans. In a round no rank takes more than ``round_bytes``, what it reads itself included, and no rank sends more in either hop. Where all ranks need the
    same, no rank reads more than a range above another.

    Args:
        wanted: the lists of spans that ranks need, each list once: disjoint, none touching the next, and in the order in which they are read.
        needs: for each rank, which list it needs.
        grid: how the ranks are connected.
        unit_bytes: the size of a range at most.
        round_bytes: what a rank may take, or send, before it waits for the others; at least as many bytes as the longest row or column has ranks.

    Yields:
        The rounds, in order; none if no two ranks need the same byte.

    Examples:
        >>> from trainfold.core.layout.agreement.rank_grid import rank_grid
        >>> grid, wanted = rank_grid(2, most_connected=2), [[ByteSpan(0, 0, 6)], [ByteSpan(0, 2, 6)]]
        >>> for each in share_ranges(wanted, needs=[0, 1], grid=grid, unit_bytes=2, round_bytes=4):
        ...     print(*each)
        SharedRange(file=0, start=0, stop=2, reader=0, takers=frozenset({0})) SharedRange(file=0, start=2, stop=4, reader=1, takers=frozenset({0, 1}))
        SharedRange(file=0, start=4, stop=6, reader=0, takers=frozenset({0, 1}))
    """
    runs = list(_runs(wanted))
    rounds = _Rounds(needs, grid, unit_bytes, round_bytes, len(wanted))
    if not any(len(rounds.takers(lists).ranks) > 1 for *_, lists in runs):
        return
    places = [start for _, start, _, _ in runs]
    left: list[list[int]] = [[] for _ in wanted]  # the runs of each list, the next one last
    for number in range(len(runs) - 1, -1, -1):
        for each in runs[number][-1]:
            left[each].append(number)
    while waiting := [(numbers[-1], each) for each, numbers in enumerate(left) if numbers]:
        heapify(waiting)
        rounds.begin()
        while waiting:
            number, here = _next_run(waiting)
            file, _, stop, lists = runs[number]
            if len(here) == len(lists):  # or one of them is not there yet, and the others wait for it in the next round
                places[number] = rounds.fill(file, places[number], stop, rounds.takers(lists))
            if places[number] < stop:
                continue
            for each in here:
                left[each].pop()
                if left[each]:
                    heappush(waiting, (left[each][-1], each))
        yield rounds.ranges


def _next_run(waiting: list[tuple[int, int]]) -> tuple[int, list[int]]:
    """The first run for which a list waits, and all lists that wait for it; they are taken out."""
    number, first = heappop(waiting)
    here = [first]
    while waiting and waiting[0][0] == number:
        here.append(heappop(waiting)[1])
    return number, here


@final
@attrs.frozen(eq=False)
class _Takers:
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
class _Rounds:
    """What ranks take and send in the present round, and have read in all."""

    def __init__(self, needs: Sequence[int], grid: RankGrid, unit_bytes: int, round_bytes: int, lists: int) -> None:
        self._grid, self._unit_bytes, self._round_bytes = grid, unit_bytes, round_bytes
        self._ranks: list[list[int]] = [[] for _ in range(lists)]
        for rank, each in enumerate(needs):
            self._ranks[each].append(rank)
        self._known: dict[frozenset[int], _Takers] = {}
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

    def takers(self, lists: frozenset[int]) -> _Takers:
        """The ranks that need some lists."""
        if lists not in self._known:
            ranks = frozenset(rank for each in lists for rank in self._ranks[each])
            count = Counter(rank % self._grid.columns for rank in ranks)
            in_columns = np.zeros(self._grid.columns, np.int64)
            in_columns[list(count)] = list(count.values())
            unit = min(self._unit_bytes, self._round_bytes // max(len(count), *count.values()))
            self._known[lists] = _Takers(tuple(sorted(lists)), ranks, in_columns, len(count), unit)
        return self._known[lists]

    def fill(self, file: int, start: int, stop: int, takers: _Takers) -> int:
        """Put as much of a run of bytes into the round as it has room for; return where the rest begins."""
        room = self._round_bytes - max(self._taken[each] for each in takers.lists)
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

    def _first_of(self, takers: _Takers) -> list[tuple[int, int, int, int]]:
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
                rows.setdefault(self._grid.row(rank).start, []).append((0, rank))
        return self._readers[number]

    def _sends(self, reader: int, row: int, size: int, takers: _Takers) -> bool:
        """Whether a reader can send a range along its row, and each rank there down its column; if so, they do. A little more is counted than they send."""
        along = self._sent[reader] + size * takers.columns
        down = self._passed.get(row, 0) + size * takers.in_columns
        if along > self._round_bytes or down.max() > self._round_bytes:
            return False
        self._sent[reader], self._passed[row] = along, down
        return True


def _runs(wanted: Sequence[Sequence[ByteSpan]]) -> Iterator[tuple[int, int, int, frozenset[int]]]:
    """The runs of bytes that are needed, each with the lists that have all of it; no other list has any of it."""
    if len(wanted) == 1:  # replicas
        yield from ((*span, frozenset({0})) for span in wanted[0])
        return
    ends = sorted(
        (file, place, is_start, number)
        for number, spans in enumerate(wanted)
        for file, start, stop in spans
        for place, is_start in ((start, True), (stop, False))
    )
    lists: set[int] = set()
    for (file, place, is_start, number), following in pairwise(ends):
        (lists.add if is_start else lists.discard)(number)
        if lists and place < following[1]:
            yield file, place, following[1], frozenset(lists)


@final
class Hop(NamedTuple):
    """What a rank sends and receives within one group of ranks.

    Attributes:
        ranks: the group; this rank is in it.
        go: rank -> the ranges that it gets from this one, in the order of the round.
        come: rank -> those that come from it.
    """

    ranks: range
    go: Mapping[int, list[SharedRange]]
    come: Mapping[int, list[SharedRange]]


def hops_of(ranges: Sequence[SharedRange], grid: RankGrid, rank: int) -> list[Hop]:
    """What a rank does in a round after it has read: it sends along its row, and then down its column what it has read or received for the ranks there.

    Args:
        ranges: of the round.
        grid: how the ranks are connected.
        rank: this rank.

    Returns:
        The hops; one where each rank is connected to each.

    Examples:
        >>> from trainfold.core.layout.agreement.rank_grid import rank_grid
        >>> both = [SharedRange(0, 0, 8, reader=0, takers=frozenset({0, 3}))]
        >>> along, down = hops_of(both, rank_grid(4, most_connected=3), rank=1)
        >>> along.ranks, list(along.come), down.ranks, list(down.go)
        (range(0, 2), [0], range(1, 4, 2), [3])
    """
    along, down = (Hop(ranks, defaultdict(list), defaultdict(list)) for ranks in (grid.row(rank), grid.column(rank)))
    here, columns = rank % grid.columns, grid.columns
    for one in ranges:
        relay = grid.relay(one.reader, rank)
        if relay != rank:
            if rank in one.takers:
                down.come[relay].append(one)
            continue
        below = [taker for taker in down.ranks if taker in one.takers]
        if one.reader == rank:
            for column in {taker % columns for taker in one.takers} - {here}:
                along.go[grid.relay(rank, column)].append(one)
        elif below:
            along.come[one.reader].append(one)
        for taker in below:
            if taker != rank:
                down.go[taker].append(one)
    return [along, down] if columns > 1 else [down]
