"""`share_reads`: which rank of a group reads which stored bytes if several ranks need them, and who gets what. Imports no torch.

A piece of a stored part is read and verified by one of the ranks that need something of it, which sends the others what they need (ADR-0037). The cost is
linear in pieces x ranks, so a group is a node or the ranks of tensor parallelism, and not a whole job of thousands.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from trainfold.core.layout.slices import Box, intersect, run_blocks, volume


@final
class StoredPart(NamedTuple):
    """A stored part of a tensor: the elements of a box, row by row.

    Attributes:
        box: which part of the tensor.
        item_bytes: bytes of an element.
    """

    box: Box
    item_bytes: int


@final
class SharedRead(NamedTuple):
    """A piece that one rank reads for all that need something of it.

    Attributes:
        part: the index of the part.
        first: the first element of the piece in the part.
        stop: one past the last.
        reader: the rank that reads it; one of the takers.
        takers: the ranks that need something of it, in order.
    """

    part: int
    first: int
    stop: int
    reader: int
    takers: tuple[int, ...]


@final
class Taken(NamedTuple):
    """What a rank needs of a block of a piece. Both boxes are slices of the tensor.

    Attributes:
        place: how many elements of the piece come before the block.
        block: elements that follow one another in the piece.
        box: what is needed of them.
    """

    place: int
    block: Box
    box: Box


def share_reads(
    parts: Sequence[StoredPart], wanted: Sequence[Sequence[Box | None]], *, piece_bytes: int, round_bytes: int
) -> list[list[SharedRead]]:
    """Decide what each rank of a group reads for itself and the others, in rounds. Every rank decides the same.

    Laws: a piece is read by one rank if any rank needs something of it, and else by none. With `taken_of` each rank gets each element that it wants, and that is
    stored, once. In a round no rank sends more than ``round_bytes``, or receives more, unless the round is one piece. Where all ranks need something of every
    piece, no rank reads more than a piece above another.

    Args:
        parts: what is stored; the pieces of a part are ``piece_bytes`` each, and the last may be shorter.
        wanted: for each rank, for each part, the slice of the tensor that the rank needs; None for nothing.
        piece_bytes: what one digest covers; a multiple of the size of any element.
        round_bytes: what a rank may send, or receive, before it waits for the others.

    Returns:
        The rounds, in order.

    Examples:
        >>> columns = [[((0, 4), (0, 2))], [((0, 4), (2, 4))]]
        >>> for each in share_reads([StoredPart(((0, 4), (0, 4)), 1)], columns, piece_bytes=8, round_bytes=4):
        ...     print(*each)
        SharedRead(part=0, first=0, stop=8, reader=0, takers=(0, 1)) SharedRead(part=0, first=8, stop=16, reader=1, takers=(0, 1))
    """
    queues: list[list[tuple[SharedRead, dict[int, int]]]] = [[] for _ in wanted]
    loads = [0] * len(wanted)
    for number, part in enumerate(parts):
        step, total = piece_bytes // part.item_bytes, volume(part.box)
        for first in range(0, total, step):
            stop = min(first + step, total)
            found = {rank: _taken_bytes(part, first, stop, boxes[number]) for rank, boxes in enumerate(wanted)}
            takes = {rank: size for rank, size in found.items() if size}
            if takes:
                reader = min(takes, key=loads.__getitem__)
                loads[reader] += (stop - first) * part.item_bytes
                queues[reader].append((SharedRead(number, first, stop, reader, tuple(takes)), takes))
    return list(_rounds([iter(queue) for queue in queues], round_bytes))


def _rounds(queues: list[Iterator[tuple[SharedRead, dict[int, int]]]], round_bytes: int) -> Iterator[list[SharedRead]]:
    """The reads of all ranks in turns, cut where a rank would send or receive too much."""
    heads = {rank: head for rank, queue in enumerate(queues) if (head := next(queue, None)) is not None}
    while heads:
        found: list[SharedRead] = []
        sent, received = [0] * len(queues), [0] * len(queues)
        turn = list(heads)
        while turn:
            left = []
            for rank in turn:
                read, takes = heads[rank]
                given = sum(takes.values()) - takes[rank]
                fits = sent[rank] + given <= round_bytes and all(
                    received[taker] + size <= round_bytes for taker, size in takes.items() if taker != rank
                )
                if not fits and found:
                    continue
                found.append(read)
                sent[rank] += given
                for taker, size in takes.items():
                    received[taker] += size * (taker != rank)
                if (head := next(queues[rank], None)) is None:
                    del heads[rank]
                else:
                    heads[rank] = head
                    left.append(rank)
                if not fits:  # too large for any round, so it has one of its own
                    left = []
                    break
            turn = left
        yield found


def taken_of(part: Box, first: int, stop: int, wanted: Box | None) -> Iterator[Taken]:
    """What a rank needs of a piece, in the order of its elements.

    Args:
        part: the box of the stored part.
        first: the first element of the piece in the part.
        stop: one past the last.
        wanted: the slice of the tensor that the rank needs; None for nothing.

    Examples:
        >>> list(taken_of(((2, 4), (0, 4)), 4, 8, ((0, 4), (2, 4))))
        [Taken(place=0, block=((3, 4), (0, 4)), box=((3, 4), (2, 4)))]
    """
    if wanted is None or (part and intersect(part, wanted) is None):
        return
    place = 0
    for inner in run_blocks(first, stop, tuple(high - low for low, high in part)):
        block = tuple((low + start, low + end) for (low, _), (start, end) in zip(part, inner, strict=True))
        common = intersect(block, wanted)
        if common is not None:
            yield Taken(place, block, common)
        place += volume(block)


def _taken_bytes(part: StoredPart, first: int, stop: int, wanted: Box | None) -> int:
    return part.item_bytes * sum(volume(taken.box) for taken in taken_of(part.box, first, stop, wanted))
