"""`Helpers`: threads that share work with the thread that asks for them, which waits for no thread that has not begun.

A thread is made once: at the end of a block it waits for the next block, whoever's that is, and so a run of saves starts as many threads
as one save needs. ``Thread.start`` waits until the new thread says that it runs. One that gets no memory to say so dies in silence, and the caller waits for
ever, with the run's lock in its hands (W19). So threads are started here without that wait, and whoever needs a piece of work that nobody
has begun does it: where no thread can be had, the caller does everything. It is no executor either, which begins nothing once Python
has started to come down.
"""

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Generic, TypeAlias, TypeVar, final

from trainfold.backends.wakeup import Latch

T = TypeVar("T")

LONGEST_SECS: Final = 10.0


def start_in_time(thread: threading.Thread, *, longest_secs: float = LONGEST_SECS) -> None:
    """Start a thread that Python waits for when it ends; give up on one that does not begin.

    Args:
        thread: not started yet. One that begins after this has given up must find nothing to do.
        longest_secs: how long to wait for it.

    Raises:
        RuntimeError: if there is no thread to be had, or it did not begin in time.
        MemoryError: if there is no memory for one.

    Examples:
        >>> thread = threading.Thread(target=lambda: None)
        >>> start_in_time(thread)
        >>> thread.join()
    """
    failures: list[BaseException] = []
    end = Latch()

    def start() -> None:
        try:
            thread.start()  # which waits for the thread, for ever if it died
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        end.tell()

    deadline = time.monotonic() + longest_secs
    _thread.start_new_thread(start, ())
    while not end.is_over:
        if time.monotonic() >= deadline:
            raise RuntimeError(f"a thread did not begin in {longest_secs:g} s")
        end.wait_a_moment()
    if failures:
        raise failures[0]


@final
class Task(Generic[T]):
    """A piece of work that is done once, by whoever claims it first.

    Examples:
        >>> task = Task(lambda: 7)
        >>> task.result()
        7
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._claim = threading.Lock()
        self._end = Latch()
        self._helper: _Helper | None = None
        self._value: T | None = None
        self._failure: BaseException | None = None

    def carry_out(self, helper: "_Helper | None" = None) -> None:
        """Do it, unless somebody has begun it; raises nothing."""
        if not self._claim.acquire(blocking=False):
            return
        self._helper = helper
        try:
            self._value = self._action()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._failure = error
        finally:
            self._end.is_over = True  # an assignment, because a call may get no memory
            self._end.tell()

    def result(self) -> T:
        """What it returned, or raise what it raised; done here if nobody has begun it.

        Raises:
            MemoryError: if the thread that had begun it died without a word.
        """
        self.carry_out()
        while not self._end.is_over:
            if self._helper is not None and self._helper.end.is_over and not self._end.is_over:
                raise MemoryError("the thread that did this died")
            self._end.wait_a_moment()
        failure, self._failure = self._failure, None  # its traceback leads to what it had in its hands
        if failure is not None:
            raise failure
        return self._value  # type: ignore[return-value]  # it has ended without a failure

    def withdraw(self) -> bool:
        """Whether nobody has begun it, and nobody will."""
        return self._claim.acquire(blocking=False)


@final
class _Helper:
    """What one thread does. Its end is told by it, and not by `Thread.join`, which believes it to be over when interrupted."""

    def __init__(self, waiting: "SimpleQueue[Task[object] | None]", idle: "SimpleQueue[Inbox]") -> None:
        self._waiting = waiting
        self._idle = idle  # where its block looked for it: a thread that begins late goes back there
        self.has_begun = False
        self.end = Latch()

    def work(self, inbox: "Inbox") -> None:
        """Carry out what waits, until there is a None; then the thread is free for whoever puts a helper into its inbox."""
        try:
            self.has_begun = True
            while (task := self._waiting.get()) is not None:
                task.carry_out(self)
                del task  # and with it what it holds on to, while this waits for the next one
            self._idle.put(inbox)  # before the end is told, so that the next block finds this thread
        finally:
            self.end.is_over = True  # as above
            self.end.tell()


Inbox: TypeAlias = "SimpleQueue[_Helper]"
_IDLE: "SimpleQueue[Inbox]" = SimpleQueue()  # of the threads that have nothing to do


def _forget_idle_threads() -> None:
    """In a forked child: the threads of its parent are not there."""
    global _IDLE  # noqa: PLW0603 - a new queue: a thread of the parent may have had the old one in its hands
    _IDLE = SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_idle_threads)


def _be_a_thread(helper: _Helper) -> None:
    """Do the work of one helper after another; the thread ends with the process, or by a failure such as a lack of memory."""
    inbox: Inbox = SimpleQueue()
    while True:
        helper.work(inbox)
        del helper  # and with it the queue of a block that is over
        helper = inbox.get()


@final
class Helpers:
    """Threads that work for a block, from its beginning to its end; fewer, or none, where the machine has no more.

    Those that have worked for an earlier block are used again; one that has died meanwhile does nothing, and the caller does it.

    Args:
        count: how many.

    Examples:
        >>> with Helpers(2) as helpers:
        ...     tasks = [helpers.give(Task(lambda: 7)) for _ in range(3)]
        ...     [task.result() for task in tasks]
        [7, 7, 7]
    """

    def __init__(self, count: int) -> None:
        self._waiting: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._helpers: list[_Helper] = []
        self._count = count

    def __enter__(self) -> "Helpers":
        for _ in range(self._count):
            idle = _IDLE
            helper = _Helper(self._waiting, idle)
            try:
                idle.get_nowait().put(helper)
            except Empty:
                try:
                    _thread.start_new_thread(_be_a_thread, (helper,))
                except (RuntimeError, MemoryError):
                    break
            self._helpers.append(helper)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Begin nothing more, and return when what was begun has ended: what the tasks work on goes elsewhere then."""
        interruption: BaseException | None = None
        while True:
            try:
                self._end()
                break
            except BaseException as caught:  # noqa: BLE001 - raised below: a late write would hit another file
                interruption = caught
        if interruption is not None:
            raise interruption

    def give(self, task: Task[T]) -> Task[T]:
        """Have it done by a thread that is free, or by whoever asks for its result first."""
        self._waiting.put(task)  # type: ignore[arg-type]  # whatever it returns
        return task

    def _end(self) -> None:
        with suppress(Empty):
            while True:
                task = self._waiting.get_nowait()
                if task is not None:
                    task.withdraw()
        for _ in self._helpers:
            self._waiting.put(None)  # again after an interrupt; one too many does no harm
        for helper in self._helpers:
            if helper.has_begun:  # one that begins later finds nothing to do
                helper.end.wait()
