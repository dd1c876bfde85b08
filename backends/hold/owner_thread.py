"""`OwnerThread`: waits until another thread has left the operation that it is in, such as a kernel that writes to a tensor."""

import sys
import threading
import time
from types import FrameType
from typing import Final, final

from trainfold.backends import wakeup as bell

LONGEST_SECS: Final = 0.5
_WAITING: Final = (vars(threading), vars(bell))
_FIRST_NAP_SECS: Final = 0.0005
_LONGEST_NAP_SECS: Final = 0.02


@final
class OwnerThread:
    """The thread that it is made in.

    A kernel moves the version counter of what it writes to before it returns to Python, so once the thread's place in its
    Python code has moved, the counters tell of whatever was being written before. A thread in the module `threading`
    waits for a lock, and is in no kernel; so does one at a `Bell`.

    Examples:
        >>> OwnerThread().wait_until_it_moves()  # in its own thread there is nothing to wait for
        True
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()

    def wait_until_it_moves(self, *, longest_secs: float = LONGEST_SECS) -> bool:
        """Return when the thread has left the operation that it is in now, or waits, or has ended.

        Args:
            longest_secs: give up after so long, because an operation may also wait for what never comes.

        Returns:
            Whether it has.
        """
        if self._ident == threading.get_ident():
            return True
        deadline, nap_secs = time.monotonic() + longest_secs, _FIRST_NAP_SECS
        before = self._place()
        while before is not None and self._place() == before:
            if time.monotonic() >= deadline:
                return False
            time.sleep(nap_secs)
            nap_secs = min(2 * nap_secs, _LONGEST_NAP_SECS)
        return True

    def _place(self) -> tuple[FrameType, int] | None:
        """Where the thread is in its Python code; None where it is in no operation."""
        frame = sys._current_frames().get(self._ident)  # noqa: SLF001  # public but for its name
        if frame is None or any(frame.f_globals is each for each in _WAITING):
            return None
        return frame, frame.f_lasti
