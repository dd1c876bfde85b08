"""`Job`: an action that runs once, in its own thread, and its outcome.

It is not an executor. Python refuses to start work in one once the main thread has ended, which is when the last state of a run
may be saved. And an interrupt (Ctrl-C) inside an executor, a future or a condition can leave its lock taken for good. Here the
caller's thread uses only primitive locks, which an interrupt cannot leave half taken. It does not wait until the new thread runs, as
``Thread.start`` does: that takes milliseconds if torch's threads keep the cores busy.
"""

import _thread
import atexit
import inspect
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize, is_exiting
from traceback import walk_tb
from typing import Any, Final, Generic, TypeVar, final

from trainfold.backends.wakeup import Latch

T = TypeVar("T")
LONGEST_SECS: Final = 10.0  # for a thread to begin
_SUSPENDABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@final
class Job(Generic[T]):
    """An action that runs once, in whichever thread claims it first.

    A process, also one of `multiprocessing`, waits for its jobs before it exits. Once it has waited, or if no thread can be started,
    `start` runs the action itself. If the thread does not begin in time, `wait` runs the action.

    Args:
        action: what to run.
        name: of the thread.
        after: a job to wait for before the action runs.

    Attributes:
        result: what the action returned.
        failure: what the action raised.
        began_at: when the action began, in seconds since 1970; 0.0 before that.
        ended_at: when it ended.

    Examples:
        >>> job = Job(lambda: 7)
        >>> job.start()
        >>> job.wait()
        >>> job.is_over, job.result, job.withdraw()
        (True, 7, False)
    """

    def __init__(
        self, action: Callable[[], T], *, name: str = "trainfold-job", after: "Job[Any] | None" = None
    ) -> None:
        self._action: Callable[[], T] | None = action
        self.name = name
        self._after = after
        self._claim = threading.Lock()
        self._end = Latch()
        self.result: T | None = None
        self.failure: BaseException | None = None
        self.began_at = self.ended_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the action has ended."""
        return self._end.is_over

    def start(self) -> None:
        """Let a thread run the action. If this raises, `withdraw` returns whether the action can still be kept from running.

        Raises:
            BaseException: an interrupt of the action, if the caller had to run it.
        """
        if self._claim.locked():
            return  # withdrawn
        _wait_at_exit()
        _STARTED.add(self)  # before the look at the end, which sets its flag before it looks here
        if _EXIT.is_over or is_exiting():
            self._run_here()
            return
        in_use = threading.Lock()
        _IN_USE.add(in_use)
        try:
            _thread.start_new_thread(_work, ([self], in_use))
        except (RuntimeError, MemoryError):
            _IN_USE.discard(in_use)
            self._run_here()

    def carry_out(self) -> None:
        """Run the action, unless it is claimed already; never raises an error of the action."""
        action = self._action
        if action is None or not self._claim.acquire(blocking=False):
            return
        try:
            after, self._action, self._after = self._after, None, None
            if after is not None:
                after.wait()
            self.began_at = time.time()
            self.result, self.failure = _outcome(action)
            self.ended_at = time.time()
        except BaseException as error:  # noqa: BLE001  # an interrupt beside the action, where the caller runs it
            self.failure = error
        del action  # frees tensors, which must not happen after the end
        end = self._end
        end.is_over = True  # an assignment, because a call may get no memory
        _STARTED.discard(self)
        del self  # a failure's traceback leads to this frame, and keeps it alive
        end.set()

    def withdraw(self) -> bool:
        """Claim the action, so that it never runs; False if it is running or has run."""
        withdrawn = self._claim.acquire(blocking=False)
        if withdrawn:
            _STARTED.discard(self)
        return withdrawn

    def wait(self) -> None:
        """Return when the action has ended. Do not wait for a job that was withdrawn, or never started."""
        latest = time.monotonic() + LONGEST_SECS
        while not self._end.is_over:
            if not self._claim.locked() and time.monotonic() >= latest:
                self.carry_out()  # its thread died before it began, for want of memory
            self._end.wait_briefly()

    def _run_here(self) -> None:
        try:
            self.carry_out()
        except BaseException as error:
            if not self.is_over and self.result is None and self.failure is None:
                self.failure = error
            _STARTED.discard(self)
            self._end.set()
            raise
        if self.failure is not None and not isinstance(self.failure, Exception):
            raise self.failure from None


def _work(jobs: list[Job[Any]], in_use: threading.Lock) -> None:
    """Run the one job of a list, and keep no reference to it: a failure's traceback leads to this frame.

    The lock is taken until nothing is left to do but to return. A thread that still frees a tensor while Python ends aborts the process:
    Python ends such a thread where it next asks for the interpreter, and torch's destructors allow no unwinding.
    """
    in_use.acquire()
    try:
        threading.current_thread().name = jobs[0].name
        jobs.pop().carry_out()
    finally:
        _IN_USE.discard(in_use)
        in_use.release()


_STARTED: Final[set[Job[Any]]] = set()  # those that have not ended
_IN_USE: Final[set[threading.Lock]] = set()  # of the threads of jobs; each takes its own
_EXIT: Final = Latch()  # set when the process begins to wait for its jobs


def is_process_ending() -> bool:
    """Whether this process waits for its jobs, and for nothing else, before it ends: one whose result is of no use any more can give up."""
    return _EXIT.is_over


def _wait_for_all() -> None:
    """Wait for the jobs under way, for those that are started meanwhile, and then for their threads to be done."""
    _EXIT.is_over = True
    while _STARTED:
        for job in list(_STARTED):
            job.wait()
            del job
    for in_use in list(_IN_USE):
        with in_use:
            pass


atexit.register(_wait_for_all)  # for jobs that start after the one below has run


@cache
def _wait_at_exit() -> None:
    """Make this process wait for its jobs when it ends. A process of `multiprocessing` calls no function of `atexit`."""
    atexit.register(_wait_for_all)
    Finalize(None, _wait_for_all, exitpriority=100)


def _forget_jobs() -> None:
    """Forget the parent's jobs in a forked child, which does not have the threads that do them."""
    _STARTED.clear()
    _IN_USE.clear()
    _EXIT.is_over = False
    _wait_at_exit.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_jobs)


def _outcome(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result and the exception of an action. The exception keeps none of the action's data alive."""
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001  # for the thread that waits
        del action
        _clear_frames(error)
        return None, error


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an exception and its causes; those of generators stay, which another caller may resume."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:  # causes may form a circle
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
        for frame, _ in walk_tb(each.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # the frame is running
                    frame.clear()
