"""`fed`: calls a function in another thread, with parts that are made in this one.

The client takes parts of an upload in a thread in which it must not be called. To make them may take a call of it: of what is copied from
a bucket, and to confirm the lease.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar, final

from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.wakeup import Wakeup

T = TypeVar("T")
R = TypeVar("R")
_PATIENCE: Final = 10  # waits of a second, for a thread that dies before it begins


def fed(send: Callable[[Iterable[T]], R], parts: Iterable[T]) -> R:
    """The result of a function of some parts. They are made while it works: one waits while it has another.

    Args:
        send: is called once, in another thread; here if none can be started. It takes all parts, or raises.
        parts: made in this thread.

    Raises:
        BaseException: what ``parts`` raises; ``send`` gets another error in its place. Else what ``send`` raises; no more parts are made then.

    Examples:
        >>> fed(list, range(3))
        [0, 1, 2]
    """
    feed: _Feed[T] = _Feed()

    def run() -> R:
        feed.begin()
        try:
            return send(feed.taken())
        finally:
            feed.end()

    with Helpers(1) as helpers:
        task = helpers.give(Task(run))
        if not feed.has_begun_soon() and task.withdraw():
            return send(parts)
        try:
            for part in parts:
                if not feed.give(part):
                    break
        except BaseException:
            feed.fail()
            raise
        feed.finish()
        return task.result()


class _NoMore(Exception):
    """The parts end here, because making them failed."""


@final
class _Feed(Generic[T]):
    """A place for one part, between the thread that makes it and the one that takes it."""

    def __init__(self) -> None:
        self._here: deque[T] = deque()
        self._room, self._change = Wakeup(), Wakeup()
        self._has_begun = self._is_over = self._is_all = self._has_failed = False

    # --- the thread that makes parts -------------------------------------------------------------------------------

    def has_begun_soon(self) -> bool:
        """Wait until the other thread has begun; whether it has."""
        for _ in range(_PATIENCE):
            if self._has_begun:
                break
            self._room.wait()
        return self._has_begun

    def give(self, part: T) -> bool:
        """Give a part, when the one before it is taken; False if no more are wanted."""
        while self._here and not self._is_over:
            self._room.wait()
        self._here.append(part)
        self._change.ring()
        return not self._is_over

    def finish(self) -> None:
        """Note that there are no more."""
        self._is_all = True
        self._change.ring()

    def fail(self) -> None:
        """Note that there are no more, and that what was given is not all."""
        self._has_failed = True
        self._change.ring()

    # --- the thread that takes them --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that it takes them."""
        self._has_begun = True
        self._room.ring()

    def end(self) -> None:
        """Note that it takes no more."""
        self._is_over = True
        self._room.ring()

    def taken(self) -> Iterator[T]:
        """The parts, in their order."""
        while True:
            while not self._here and not self._is_all and not self._has_failed:
                self._change.wait()
            if self._has_failed:
                raise _NoMore
            if not self._here:
                return
            part = self._here.popleft()
            self._room.ring()
            yield part
