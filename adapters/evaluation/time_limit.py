"""`time_limit`: batches for so many seconds, and whether that was all of them (Q12)."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

from trainfold.adapters.evaluation.generators import close_generators
from trainfold.core.errors import InvalidArgument

T = TypeVar("T")


@final
class TimeLimit(Generic[T]):
    """Batches that end when the time is up; made by `time_limit`. Whatever else the batches have is there as well.

    A limit of time falls where it falls, on each rank elsewhere, so that nobody knows which samples were seen: to go on later, cut
    an evaluation into parts by steps, as ``eval_batches(..., limit=...)`` does.

    Attributes:
        batches: what is limited.
    """

    def __init__(self, batches: Iterable[T], secs: float, clock: Callable[[], float]) -> None:
        self.batches = batches
        self._secs = secs
        self._clock = clock
        self._gave_all = False

    @property
    def complete(self) -> bool:
        """Whether the last iteration gave every batch, and these were all there is."""
        return self._gave_all and bool(getattr(self.batches, "complete", True))

    def __iter__(self) -> Iterator[T]:
        self._gave_all = False
        deadline = self._clock() + self._secs
        is_first = True
        iterator = iter(self.batches)
        try:
            for batch in iterator:
                if not is_first and self._clock() >= deadline:
                    return
                is_first = False
                yield batch
            self._gave_all = True
        finally:
            close_generators(iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (name == "after" and not self._gave_all):
            raise AttributeError(
                f"{name}: time was up before the batches were; to go on later, limit the steps of a part"
            )
        return getattr(self.batches, name)  # such as state_dict of a loader, whose position is put back


def time_limit(batches: Iterable[T], *, secs: float, clock: Callable[[], float] = time.monotonic) -> TimeLimit[T]:
    """Stop giving batches when the time is up, and know whether there were more.

    Time counts from the first batch asked for, and includes what is done with the batches. It is looked at between batches: none
    is cut, and the first one is always given, so that there is a result however small the limit is. To know whether there were more,
    one batch is taken that is not given; from an iterator it is lost. A generator that is left before its end is closed.

    With several ranks, each has its own time, and evaluations are partial on all if they are on one.

    Args:
        batches: a loader, a list, an iterator; it can be iterated over again if they can.
        secs: how long, > 0.
        clock: seconds, from any origin.

    Raises:
        InvalidArgument: unless ``secs > 0``.

    Examples:
        >>> seconds = iter([0.0, 4.0, 8.0, 12.0])
        >>> some = time_limit("abcdef", secs=10, clock=lambda: next(seconds))
        >>> "".join(some), some.complete
        ('abc', False)
        >>> every = time_limit("abc", secs=3600)
        >>> "".join(every), every.complete
        ('abc', True)
    """
    if not secs > 0:
        raise InvalidArgument("secs", expected="secs > 0", found=secs, fix="leave time_limit out to have no limit")
    return TimeLimit(batches, secs, clock)
