"""`Helpers`: threads that share a caller's tasks, such as reading files; the caller also works, and never waits for one to start.

A thread is made once. At the end of a block it waits for the next block of any thread, so a run of saves starts as many threads as one
save needs.

``Thread.start`` waits until the new thread reports that it runs. Where torch's threads keep the cores busy, that takes milliseconds. A thread without the memory for that report dies in silence, and the
caller waits forever, with the run's lock. So threads are started here without that wait, and a caller that needs a task that has not
begun does it itself: if no thread can be started, the caller does everything. An executor would not do, because it starts
nothing once Python is shutting down.
"""

import _thread
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar, final

from trainfold.backends.wakeup import Latch

T = TypeVar("T")


@final
class Task(Generic[T]):
    """An action that runs once, in the thread that claims it first.

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
        """Run the task, unless it is claimed already; never raises."""
        if not self._claim.acquire(blocking=False):
            return
        self._helper = helper
        try:
            self._value = self._action()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._failure = error
        finally:
            self._end.is_over = True  # an assignment, because a call may get no memory
            self._end.set()

    def result(self) -> T:
        """Return or raise the outcome of the task; run it here if no thread has started it.

        Raises:
            MemoryError: if the thread that had begun it died in silence.
        """
        self.carry_out()
        while not self._end.is_over:
            if self._helper is not None and self._helper.end.is_over and not self._end.is_over:
                raise MemoryError("the thread that did this died")
            self._end.wait_briefly()
        failure, self._failure = self._failure, None  # its traceback leads to what the action worked on
        if failure is not None:
            raise failure
        return self._value  # type: ignore[return-value]  # it has ended without a failure

    def withdraw(self) -> bool:
        """Claim the task, so that it never runs; False if it is running or has run."""
        return self._claim.acquire(blocking=False)


@final
class _Helper:
    """The work of one thread in one block. It signals its own end: an interrupted `Thread.join` takes the thread for ended."""

    def __init__(self, waiting: "SimpleQueue[Task[object] | None]", idle: "SimpleQueue[Inbox]") -> None:
        self._waiting = waiting
        self._idle = idle  # where its block looked for it: a thread that begins late returns there
        self.has_begun = False
        self.end = Latch()

    def work(self, inbox: "Inbox") -> None:
        """Run the waiting tasks until there is a None; then the thread is free for the next helper in its inbox."""
        try:
            self.has_begun = True
            while (task := self._waiting.get()) is not None:
                task.carry_out(self)
                del task  # and what it keeps alive, while this waits for the next one
            self._idle.put(inbox)  # before the end is set, so that the next block finds this thread
        finally:
            self.end.is_over = True  # as above
            self.end.set()


Inbox: TypeAlias = "SimpleQueue[_Helper]"
_IDLE: "SimpleQueue[Inbox]" = SimpleQueue()  # inboxes of the threads that have nothing to do


def _forget_idle_threads() -> None:
    """Forget the idle threads in a forked child, which does not have its parent's threads."""
    global _IDLE  # noqa: PLW0603 - a new queue: a thread of the parent may have been using the old one
    _IDLE = SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_idle_threads)


def _be_a_thread(helper: _Helper) -> None:
    """Do the work of one helper after another, until the process ends or a failure such as a lack of memory ends the thread."""
    inbox: Inbox = SimpleQueue()
    while True:
        helper.work(inbox)
        del helper  # and the queue of a block that is over
        helper = inbox.get()


@final
class Helpers:
    """Threads that work for a block, from its start to its end: fewer, or zero, if the machine cannot start more.

    Threads of an earlier block are used again. If one has died meanwhile, the caller does its work.

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
        """Start nothing more, and return when every started task has ended, because the caller reuses their data then."""
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
        """Let a free thread run the task, or the first thread that asks for its result."""
        self._waiting.put(task)  # type: ignore[arg-type]  # whatever it returns
        return task

    def _end(self) -> None:
        with suppress(Empty):
            while True:
                task = self._waiting.get_nowait()
                if task is not None:
                    task.withdraw()
        for _ in self._helpers:
            self._waiting.put(None)  # again after an interrupt; a surplus one does no harm
        for helper in self._helpers:
            if helper.has_begun:  # a thread that begins later finds nothing to do
                helper.end.wait()
