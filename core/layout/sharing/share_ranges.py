"""`share_ranges`: which rank reads the stored bytes that several ranks need, and who receives them. Imports no torch.

Bytes that several ranks need are read by one of them, which sends them to the others (ADR-0037). Ranges are of bytes, and nothing else is known of them: who
receives bytes verifies them as if it had read them. Ranks that need the same are counted as one: the cost is linear in ranges, in rounds x distinct lists, and in ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, final

from trainfold.core.layout.sharing.ranges import ByteSpan, SharedRange
from trainfold.core.layout.sharing.rank_grid import RankGrid
from trainfold.core.layout.sharing.round_room import RoundRoom


def share_ranges(
    wanted: Sequence[Sequence[ByteSpan]],
    *,
    needs: Sequence[int],
    grid: RankGrid,
    unit_bytes: int,
    round_bytes: int,
) -> Iterator[list[SharedRange]]:
    """Decide what ranks read for each other, in rounds. Every rank decides the same.

    Laws: each byte that a rank needs is in one range, whose takers are the ranks that need it; no other byte is in any. When a byte has come to a rank, all before it have
    too, and no more than ``round_bytes`` of those after it from earlier rounds. In a round no rank takes more than ``round_bytes``, what it reads itself included, and no rank
    sends more in either hop. Where all ranks need the same, no rank reads more than a range above another; in a grid, if its rows have one length.

    Args:
        wanted: the lists of spans that ranks need, each list once: disjoint, none touching the next, and in the order in which they are read.
        needs: for each rank, which list it needs.
        grid: how the ranks are connected.
        unit_bytes: the size of a range at most.
        round_bytes: what a rank may take, or send, before it waits for the others; at least as many bytes as the longest row or column has ranks.

    Yields:
        The rounds, in order; none if no two ranks need the same byte.

    Examples:
        >>> from trainfold.core.layout.sharing.ranges import ByteSpan
        >>> from trainfold.core.layout.sharing.rank_grid import rank_grid
        >>> grid, wanted = rank_grid(2, most_connected=2), [[ByteSpan(0, 0, 6)], [ByteSpan(0, 2, 6)]]
        >>> for each in share_ranges(wanted, needs=[0, 1], grid=grid, unit_bytes=2, round_bytes=4):
        ...     print(*each)
        SharedRange(file=0, start=2, stop=4, reader=0, takers=frozenset({0, 1})) SharedRange(file=0, start=4, stop=6, reader=1, takers=frozenset({0, 1}))
        SharedRange(file=0, start=0, stop=2, reader=0, takers=frozenset({0}))
    """
    runs = [_Run(*each) for each in _runs(wanted)]
    room = RoundRoom(needs, len(wanted), grid, unit_bytes=unit_bytes, round_bytes=round_bytes)
    if not any(len(room.takers(run.lists).ranks) > 1 for run in runs):
        return
    schedule = _Schedule(runs, len(wanted), room, round_bytes)
    while schedule.is_left:
        room.begin()
        while schedule.take_common() + schedule.take_own():
            pass
        yield room.ranges


@final
class _Run(NamedTuple):
    """Bytes that the same lists need; no other list needs any of them."""

    file: int
    start: int
    stop: int
    lists: frozenset[int]


@final
class _Schedule:
    """The runs that are left.

    Each list takes its own runs in order. What several lists need is taken in order too, but for a list before its turn if need be: otherwise the lists would wait for each
    other, where all need a little of each file and each the most of one. Some list can always go on: one whose next run is its own, or else all that need the first common run.

    Args:
        runs: all of them.
        lists: the number of lists.
        room: of the present round.
        early_bytes: what a list may take before its turn.
    """

    def __init__(self, runs: Sequence[_Run], lists: int, room: RoundRoom, early_bytes: int) -> None:
        self._runs, self._room, self._early_bytes = runs, room, early_bytes
        self._places = [run.start for run in runs]
        self._early: list[dict[int, int]] = [{} for _ in range(lists)]  # of each list: run -> bytes before its turn
        self._early_sum = [0] * lists
        self._left: list[list[int]] = [[] for _ in range(lists)]  # the next one last
        for number in range(len(runs) - 1, -1, -1):
            for each in runs[number].lists:
                self._left[each].append(number)
        self._common = [number for number in range(len(runs) - 1, -1, -1) if len(runs[number].lists) > 1]

    @property
    def is_left(self) -> bool:
        """Whether there is another round."""
        return any(self._left)

    def take_common(self) -> int:
        """Take what several lists need, as far as the round and all of these lists have room for it; return how many bytes."""
        taken = 0
        while self._common:
            number = self._common[-1]
            lists = self._runs[number].lists
            early = [each for each in lists if self._left[each][-1] != number]
            size = self._take(number, self._early_bytes - max((self._early_sum[each] for each in early), default=0))
            taken += size
            for each in early:
                self._early[each][number] = self._early[each].get(number, 0) + size
                self._early_sum[each] += size
            if not self._is_over(number):
                break
            self._common.pop()
            for each in lists:
                self._pass(each)
        return taken

    def take_own(self) -> int:
        """Take what one list alone needs, for each list up to what it waits for; return how many bytes."""
        taken = 0
        for each, left in enumerate(self._left):
            while left and len(self._runs[left[-1]].lists) == 1:
                taken += self._take(left[-1], self._early_bytes)
                if not self._is_over(left[-1]):
                    break
                self._pass(each)
        return taken

    def _take(self, number: int, most_bytes: int) -> int:
        run, place = self._runs[number], self._places[number]
        self._places[number] = self._room.fill(run.file, place, run.stop, self._room.takers(run.lists), most_bytes)
        return self._places[number] - place

    def _is_over(self, number: int) -> bool:
        return self._places[number] == self._runs[number].stop

    def _pass(self, each: int) -> None:
        """Go on to what a list does not have yet."""
        left = self._left[each]
        while left and self._is_over(left[-1]):
            self._early_sum[each] -= self._early[each].pop(left.pop(), 0)


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
