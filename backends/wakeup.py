"""`Wakeup`: wakes the one thread that waits for something to change; `Latch`: tells that something is over, for good."""

import threading
from contextlib import suppress
from typing import Final, final

_AT_LEAST_EVERY_SECS: Final = 1.0


@final
class Wakeup:
    """Not a condition: Ctrl-C in the middle of one of those may leave its lock taken, and then the other thread waits for ever.

    One thread waits, and looks again each time it returns; any thread rings. It also returns now and then when nobody rang,
    in case an interrupt came before somebody could.

    Examples:
        >>> bell = Wakeup()
        >>> bell.ring()
        >>> bell.ring()
        >>> bell.wait()
    """

    def __init__(self) -> None:
        self._is_silent = threading.Lock()
        self._is_silent.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the one that will."""
        if self._is_silent.locked():
            with suppress(RuntimeError):  # somebody else rang just now
                self._is_silent.release()

    def wait(self) -> None:
        """Return when somebody has rung since the last time."""
        self._is_silent.acquire(timeout=_AT_LEAST_EVERY_SECS)


@final
class Latch:
    """The end of something, told by itself.

    Attributes:
        is_over: whether it was told.

    Examples:
        >>> end = Latch()
        >>> end.tell()
        >>> end.wait()
        >>> end.is_over
        True
    """

    def __init__(self) -> None:
        self.is_over = False
        self._bell = Wakeup()

    def tell(self) -> None:
        """It is over."""
        self.is_over = True
        self._bell.ring()

    def wait_a_moment(self) -> None:
        """Return when it is over, or a little later: whoever waits may look whether it can still come."""
        if not self.is_over:
            self._bell.wait()

    def wait(self) -> None:
        """Return when it is over; if this is interrupted, it can be called again."""
        while not self.is_over:
            self._bell.wait()
