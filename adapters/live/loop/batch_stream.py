"""`BatchStream`: the iterator that ``live.batches()`` returns to the loop."""

import gc
import itertools
from collections.abc import Iterator
from threading import get_ident
from typing import Any, final

from trainfold.adapters.batches.feed import OPENED


@final
class Reading:
    """Whether an iteration has ended. It refers to nothing, so a loader is freed with its last iterator."""

    def __init__(self) -> None:
        self.has_ended = False
        self.thread: int | None = None  # the thread that asked for its newest batch


@final
class BatchStream:
    """Batches of a loader whose iterator is made at ``iter()``, as a DataLoader does.

    Making that iterator draws from the random streams. ``zip(a, b)`` makes both iterators before it asks for a batch.

    Args:
        batches: from `Feed.batches`.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._is_open = False
        self.reading = Reading()

    def __repr__(self) -> str:
        state = "no batches left" if self.reading.has_ended else "reading" if self._is_open else "not started"
        return f"<batches of a live run: {state}>"

    def __iter__(self) -> "BatchStream":
        if not self._is_open:
            self._is_open = True
            next(self._batches, OPENED)
        return self

    def __next__(self) -> Any:
        self.__iter__()
        self.reading.thread = get_ident()
        try:
            return next(self._batches)
        except StopIteration:
            self.reading.has_ended = True
            raise

    def is_cycled(self) -> bool:
        """Whether an `itertools.cycle` refers to it, and so keeps a list of its batches. The search goes through all objects."""
        return any(type(each) is itertools.cycle for each in gc.get_referrers(self))
