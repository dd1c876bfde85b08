"""`on_all_ranks`: runs an action on every rank. A failure on one rank raises on all of them, and no rank hangs."""

from collections.abc import Callable
from typing import TypeVar

from trainfold.core.errors import RankFailed, TrainfoldError, place, rank_failed
from trainfold.core.layout.world import Collectives
from trainfold.core.problem import Problem, problem_of

T = TypeVar("T")


def on_all_ranks(world: Collectives, action: Callable[[], T], *, doing: str = "", is_vote: bool = False) -> list[T]:
    """Run an action on every rank, and return the results of all ranks, in rank order, on every rank.

    Args:
        world: the ranks; all of them call.
        action: what this rank does.
        doing: the same in words, such as ``"write its files"``, for the error if a rank does not come.
        is_vote: whether the action reads and writes so little that the others wait for it only as long as for a vote.

    Raises:
        Exception: on a rank whose action failed, the error of that action.
        RankFailed: on the other ranks, with the lowest rank that failed and its error.

    Examples:
        >>> from trainfold.ranks import run_threads
        >>> run_threads(2, lambda world: on_all_ranks(world, lambda: world.rank * 10))
        [[0, 10], [0, 10]]
    """
    value, failure = _tried(action)
    found: list[tuple[T | None, Problem | None]] = world.gather(
        (value, None if failure is None else _problem(failure)), doing=doing, is_vote=is_vote
    )
    if failure is not None:
        raise _placed(failure, world)
    for rank, (_, problem) in enumerate(found):
        if problem is not None:
            raise _elsewhere(rank, problem)
    return [value for value, _ in found]  # type: ignore[misc] # no rank failed, so each has its T


def on_rank_zero(world: Collectives, action: Callable[[], T], *, doing: str = "", is_vote: bool = False) -> T:
    """Run an action on rank 0 only, and return its result on every rank.

    Raises:
        Exception: on rank 0, if the action failed.
        RankFailed: on the other ranks.

    Examples:
        >>> from trainfold.ranks import run_threads
        >>> run_threads(2, lambda world: on_rank_zero(world, lambda: world.rank))
        [0, 0]
    """
    value, failure = _tried(action) if world.rank == 0 else (None, None)
    found: tuple[T | None, Problem | None] = world.broadcast(
        (value, None if failure is None else _problem(failure)), doing=doing, is_vote=is_vote
    )
    if failure is not None:
        raise _placed(failure, world)
    if found[1] is not None:
        raise _elsewhere(0, found[1])
    return found[0]  # type: ignore[return-value] # rank 0 did not fail, so it is a T


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - it is raised by the caller, and reported to the other ranks
        return None, error


def _placed(failure: Exception, world: Collectives) -> Exception:
    if world.world_size > 1:
        place(failure, rank=world.rank)
    return failure


def _elsewhere(rank: int, problem: Problem) -> RankFailed:
    return rank_failed(rank, expected="every rank to succeed", found=problem.difference, fix=problem.fix)


def _problem(error: Exception) -> Problem:
    if isinstance(error, TrainfoldError):
        return problem_of(error)
    return Problem(type(error).__name__, "this rank", "no error", str(error), "see the rank's own traceback")
