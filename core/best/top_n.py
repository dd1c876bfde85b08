"""`plan_best`: which of the N best stay after a new result, decided before any deletion; `rewound`: which stay after a rewind."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, final

import attrs

from trainfold.core.best.record import BestRecord, score_of, updated
from trainfold.core.best.score import Direction, checked_direction, checked_step, finite_given
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

_Kept = TypeVar("_Kept", BestRecord, "tuple[BestEntry, ...]")


@final
@attrs.frozen
class BestEntry:
    """One of the N best: its score, None if it is absent, and the optimizer step that it was measured at."""

    score: float | None
    step: int


@final
@attrs.frozen
class BestPlan:
    """The decision about the N best; prints as a table.

    Attributes:
        kept: the best from now on, the best one first.
        dropped: entries kept until now; their checkpoints may be deleted if no other rule keeps them.
        accepted: whether the newcomer is among the kept.
    """

    kept: tuple[BestEntry, ...]
    dropped: tuple[BestEntry, ...]
    accepted: bool

    def __str__(self) -> str:
        lines = [f"{'place':<7}{'step':>10}  score"]
        lines += [f"{place:<7}{entry.step:>10}  {entry.score!r}" for place, entry in enumerate(self.kept, 1)]
        lines += [f"{'dropped':<7}{entry.step:>10}  {entry.score!r}" for entry in self.dropped]
        return "\n".join([*lines, f"the newcomer is {'kept' if self.accepted else 'not kept'}"])


def plan_best(kept: Iterable[BestEntry], newcomer: BestEntry, *, n: int, direction: Direction) -> BestPlan:
    """Decide which of the N best stay: the new result is compared with the worst one kept.

    Laws: after any history the kept entries are its first ``n``, sorted by score and then by step, whatever order they came in.
    So no entry is dropped for a worse one, and of equal scores the earlier step stays. With ``n=1`` and rising steps it equals
    `is_better` with a ``min_delta`` of 0.0. A newcomer without a finite score is not kept. Neither is a second one of a step
    that is already kept, because a step has one checkpoint: call `rewound` first if the run went back and trained the step
    again.

    Args:
        kept: the best until now; more than ``n`` if the number was lowered since.
        newcomer: the new result.
        n: how many to keep, >= 1.
        direction: ``"min"`` if less is better, ``"max"`` if more is.

    Raises:
        InvalidArgument: naming the invalid argument.

    Examples:
        >>> best = (BestEntry(0.3, 10), BestEntry(0.5, 20))
        >>> print(plan_best(best, BestEntry(0.4, 30), n=2, direction="min"))
        place        step  score
        1              10  0.3
        2              30  0.4
        dropped        20  0.5
        the newcomer is kept
    """
    checked_direction(direction)
    count("n", n, fix="keep at least the best one")
    before = tuple(_checked(entry, f"kept[{place}]") for place, entry in enumerate(kept))
    fresh = _checked(newcomer, "newcomer", is_new=True)
    stands = fresh.score is not None and all(entry.step != fresh.step for entry in before)
    ranked = sorted((*before, fresh) if stands else before, key=lambda entry: _place(entry, direction))
    staying = tuple(ranked[:n])
    dropped = tuple(entry for entry in ranked[n:] if entry is not fresh)
    return BestPlan(staying, dropped, accepted=any(entry is fresh for entry in staying))


def updated_n(
    record: BestRecord, kept: Iterable[BestEntry], result: Mapping[str, Any], *, step: int, n: int
) -> tuple[BestRecord, BestPlan]:
    """The record and the plan for the N best after one more evaluation.

    Law: the decision is that of `updated` and `plan_best`; a winner is among the N best, unless its step was already.

    Args:
        record: the best so far.
        kept: the N best until now.
        result: what ``evaluate`` returned, or a dict.
        step: the optimizer step that was evaluated.
        n: how many to keep, >= 1.

    Raises:
        InvalidArgument: as `updated` and `plan_best`.
    """
    new = updated(record, result, step=step)
    return new, plan_best(kept, BestEntry(score_of(record, result), step), n=n, direction=record.direction)


def rewound(best: _Kept, step: int) -> _Kept:
    """The best without the results measured after a step, for a run that goes back to that step.

    Args:
        best: a `BestRecord`, or the tuple of entries that `plan_best` keeps.
        step: the step to continue from; a best measured at it or before stays.

    Returns:
        The record, without score and step if they are later; or the entries that are not later.

    Raises:
        InvalidArgument: if the step is not an int >= 0, or the first argument is neither.

    Examples:
        >>> rewound((BestEntry(0.3, 30), BestEntry(0.4, 10)), 20)
        (BestEntry(score=0.4, step=10),)
    """
    checked_step(step)
    if isinstance(best, BestRecord):
        return best if best.step is None or best.step <= step else attrs.evolve(best, score=None, step=None)
    if not isinstance(best, tuple):
        raise InvalidArgument("best", expected="a BestRecord, or a tuple of BestEntry", found=shown(best),
                              fix="pass what updated returned, or the kept of a BestPlan")  # fmt: skip
    return tuple(entry for entry in best if entry.step <= step)


def ranked(entries: Iterable[BestEntry], *, direction: Direction) -> tuple[BestEntry, ...]:
    """The entries, the best one first; of equal scores the earlier step first.

    Args:
        entries: what a plan kept, in any order.
        direction: ``"min"`` or ``"max"``.

    Raises:
        InvalidArgument: unless they are entries with a finite score each, one entry for each step.

    Examples:
        >>> ranked([BestEntry(0.5, 10), BestEntry(0.3, 30), BestEntry(0.5, 5)], direction="min")
        (BestEntry(score=0.3, step=30), BestEntry(score=0.5, step=5), BestEntry(score=0.5, step=10))
    """
    checked_direction(direction)
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise InvalidArgument("kept", expected="entries", found=shown(entries), fix="pass the kept of a BestPlan")
    checked = [_checked(entry, f"kept[{place}]") for place, entry in enumerate(entries)]
    if len({entry.step for entry in checked}) < len(checked):
        raise InvalidArgument("kept", expected="one entry for each step", found=shown([entry.step for entry in checked]),
                              fix="pass the kept of a BestPlan")  # fmt: skip
    return tuple(sorted(checked, key=lambda entry: _place(entry, direction)))


def _place(entry: BestEntry, direction: Direction) -> tuple[float, int]:
    assert entry.score is not None
    return (entry.score if direction == "min" else -entry.score, entry.step)


def _checked(entry: object, where: str, *, is_new: bool = False) -> BestEntry:
    """The entry with its score as a float; only a new entry may have None, for a score that is absent or not finite."""
    if not isinstance(entry, BestEntry):
        raise InvalidArgument(where, expected="a BestEntry", found=shown(entry), fix="make BestEntry(score, step)")
    step, score = checked_step(entry.step), None if entry.score is None else finite_given(entry.score)
    if score is None and not is_new:
        raise InvalidArgument(f"{where}.score", expected="a finite number", found=shown(entry.score),
                              fix="keep what an earlier plan kept")  # fmt: skip
    return BestEntry(score, step)
