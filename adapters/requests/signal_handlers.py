"""Records and exactly restores what a process does at a signal, including handlers installed by C code."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, TypeAlias, final

import attrs

Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | None"
_STRUCT_BYTES = 512  # more than `struct sigaction` has anywhere


@final
@attrs.frozen
class Disposition:
    """What a process did at a signal.

    Attributes:
        number: the signal.
        handler: what `signal.getsignal` said: a function, ``SIG_DFL`` or ``SIG_IGN``; None for a handler that is not Python's.
        raw: the C library's ``struct sigaction``, empty if it cannot be read. `signal.signal` would lose handlers that it does not
            know (those of `faulthandler.register`) and the flag of `signal.siginterrupt`.
    """

    number: int
    handler: Handler
    raw: bytes = attrs.field(repr=False, eq=False)  # the C library writes more into it than it was given

    @property
    def is_function(self) -> bool:
        """Whether Python calls a function at the signal, other than its default for SIGINT."""
        return callable(self.handler) and self.handler is not signal.default_int_handler


def disposition_of(number: int) -> Disposition:
    """What the process does at a signal now.

    Examples:
        >>> disposition_of(signal.SIGINT).is_function
        False
    """
    raw = ctypes.create_string_buffer(_STRUCT_BYTES)
    with suppress(AttributeError, OSError):
        if _libc().sigaction(ctypes.c_int(number), None, raw) == 0:
            return Disposition(number, signal.getsignal(number), raw.raw)
    return Disposition(number, signal.getsignal(number), b"")


def put_back(disposition: Disposition) -> None:
    """Restore what a signal did; only in the main thread, like `signal.signal`.

    Examples:
        >>> before = disposition_of(signal.SIGUSR2)
        >>> _ = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        >>> put_back(before)
        >>> disposition_of(signal.SIGUSR2) == before
        True
    """
    handler = signal.SIG_DFL if disposition.handler is None else disposition.handler
    signal.signal(disposition.number, handler)
    if disposition.raw:
        with suppress(AttributeError, OSError):
            _libc().sigaction(ctypes.c_int(disposition.number), disposition.raw, None)


def hand_on(disposition: Disposition, frame: FrameType | None) -> None:
    """Pass a signal that has arrived to what was there before; called from a handler, so in the main thread."""
    if callable(disposition.handler):
        disposition.handler(disposition.number, frame)
    elif disposition.handler != signal.SIG_IGN:
        deliver_again(disposition)


def deliver_again(disposition: Disposition) -> None:
    """Restore what was there, and send the signal to this process once more."""
    put_back(disposition)
    os.kill(os.getpid(), disposition.number)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
