"""`side_by_side`: makes many calls, such as requests to a store: one after the other while they are quick, and `at_once` when they prove slow."""

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from trainfold.backends.helpers import Helpers, Task

T = TypeVar("T")

# a mean above it: a local file takes 0.04 ms, and 0.1 ms if threads share the work; a network takes more
_SLOW_SECS: Final = 1e-3
_LEAST: Final = 8  # before the mean counts
_THREADS: Final = 64  # at once; a store with 20 ms a request answers 1,000 in a third of a second


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of some calls, in their order.

    Args:
        calls: they may run at the same time, in any order and in any thread.

    Raises:
        BaseException: that of the first call that failed, in their order. Calls after it may have run.

    Examples:
        >>> side_by_side([lambda: 1, lambda: 2])
        [1, 2]
    """
    found: list[T] = []
    began = time.perf_counter()
    for call in calls:
        if len(found) >= _LEAST and time.perf_counter() - began > len(found) * _SLOW_SECS:
            break
        found.append(call())
    return found + at_once(calls[len(found) :], threads=_THREADS)


def at_once(calls: Sequence[Callable[[], T]], *, threads: int) -> list[T]:
    """The results of some calls, in their order, made in several threads; this one is one of them.

    Args:
        calls: as for `side_by_side`.
        threads: how many at most.

    Raises:
        BaseException: as for `side_by_side`.

    Examples:
        >>> at_once([lambda: 1, lambda: 2], threads=2), at_once([], threads=2)
        ([1, 2], [])
    """
    with Helpers(min(threads, len(calls)) - 1) as helpers:
        tasks = [helpers.give(Task(call)) for call in calls]
        return [task.result() for task in tasks]
