"""`Boundary`: what one rank knows at a boundary, as a row of whole numbers for the others, and what all ranks agree on."""

from collections.abc import Sequence
from typing import Final, final

import attrs

from trainfold.core.errors import RanksDisagree
from trainfold.core.save.requests import REQUESTS, StopRequest

_MICROS: Final = 1_000_000
_SAME: Final = (
    ("step", "the step", "call the manager at the same boundaries on every rank"),
    ("is_last", "is_last", "end the loops of all ranks at one step: give every rank as many batches, or sum over the ranks who has none left"),
    ("is_best", "is_best", "decide once for all ranks: decide_best(record, result, step=..., collectives=...)"),
)  # fmt: skip


@final
@attrs.frozen
class Boundary:
    """What one rank knows at a boundary; or what all ranks have agreed on, as `agreed_boundary` returns it.

    Attributes:
        step: optimizer steps done.
        is_last: whether the run ends here.
        is_best: whether this state is the best so far.
        has_ended: whether the save under way has ended, on every rank.
        secs_since_save: by rank 0's clock.
        every: the cadence that rank 0 has chosen; None before it has.
        asked: the requests that have come since the boundary before, on any rank.
        has_failed: whether a rank could not ask for requests.
    """

    step: int
    is_last: bool = False
    is_best: bool = False
    has_ended: bool = False
    secs_since_save: float = 0.0
    every: int | None = None
    asked: tuple[StopRequest, ...] = ()
    has_failed: bool = False

    def numbers(self) -> tuple[int, ...]:
        """The row of this rank.

        Examples:
            >>> agreed_boundary([Boundary(7, asked=("stop",)).numbers()])
            Boundary(step=7, is_last=False, is_best=False, has_ended=False, secs_since_save=0.0, every=None, asked=('stop',), has_failed=False)
        """
        asked = sum(1 << REQUESTS.index(request) for request in self.asked)
        flags = (self.step, self.is_last, self.is_best, self.has_ended, self.has_failed)
        return (*map(int, flags), int(self.secs_since_save * _MICROS), self.every or 0, asked)


def agreed_boundary(rows: Sequence[tuple[int, ...]]) -> Boundary:
    """What all ranks act on: rank 0's clock and cadence, the requests of any rank, and a save that has ended on every rank.

    Args:
        rows: `Boundary.numbers` of each rank.

    Raises:
        RanksDisagree: if the ranks are at different steps, or only some of them say that this is the last step, or the best.

    Examples:
        >>> rows = [Boundary(7, secs_since_save=9.0).numbers(), Boundary(7, secs_since_save=8.0, asked=("save",)).numbers()]
        >>> found = agreed_boundary(rows)
        >>> found.secs_since_save, found.asked
        (9.0, ('save',))
    """
    steps, last, best, ended, failed, _, _, asked = zip(*rows, strict=True)
    for (what, where, fix), column in zip(_SAME, (steps, last, best), strict=True):
        if len(set(column)) > 1:
            raise RanksDisagree(where, expected="the same on every rank", found=_by_rank(what, column), fix=fix)
    _, is_last, is_best, _, _, micros, every, _ = rows[0]
    return Boundary(
        steps[0],
        bool(is_last),
        bool(is_best),
        all(ended),
        micros / _MICROS,
        every or None,
        tuple(request for bit, request in enumerate(REQUESTS) if any(each >> bit & 1 for each in asked)),
        any(failed),
    )


def without_flag(passed: Sequence[int], rank: int, step: int) -> list[int]:
    """The ranks that have certainly passed a boundary without the flag for which this one waits there.

    Args:
        passed: by rank, the step of the last boundary that it has left without a flag; -1 if none.
        rank: this rank. If it has left this boundary itself, and waits there again, as `finish` does after the loop, others may still be on their way.
        step: where it waits.

    Examples:
        >>> without_flag([6, 7, 6], 0, 7), without_flag([7, 7, 8], 0, 7)
        ([1], [2])
    """
    return [each for each, left in enumerate(passed) if left > step or (left == step and passed[rank] < step)]


def flag_missing(flag: str, rank: int, passed: Sequence[int]) -> RanksDisagree:
    """The error for ranks that have passed a boundary without a flag.

    Args:
        flag: ``is_last`` or ``is_best``.
        rank: that was given it.
        passed: the ranks that were not.
    """
    _, where, fix = next(each for each in _SAME if each[0] == flag)
    others = ", ".join(map(str, passed))
    return RanksDisagree(
        where,
        expected="the same on every rank",
        found=f"True on rank {rank}, and not on rank {others}, which went on",
        fix=fix,
    )


def _by_rank(what: str, column: Sequence[int]) -> str:
    if what == "step":
        return f"{list(column)}, by rank"
    ranks = [str(rank) for rank, flag in enumerate(column) if flag]
    return f"True on rank {', '.join(ranks)} of {len(column)}, and not on the others"
