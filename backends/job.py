"""`Job`: an action that runs once, in its own thread, and its outcome.

It is not an executor. Python refuses to start work in one once the main thread has ended, which is when the last state of a run
may be saved. And an interrupt (Ctrl-C) inside an executor, a future or a condition can leave its lock taken for good. Here the
caller's thread uses only primitive locks, which an interrupt does not break in two.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from typing import Any, Final, Generic, TypeVar, final

from trainfold.backends.helpers import start_in_time
from trainfold.backends.wakeup import Latch

T = TypeVar("T")
_SUSPENDABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@final
class Job(Generic[T]):
    """An action that runs once, in whichever thread claims it first.

    Python waits for a job that was started: when the main thread ends, and when a process of `multiprocessing` does. Where no
    thread can be started, or a new one does not begin in time, the caller runs the action.

    Args:
        action: what to run.
        name: of the thread.
        after: a job to wait for before the action runs.

    Attributes:
        result: what the action returned.
        failure: what the action raised.

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
        self._name = name
        self._after = after
        self._claim = threading.Lock()
        self._is_started = Latch()
        self._end = Latch()
        self.result: T | None = None
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the action has ended."""
        return self._end.is_over

    def start(self) -> None:
        """Run the action in a new thread. If this raises, `withdraw` returns whether the action can still be kept from running.

        Raises:
            BaseException: an interrupt of the action, if the caller had to run it.
        """
        try:
            start_in_time(threading.Thread(target=_work, args=([self],), name=self._name, daemon=False))
        except (RuntimeError, MemoryError):
            self._run_here()
        finally:
            # only now: a thread that begins to work would take the interpreter from a caller that waits for it to start
            self._is_started.is_over = True  # an assignment, which no interrupt can fall into
            self._is_started.set()

    def wait_for_start(self) -> None:
        """Return when `start` has returned, or the job was withdrawn; called in the job's thread."""
        self._is_started.wait()

    def carry_out(self) -> None:
        """Run the action, unless it is claimed already; never raises an error of the action."""
        action = self._action
        if action is None or not self._claim.acquire(blocking=False):
            return
        try:
            after, self._action, self._after = self._after, None, None
            if after is not None:
                after.wait()
            self.result, self.failure = _outcome(action)
        except BaseException as error:  # noqa: BLE001  # an interrupt beside the action, where the caller runs it
            self.failure = error
        end = self._end
        del self, action  # a failure's traceback leads to this frame, and keeps it alive
        end.set()

    def withdraw(self) -> bool:
        """Claim the action, so that it never runs; False if it is running or has run."""
        withdrawn = self._claim.acquire(blocking=False)
        self._is_started.set()  # a thread that waits for the start goes
        return withdrawn

    def wait(self) -> None:
        """Return when the action has ended. Do not wait for a job that was withdrawn, or never started."""
        self._end.wait()

    def _run_here(self) -> None:
        try:
            self.carry_out()
        except BaseException as error:
            if not self.is_over and self.result is None and self.failure is None:
                self.failure = error
            self._end.set()
            raise
        if self.failure is not None and not isinstance(self.failure, Exception):
            raise self.failure from None


def _work(jobs: list[Job[Any]]) -> None:
    """Run the one job of a list, and keep no reference to it: a failure's traceback leads to this frame."""
    jobs[0].wait_for_start()
    jobs.pop().carry_out()


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
