"""Sources of requests to save or to stop: the program itself, signals, and the protocol for your own.

A source keeps its requests until `take` is called, so that none is lost during an evaluation, a warm-up or a compile, however long
that is. What happens is decided elsewhere: see `trainfold.core.save.requests`.
"""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FrameType, MappingProxyType, TracebackType
from typing import Protocol, TypeVar, final, runtime_checkable

from trainfold.adapters.requests.signal_handlers import Disposition, deliver_again, disposition_of, hand_on, put_back
from trainfold.adapters.requests.stop_file import FILES, StopFile
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.save.requests import StopRequest, checked_request

__all__ = ["FILES", "SIGNALS", "Asked", "Combined", "RequestSource", "SignalRequests", "StopFile"]

T = TypeVar("T")
_LOG = logging.getLogger("trainfold")

SIGNALS: Mapping[str, StopRequest] = MappingProxyType({"SIGTERM": "save_and_stop", "SIGUSR1": "save"})
_STOPPING = frozenset({"stop", "save_and_stop", "abort"})
_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


@runtime_checkable
class RequestSource(Protocol):
    """Something that asks a run to save or to stop, such as `SignalRequests`, `StopFile`, or one of your own."""

    def take(self) -> tuple[StopRequest, ...]:
        """The requests since the last call, each once, and forget them. It does not wait."""

    def close(self) -> None:
        """Release everything; calling it again does nothing."""


@final
class Asked:
    """A source for the program's own requests, such as on a divergence, at a time limit, or from a button. Any thread may ask.

    Examples:
        >>> source = Asked()
        >>> source.ask("save")
        >>> source.take(), source.take()
        (('save',), ())
    """

    def __init__(self) -> None:
        self._waiting: deque[StopRequest] = deque()

    def __repr__(self) -> str:
        return f"Asked(waiting: {', '.join(self._waiting) or 'nothing'})"

    def ask(self, request: StopRequest) -> None:
        """Make a request; the next `take` returns it.

        Raises:
            InvalidArgument: for an unknown request.
        """
        self._waiting.append(checked_request(request))

    def take(self) -> tuple[StopRequest, ...]:
        """See `RequestSource.take`."""
        return tuple(dict.fromkeys(_drained(self._waiting)))

    def close(self) -> None:
        """Forget the requests that were not taken."""
        self._waiting.clear()


@final
class SignalRequests:
    """Signals as requests. Make it in the main thread; take requests in any.

    The first stopping signal is a request. A second one, of any stopping kind, is impatience: the earlier handler is restored and
    gets it, which for SIGTERM ends the process. Signals within ``settle_secs`` of the first one count as that one, because a job
    scheduler signals every process of a job, and a launcher among them passes it on.

    A Python handler that was there before is called as well, after the request is recorded. Processes forked from this one, such as
    DataLoader workers, behave as they would without it. `close` restores exactly the earlier handlers, in whatever order several
    sources are closed.

    Limits: Python runs no handler while the main thread is inside one call of C, so a signal counts after that call; while a collective
    hangs there, only SIGKILL ends the process. A handler that C code installed (`faulthandler.register`) is not called
    meanwhile; it is restored at the end.

    Args:
        signals: name of a signal -> request; None for SIGTERM -> ``save_and_stop`` and SIGUSR1 -> ``save``.
        settle_secs: for how long a repeated signal counts as the same one.
        clock: seconds that only increase.

    Raises:
        InvalidArgument: for an unknown signal, one that cannot be handled, or an unknown request; nothing was installed.

    Examples:
        >>> with SignalRequests() as source:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     source.take(), source.take()
        (('save',), ())
    """

    def __init__(
        self,
        signals: Mapping[str, StopRequest] | None = None,
        *,
        settle_secs: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = {_number(name): checked_request(asked) for name, asked in (signals or SIGNALS).items()}
        self._settle_secs = settle_secs
        self._clock = clock
        # its ends are atomic: a handler must not wait for a lock
        self._waiting: deque[tuple[int, StopRequest]] = deque()
        self._before: dict[int, Disposition] = {}
        self._handler = self._on_signal  # one object, to recognize it later
        self._stopped_at: float | None = None
        self._is_closed = False
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            _LOG.warning("signals are handled in the main thread only, and this is another one: %s make no requests of this run; make "
                         "SignalRequests in the main thread and pass it to the manager", ", ".join(signals or SIGNALS))  # fmt: skip
            return
        with ExitStack() as undo:
            undo.callback(self.close)
            _installed(self)
            for number in self._wanted:
                self._before[number] = disposition_of(number)
                signal.signal(number, self._handler)
            undo.pop_all()

    def __repr__(self) -> str:
        wanted = ", ".join(f"{signal.Signals(number).name}: {asked}" for number, asked in self._wanted.items())
        state = "" if self.is_installed else "; closed" if self._is_closed else "; not in the main thread"
        return f"SignalRequests({wanted}{state})"

    @property
    def is_installed(self) -> bool:
        """Whether signals become requests: not outside of the main thread, and not after `close`."""
        return bool(self._before) and not self._is_closed

    def take(self) -> tuple[StopRequest, ...]:
        """See `RequestSource.take`."""
        found = _drained(self._waiting)
        for number, asked in dict.fromkeys(found):
            _LOG.info("%s: %s", signal.Signals(number).name, asked)
        return tuple(dict.fromkeys(asked for _, asked in found))

    def close(self) -> None:
        """Restore the earlier handlers, and forget the requests that were not taken.

        Outside of the main thread nothing can be restored: signals are then passed on to the earlier handlers, and a later close in the
        main thread does the rest.
        """
        self._is_closed = True
        if threading.current_thread() is threading.main_thread():
            for source in reversed(_SOURCES[:]):  # one whose handler was replaced waits until the later source closes
                source._put_back()  # noqa: SLF001 (of this class)
        if lost := self.take():
            _LOG.warning("requested and not done, because the run has ended: %s", ", ".join(lost))

    def __enter__(self) -> "SignalRequests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _put_back(self) -> None:
        mine = [number for number in self._before if signal.getsignal(number) == self._handler]
        for number in mine if self._is_closed else ():
            put_back(self._before.pop(number))
        if self._is_closed and not self._before and self in _SOURCES:
            _SOURCES.remove(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the request. This runs between any two instructions of the program, so it takes no lock, logs nothing and allocates little."""
        before = self._before.get(number)
        if before is None:  # a program has kept the handler that was removed
            return
        if self._is_closed or os.getpid() != self._pid:  # C code forks without Python's knowledge
            is_newest = signal.getsignal(number) == self._handler  # else the default action is up to the later handler
            if is_newest or before.is_function:
                hand_on(before, frame)
            return
        asked = self._wanted[number]
        if asked in _STOPPING:
            now = self._clock()
            if self._stopped_at is None:
                self._stopped_at = now
            elif now - self._stopped_at >= self._settle_secs:
                deliver_again(before)
                return
        self._waiting.append((number, asked))
        if before.is_function:
            hand_on(before, frame)


@final
class Combined:
    """Several sources as one.

    Args:
        sources: requests are taken in this order; the sources are closed in the reverse order.

    Examples:
        >>> one, other = Asked(), Asked()
        >>> one.ask("save"), other.ask("stop"), other.ask("save")
        (None, None, None)
        >>> Combined(one, other).take()
        ('save', 'stop')
    """

    def __init__(self, *sources: RequestSource) -> None:
        self._sources = sources

    def __repr__(self) -> str:
        return f"Combined({', '.join(map(repr, self._sources))})"

    def take(self) -> tuple[StopRequest, ...]:
        """See `RequestSource.take`."""
        return tuple(dict.fromkeys(asked for source in self._sources for asked in source.take()))

    def close(self) -> None:
        """Close all of them, even if one fails."""
        with ExitStack() as closing:
            for source in self._sources:
                closing.callback(source.close)


_SOURCES: list[SignalRequests] = []  # of this process, as signals are
_HOOKED: list[bool] = []


def _installed(source: SignalRequests) -> None:
    if not _HOOKED:
        os.register_at_fork(after_in_child=_undo_in_child)
        _HOOKED.append(True)
    _SOURCES.append(source)


def _undo_in_child() -> None:
    """In a forked child: SIGTERM ends it, as its parent expects, and it makes no requests."""
    for source in reversed(_SOURCES[:]):
        source._waiting.clear()  # noqa: SLF001 (of this module)
        source.close()


def _drained(waiting: "deque[T]") -> list[T]:
    found = []
    while waiting:
        found.append(waiting.popleft())
    return found


def _number(name: str) -> int:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None or number in _UNCATCHABLE:
        raise InvalidArgument("signals", expected="names of signals that can be handled, such as 'SIGUSR1'", found=shown(name),
                              fix="name one that can be handled")  # fmt: skip
    return int(number)
