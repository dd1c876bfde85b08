"""`Wakeup`: wakes the one thread that waits for a change. `Latch`: records, for good, that something is over."""

import threading
from contextlib import suppress
from typing import Final, final

_AT_LEAST_EVERY_SECS: Final = 1.0


@final
class Wakeup:
    """One thread waits, and checks for a change each time `wait` returns; any thread may ring.

    It is not a condition: Ctrl-C in the middle of one may leave its lock taken, and then the other thread waits forever. `wait` also
    returns once a second without a ring, in case an interrupt came before one.

    Examples:
        >>> wakeup = Wakeup()
        >>> wakeup.ring()
        >>> wakeup.ring()
        >>> wakeup.wait()
    """

    def __init__(self) -> None:
        self._is_silent = threading.Lock()
        self._is_silent.acquire()

    def ring(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        if self._is_silent.locked():
            with suppress(RuntimeError):  # another thread has just rung
                self._is_silent.release()

    def wait(self) -> None:
        """Return when a thread has rung since the last time."""
        self._is_silent.acquire(timeout=_AT_LEAST_EVERY_SECS)


@final
class Latch:
    """A flag for the end of something. It stays set.

    Attributes:
        is_over: whether it is set.

    Examples:
        >>> end = Latch()
        >>> end.set()
        >>> end.wait()
        >>> end.is_over
        True
    """

    def __init__(self) -> None:
        self.is_over = False
        self._wakeup = Wakeup()

    def set(self) -> None:
        """Record that it is over."""
        self.is_over = True
        self._wakeup.ring()

    def wait_briefly(self) -> None:
        """Return when it is over, or after a short time, so that the caller can check whether the end can still come."""
        if not self.is_over:
            self._wakeup.wait()

    def wait(self) -> None:
        """Return when it is over. It can be called again after an interrupt."""
        while not self.is_over:
            self._wakeup.wait()
