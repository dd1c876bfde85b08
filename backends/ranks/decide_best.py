"""`decide_best` and `decide_best_n`: rank 0's decision about the best checkpoint, on every rank; `core.best` decides."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.core.best.record import BestRecord, updated
from trainfold.core.best.top_n import BestEntry, BestPlan, updated_n
from trainfold.core.errors import placed
from trainfold.core.layout.world import Collectives


def decide_best(
    record: BestRecord, result: Mapping[str, Any], *, step: int, collectives: Collectives | None = None
) -> tuple[BestRecord, bool]:
    """Decide on rank 0 and share the decision in one collective, so that all ranks act alike, whatever record each of them has.

    Args:
        record: the best so far; rank 0's counts.
        result: what ``evaluate`` returned; rank 0's counts.
        step: the optimizer step that was evaluated.
        collectives: the ranks, all of which call; None for a single process.

    Returns:
        The record from now on, and whether the result won.

    Raises:
        InvalidArgument: as `updated`; on rank 0.
        RankFailed: on the other ranks, if rank 0 raised.

    Examples:
        >>> from trainfold.retention import make_best_record
        >>> record, won = decide_best(make_best_record(metric="loss", direction="min"), {"loss": 0.0}, step=5)
        >>> won, record.score
        (True, 0.0)
    """

    def decide() -> tuple[BestRecord, bool]:
        new = updated(record, result, step=step)
        return new, new is not record

    with placed(step=step):
        return on_rank_zero(SingleProcess() if collectives is None else collectives, decide, doing="decide on the best")


def decide_best_n(  # noqa: PLR0913 - keywords
    record: BestRecord,
    kept: Iterable[BestEntry],
    result: Mapping[str, Any],
    *,
    step: int,
    n: int,
    collectives: Collectives | None = None,
) -> tuple[BestRecord, BestPlan]:
    """Decide on the best and on the N best at once, on rank 0, and share the decision in one collective.

    Law: the decision is that of `updated` and `plan_best` on rank 0; a winner is among the N best, unless its step was already.

    Args:
        record: the best so far; rank 0's counts, as of all the others.
        kept: the N best until now.
        result: what ``evaluate`` returned, or a dict.
        step: the optimizer step that was evaluated.
        n: how many to keep, >= 1.
        collectives: the ranks, all of which call; None for a single process.

    Returns:
        The record from now on, and the plan for the N best: ``save_best(run, record, kept=plan.kept)`` if ``plan.accepted``.

    Raises:
        InvalidArgument: as `updated` and `plan_best`; on rank 0.
        RankFailed: on the other ranks, if rank 0 raised.

    Examples:
        >>> from trainfold.retention import make_best_record
        >>> record, kept = make_best_record(metric="loss", direction="min"), ()
        >>> for step, loss in [(10, 0.5), (20, 0.3), (30, 0.4)]:
        ...     record, plan = decide_best_n(record, kept, {"loss": loss}, step=step, n=2)
        ...     kept = plan.kept
        >>> record.step, [entry.step for entry in kept]
        (20, [20, 30])
    """
    with placed(step=step):
        return on_rank_zero(
            SingleProcess() if collectives is None else collectives,
            lambda: updated_n(record, kept, result, step=step, n=n),
            doing="decide on the best",
        )
