"""Doing a thing on every rank so that a failure on one is raised on all, and nobody waits for it (C07)."""

from collections.abc import Callable
from typing import TypeVar

from trainfold.core.errors import RankFailed, TrainfoldError, place
from trainfold.core.layout.world import Collectives
from trainfold.core.problem import Problem, problem_of

T = TypeVar("T")


def on_all_ranks(world: Collectives, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank, and return what each got, in rank order, on every rank.

    Args:
        world: the ranks; all of them call.
        action: what to do here.

    Raises:
        Exception: the rank's own, where its action failed.
        RankFailed: on the other ranks, naming the lowest rank that failed and saying what it said.

    Examples:
        >>> from trainfold.backends.ranks.in_process import run_threads
        >>> run_threads(2, lambda world: on_all_ranks(world, lambda: world.rank * 10))
        [[0, 10], [0, 10]]
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised here and told to the others
        failure = error
    told: list[tuple[T | None, Problem | None]] = world.gather((value, None if failure is None else _told(failure)))
    if failure is not None:
        if world.world_size > 1:
            place(failure, rank=world.rank)
        raise failure
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            told_of = RankFailed(f"rank {rank}", expected="every rank to succeed", found=str(problem), fix=problem.fix)
            told_of.rank = rank
            raise told_of
    return [value for value, _ in told]  # type: ignore[misc] # no rank failed, so each has its T


def on_rank_zero(world: Collectives, action: Callable[[], T]) -> T:
    """Run an action on rank 0 alone, and return what it got on every rank.

    Raises:
        Exception: on rank 0, where the action failed.
        RankFailed: on the other ranks.

    Examples:
        >>> from trainfold.backends.ranks.in_process import run_threads
        >>> run_threads(2, lambda world: on_rank_zero(world, lambda: world.rank))
        [0, 0]
    """
    return on_all_ranks(world, lambda: action() if world.rank == 0 else None)[0]  # type: ignore[return-value]


def _told(error: Exception) -> Problem:
    if isinstance(error, TrainfoldError):
        return problem_of(error)
    return Problem(type(error).__name__, "this rank", "no error", str(error), "see the rank's own traceback")
