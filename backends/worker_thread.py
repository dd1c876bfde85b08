"""`WorkerThread`: a thread that does one thing after another, and `Job`: one of these things, and how it ended.

Not an executor: Python lets none begin anything once its main thread has ended, which is when the last state of a run may be
saved (A14); and an interrupt (Ctrl-C) that falls into an executor, a future or a condition can leave its lock taken for good.
Here the caller's thread uses primitive locks and queues only, which an interrupt does not break in two.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from traceback import walk_tb
from typing import Any, Final, Generic, TypeVar, final

from trainfold.backends.helpers import start_in_time
from trainfold.backends.wakeup import Latch

T = TypeVar("T")
_SUSPENDABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# how long a program that ends waits for a thread that nobody has closed and that has nothing to do
_LOOK_SECS: Final = 0.2


@final
class Job(Generic[T]):
    """Something that is done once, by whoever begins it first.

    Attributes:
        result: what it returned.
        failure: what it raised.

    Examples:
        >>> job = Job(lambda: 7)
        >>> job.carry_out()
        >>> job.is_over, job.result, job.withdraw()
        (True, 7, False)
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action: Callable[[], T] | None = action
        self._claim = threading.Lock()
        self._end = Latch()
        self.result: T | None = None
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._end.is_over

    def carry_out(self) -> None:
        """Do it, unless somebody does it already or it was withdrawn; raises nothing."""
        action = self._action
        if action is None or not self._claim.acquire(blocking=False):
            return
        try:
            self._action = None
            self.result, self.failure = _outcome(action)
        except BaseException as error:  # noqa: BLE001  # an interrupt beside the action, where the caller carries it out
            self.failure = error
        end = self._end
        del self, action  # this frame stays as long as a failure's traceback does, which leads to it
        end.tell()

    def break_off(self, error: BaseException) -> None:
        """End it where an interrupt fell into `carry_out` beside the action; it may have been done."""
        if not self.is_over and self.result is None and self.failure is None:
            self.failure = error
        self._end.tell()

    def withdraw(self) -> bool:
        """Whether it will never be done, because nobody has begun it."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> None:
        """Return when it has ended; one that was not given to anybody never does."""
        self._end.wait()


@final
class WorkerThread:
    """A thread that carries out jobs in their order; it is there from the first one on.

    A Python that ends waits for what was begun (P11), in its main thread's end and in that of a process of `multiprocessing`.
    Where no thread can be started, or one that was started does not begin in time, the caller does the work (W19).

    Args:
        name: of the thread.

    Examples:
        >>> worker, job = WorkerThread("example"), Job(lambda: 7)
        >>> worker.begin(job)
        >>> job.wait()
        >>> job.result
        7
        >>> worker.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: _Line | None = None

    def begin(self, job: "Job[Any]") -> None:
        """Have it carried out; if this raises, it may have been begun or not: see `Job.withdraw`.

        Raises:
            BaseException: what interrupted it, where it had to be done here.
        """
        line = self._line
        if line is not None and not line.end.is_over and line.thread.is_alive():
            line.end_with(self)
            line.queue.put(job)
            if not line.has_left:
                return
            line.end.wait()  # it may have seen the job in leaving
        self._line = line = _Line(self._name)
        try:
            start_in_time(line.thread)
        except (RuntimeError, MemoryError):
            self._line = None
            line.queue.put(None)  # one that begins all the same has nothing to do
            try:
                job.carry_out()
            except BaseException as error:
                job.break_off(error)
                raise
            if job.failure is not None and not isinstance(job.failure, Exception):
                raise job.failure from None
            return
        except BaseException:
            if line.thread.ident is None:
                self._line = None  # the end of one that never began would never come
                line.queue.put(None)  # and one that begins all the same has nothing to do
            raise
        line.end_with(self)
        line.queue.put(job)

    def close(self) -> None:
        """Wait for all that was begun, and end the thread; if this is interrupted, it can be called again, or more be begun."""
        line = self._line
        if line is not None:
            line.queue.put(None)
            line.end.wait()
            line.end_with(None)
            self._line = None


@final
class _Line:
    """A thread and what waits for it; it does not know its worker, and so ends when nobody has that any more.

    Its end is told by itself: `Thread.join` believes a thread to be over when it is interrupted.
    """

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self.has_left = False
        self.end = Latch()
        self.thread = threading.Thread(target=self._work, name=name, daemon=False)  # Python waits for no other
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def end_with(self, worker: WorkerThread | None) -> None:
        """End when this worker goes; None: it has ended."""
        if worker is not None and self._finalizer is None:
            self._finalizer = weakref.finalize(worker, self.queue.put, None)
        elif worker is None and self._finalizer is not None:
            self._finalizer.detach()

    def _work(self) -> None:
        try:
            self._serve()
            for job in _rest_of(self.queue):  # whoever comes too late for this sees that it has left
                job.carry_out()
        finally:
            self.end.tell()

    def _serve(self) -> None:
        while not self.has_left:
            try:
                job = self.queue.get(timeout=_LOOK_SECS)
            except Empty:
                self.has_left = not threading.main_thread().is_alive()
                continue
            if job is None:
                self.has_left = True
            else:
                job.carry_out()
            del job  # and with it what it holds on to, while this waits for the next one


def _rest_of(queue: "SimpleQueue[Job[Any] | None]") -> Iterator[Job[Any]]:
    while True:
        try:
            job = queue.get_nowait()
        except Empty:
            return
        if job is not None:
            yield job


def _outcome(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What an action returns and raises; what it raises keeps nothing of what the action had in its hands."""
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001  # for whoever waits
        del action
        _clear_frames(error)
        return None, error


def _clear_frames(error: BaseException) -> None:
    """Let the frames that an error and its causes lead to hold nothing; generators' stay, which may go on elsewhere."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:  # causes may go in a circle
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
        for frame, _ in walk_tb(each.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # it runs
                    frame.clear()
