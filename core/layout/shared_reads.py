"""`share_ranges`: which rank reads the stored bytes that several ranks need, and who receives them. Imports no torch.

Bytes that several ranks need are read by one of them, which sends them to the others (ADR-0037). Ranges are of bytes, and nothing else is known of them: who
receives bytes verifies them as if it had read them. The cost is linear in ranges, and in rounds x ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import NamedTuple, final


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


def share_ranges(wanted: Sequence[Sequence[ByteSpan]], *, unit_bytes: int, round_bytes: int) -> list[list[SharedRange]]:
    """Decide what ranks read for each other, in rounds. Every rank decides the same.

    Laws: each byte that a rank needs is in one range, whose takers are the ranks that need it; no other byte is in any. The ranges of a rank come in the order
    of its spans. In a round no rank takes more than ``round_bytes``, what it reads itself included, and no rank sends more. Where all ranks need the same, no rank
    reads more than a range above another.

    Args:
        wanted: for each rank the spans that it needs: disjoint, none touching the next, and in the order in which it reads them.
        unit_bytes: the size of a range at most.
        round_bytes: what a rank may take, or send, before it waits for the others; at least as many bytes as there are ranks.

    Returns:
        The rounds, in order; none if no two ranks need the same byte.

    Examples:
        >>> for each in share_ranges([[ByteSpan(0, 0, 6)], [ByteSpan(0, 2, 6)]], unit_bytes=2, round_bytes=4):
        ...     print(*each)
        SharedRange(file=0, start=0, stop=2, reader=0, takers=frozenset({0})) SharedRange(file=0, start=2, stop=4, reader=1, takers=frozenset({0, 1}))
        SharedRange(file=0, start=4, stop=6, reader=0, takers=frozenset({0, 1}))
    """
    rounds: list[list[SharedRange]] = []
    read, turn, taken, sent = ([0 for _ in wanted] for _ in range(4))
    for file, start, stop, takers in _runs(wanted):
        others = len(takers) - 1
        unit = min(unit_bytes, round_bytes // max(1, others))  # a range fits into any round
        at = start
        while at < stop:
            now = max([turn[rank] for rank in takers])
            here = [rank for rank in takers if turn[rank] == now]
            room = round_bytes - max([taken[rank] for rank in here])
            turns = (round_bytes - max([sent[rank] for rank in here])) // (unit * others or 1)
            if room < min(unit, stop - at) or not turns:
                now, room, turns = now + 1, round_bytes, round_bytes // (unit * others or 1)
            size = min(stop - at, room, turns * len(takers) * unit)
            for rank in takers:
                if turn[rank] < now:
                    turn[rank], taken[rank], sent[rank] = now, 0, 0
                taken[rank] += size
            rounds += [[] for _ in range(now + 1 - len(rounds))]
            readers = sorted(takers, key=read.__getitem__)
            for place, reader in zip(range(at, at + size, unit), cycle(readers), strict=False):
                end = min(place + unit, at + size)
                rounds[now].append(SharedRange(file, place, end, reader, takers))
                read[reader] += end - place
                sent[reader] += (end - place) * others
            at += size
    return rounds if any(len(one.takers) > 1 for each in rounds for one in each) else []


def _runs(wanted: Sequence[Sequence[ByteSpan]]) -> Iterator[tuple[int, int, int, frozenset[int]]]:
    """The runs of bytes that are needed, each with the ranks that need all of it; no other rank needs any of it."""
    ends = sorted(
        (file, place, is_start, rank)
        for rank, spans in enumerate(wanted)
        for file, start, stop in spans
        for place, is_start in ((start, True), (stop, False))
    )
    takers: set[int] = set()
    for (file, place, is_start, rank), following in pairwise(ends):
        (takers.add if is_start else takers.discard)(rank)
        if takers and place < following[1]:
            yield file, place, following[1], frozenset(takers)
