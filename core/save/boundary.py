"""`Boundary`: what one rank knows at a boundary, as a row of whole numbers for the others, and what all ranks agree on."""

from collections.abc import Sequence
from typing import Final, final

import attrs

from trainfold.core.errors import RanksDisagree, place
from trainfold.core.save.requests import REQUESTS, StopRequest

_MICROS: Final = 1_000_000
_STEP_BITS: Final = 48
_CLOSED: Final = 1 << _STEP_BITS
_FLAG: Final = _CLOSED << 1
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


def passed_number(step: int | None, flags: int, *, is_closed: bool = False) -> int:
    """What a rank puts up when it leaves a boundary, or closes its manager.

    Args:
        step: of the last boundary that it has left, or of its last save if that came later; None if there is none.
        flags: at how many boundaries it had a flag so far.
        is_closed: whether it comes to no other one.
    """
    return flags * _FLAG + (_CLOSED if is_closed else 0) + (0 if step is None else step + 1)


def _read(number: int) -> tuple[int, int, bool]:
    """The step of a number that was put up, or -1; the flags; whether the manager is closed."""
    return ((number % _CLOSED) - 1, number // _FLAG, bool(number & _CLOSED)) if number >= 0 else (-1, 0, False)


def without_flag(passed: Sequence[int], rank: int, step: int, flags: int) -> tuple[list[int], list[int]]:
    """The ranks that have certainly passed a boundary without the flag for which this one waits there, and of them those that have closed their manager.

    Args:
        passed: by rank, what it has put up last, from `passed_number`; -1 if nothing.
        rank: this rank. If it has left this boundary itself, and waits there again, as `finish` does after the loop, others may still be on their way.
        step: where it waits.
        flags: at how many boundaries this rank had a flag, with this one. Ranks that were here with a flag have had as many.

    Examples:
        >>> without_flag([passed_number(6, 0), passed_number(7, 0), passed_number(6, 0)], 0, 7, 1), without_flag([passed_number(7, 0), passed_number(7, 0), passed_number(8, 0)], 0, 7, 1)
        (([1], []), ([2], []))
        >>> without_flag([passed_number(6, 0), passed_number(7, 1), passed_number(6, 0, is_closed=True), passed_number(7, 1, is_closed=True)], 0, 7, 1)
        ([2], [2])
    """
    (mine, _, _), every = _read(passed[rank]), [_read(each) for each in passed]
    closed = [each for each, (_, had, is_closed) in enumerate(every) if is_closed and had < flags]
    left = [
        each for each, (at, had, _) in enumerate(every) if had < flags and (at > step or (at == step and mine < step))
    ]
    return sorted({*closed, *left}), closed


def never_come(passed: Sequence[int], step: int) -> RanksDisagree | None:
    """The error for ranks that have closed their manager before a boundary where another one waits for them; None without any.

    Args:
        passed: by rank, what it has put up last, from `passed_number`; -1 if nothing.
        step: of the boundary.

    Examples:
        >>> print(never_come([passed_number(6, 0), passed_number(6, 0, is_closed=True), passed_number(7, 0, is_closed=True)], 7))
        the boundary at step 7: expected every rank, found rank 1, which has closed its manager after step 6; end the loops of all ranks at one step: give every rank as many batches, or sum over the ranks who has none left. If a rank has left its manager by an error, see that error
        >>> never_come([passed_number(6, 0), passed_number(7, 0, is_closed=True)], 7)
    """
    gone = {each: at for each, (at, _, is_closed) in enumerate(map(_read, passed)) if is_closed and at < step}
    if not gone:
        return None
    ends = sorted(set(gone.values()))
    after = (
        "before its first step" if ends == [-1] else f"after step {' or '.join(str(end) for end in ends if end >= 0)}"
    )
    error = RanksDisagree(
        f"the boundary at step {step}",
        expected="every rank",
        found=f"rank {', '.join(map(str, gone))}, which has closed its manager {after}",
        fix=f"{_SAME[1][2]}. If a rank has left its manager by an error, see that error",
    )
    place(error, step=step)
    return error


def flag_missing(flag: str, rank: int, passed: Sequence[int], closed: Sequence[int]) -> RanksDisagree:
    """The error for ranks that have passed a boundary without a flag.

    Args:
        flag: ``is_last`` or ``is_best``.
        rank: that was given it.
        passed: the ranks that were not.
        closed: those of them that have closed their manager.
    """
    _, where, fix = next(each for each in _SAME if each[0] == flag)
    others = ", ".join(map(str, closed or passed))
    if closed:
        fix = (
            "call manager.finish on every rank, or on none; if a rank has left its manager by an error, see that error"
        )
    return RanksDisagree(
        where,
        expected="the same on every rank",
        found=f"True on rank {rank}, and not on rank {others}, which {'has closed its manager' if closed else 'went on'}",
        fix=fix,
    )


def _by_rank(what: str, column: Sequence[int]) -> str:
    if what == "step":
        return f"{list(column)}, by rank"
    ranks = [str(rank) for rank, flag in enumerate(column) if flag]
    return f"True on rank {', '.join(ranks)} of {len(column)}, and not on the others"
