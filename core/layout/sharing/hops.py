"""`hops_of`: what a rank sends in a round, and to whom, so that bytes come from their readers to all that need them. Imports no torch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from trainfold.core.layout.sharing.ranges import SharedRange
from trainfold.core.layout.sharing.rank_grid import RankGrid


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
        >>> from trainfold.core.layout.sharing.rank_grid import rank_grid
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
