"""`BatchStream`: the iterator that a loop over ``live.batches()`` has in its hands."""

import gc
import itertools
from collections.abc import Iterator
from threading import get_ident
from typing import Any, final

from trainfold.adapters.draws.feed import OPENED


@final
class Reading:
    """Whether an iteration has come to its end. It holds nothing, so that a loader goes with its last iterator."""

    def __init__(self) -> None:
        self.has_ended = False
        self.thread: int | None = None  # that has asked for its last batch


@final
class BatchStream:
    """Batches, whose loader's iterator is made by ``iter()``, as a DataLoader makes it.

    Making it draws from the random streams. ``zip(a, b)`` makes both before it asks for a batch.

    Args:
        batches: from `Feed.batches`.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._is_open = False
        self.reading = Reading()

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
        """Whether `itertools.cycle` holds it, and with it a list of the batches that it gave. It looks through all objects."""
        return any(type(each) is itertools.cycle for each in gc.get_referrers(self))
