"""`time_limit`: yields batches until a time limit, and records whether these were all of them."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

from trainfold.adapters.evaluation.generators import close_generators
from trainfold.core.errors import InvalidArgument

T = TypeVar("T")


@final
class TimeLimit(Generic[T]):
    """Batches that end when the time is up; made by `time_limit`. All other attributes are those of the batches.

    A time limit ends each rank at a different batch, so it is not known which samples were seen. To continue an evaluation later,
    cut it into parts by steps, as ``eval_batches(..., limit=...)`` does.

    Attributes:
        batches: the limited batches.
    """

    def __init__(self, batches: Iterable[T], secs: float, clock: Callable[[], float]) -> None:
        self.batches = batches
        self._secs = secs
        self._clock = clock
        self._gave_all = False

    def __repr__(self) -> str:
        return f"TimeLimit({self.batches!r}, secs={self._secs})"

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
                f"{name}: the time was up before the batches ended; to continue later, limit the steps of a part"
            )
        return getattr(self.batches, name)  # such as state_dict of a loader, whose position is put back


def time_limit(batches: Iterable[T], *, secs: float, clock: Callable[[], float] = time.monotonic) -> TimeLimit[T]:
    """Stop yielding batches when the time is up, and record whether there were more.

    The time counts from the first batch asked for, and includes the work done with the batches. It is checked between batches, so
    no batch is cut, and the first one is always yielded, so there is a result however small the limit is. To find out whether there
    were more, one more batch is drawn and not yielded; from an iterator it is lost. A generator that did not end is closed.

    With several ranks each has its own time, and the evaluation is partial on all ranks if it is on one.

    Args:
        batches: a loader, a list, an iterator; it can be iterated over again if they can.
        secs: the limit, > 0.
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
