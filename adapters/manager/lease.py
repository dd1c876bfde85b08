"""`RunLease`: holds a run's lock and the source of requests for the life of a manager, and releases them in order."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import final

from trainfold.adapters.guards.first_save import HeldRun, look
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.runs.scan import check_place
from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.wakeup import Latch
from trainfold.core.errors import InvalidState, RunLocked, error_text
from trainfold.core.layout.world import Collectives

_LOG = logging.getLogger("trainfold")


@final
class RunLease:
    """Holds the run's lock and the source of requests; releases both in this order, once.

    A block with it makes a manager: the lease is open at its end, and released if the block raises.

    Args:
        requests: where requests come from; None for nowhere.

    Attributes:
        is_open: whether the manager may be used.
    """

    def __init__(self, requests: RequestSource | None) -> None:
        self.is_open = False
        self._url = ""
        self._pid = os.getpid()
        # the id of what is being handled now; not the exception itself, which keeps frames alive
        self._handled = id(sys.exc_info()[1])
        self._was_opened = False
        self._is_over = Latch()
        self._held = ExitStack()
        self._held.callback(self._is_over.set)  # the first is the last to be called
        if requests is not None:
            self._held.callback(requests.close)  # signals that no manager takes any more must not stay caught

    def __enter__(self) -> "RunLease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._was_opened = self.is_open = True
        else:
            self._held.__exit__(kind, error, traceback)

    def take(self, store: Store, world: Collectives) -> HeldRun:
        """Take the run's lock on rank 0, and look what the run holds; every rank calls.

        Raises:
            CheckpointForeign: if the place holds something other than a run.
            RunLocked: if another process has the lock.
        """
        self._url = store.url

        def take() -> HeldRun:
            with named_failures(store.url):
                check_place(glimpse(store))  # before the lock, which is a file
                self._held.enter_context(store.lock())
                return look(store)

        return on_rank_zero(world, take, doing="take the lock of the run")

    def before_release(self, action: Callable[[], None]) -> None:
        """Call this before the lock is released."""
        self._held.callback(action)

    def check_open(self) -> None:
        """Check that the manager may be used, in this process.

        Raises:
            InvalidState: if it is closed.
            RunLocked: in a process that was forked from the manager's.
        """
        if not self.is_open:
            raise InvalidState("CheckpointManager", expected="an open manager", found="a closed one",
                               fix="make another manager for the run")  # fmt: skip
        if os.getpid() != self._pid:
            raise RunLocked(
                self._url,
                expected=f"process {self._pid}, which made the manager",
                found=f"process {os.getpid()}, which was forked from it",
                fix="save there, or make a manager in this process when the other one is closed",
            )

    def in_flight(self) -> BaseException | None:
        """The exception that is being handled now, and was not when the manager was made."""
        primary = sys.exc_info()[1]
        return None if id(primary) == self._handled else primary

    def close(self, end: Callable[[list[Exception]], None], *, primary: BaseException | None) -> None:
        """End what is under way, and release the run. Calling it again does nothing, except after an interrupt: then it continues.

        Args:
            end: waits for what is under way, and adds its failures. The lease stays open if this is interrupted, because something
                may still be written.
            primary: the exception that ends the loop. A failure must not mask it: it is logged, and becomes a note on that one.

        Raises:
            Exception: the first failure, if there is no such exception.
        """
        # a forked child has neither the thread nor the lock
        if not self._was_opened or self._is_over.is_over or os.getpid() != self._pid:
            return
        try:
            with raise_after() as failures:
                end(failures)
                self.is_open = False
                try:
                    self._held.close()  # after an interrupt, the next call releases what is left
                except Exception as error:  # noqa: BLE001  # raised below, after the failure of a save
                    failures.append(error)
        except Exception as failure:
            if primary is None:
                raise
            _LOG.exception("%s: the save under way failed", self._url)
            primary.add_note(f"while this was on its way, a save failed: {error_text(failure)}")


@final
class raise_after:  # noqa: N801 (used as a function; a generator would cost each boundary ten times as much)
    """Finish the block, then raise the failures that were added. An exception of the block itself is raised first, with notes.

    Examples:
        >>> with raise_after() as failures:
        ...     failures.append(ValueError("the save before"))
        ...     print("the next save starts")
        Traceback (most recent call last):
            ...
        ValueError: the save before
    """

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    def __enter__(self) -> list[Exception]:
        return self._failures

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _note(error, self._failures)
        elif self._failures:
            _note(self._failures[0], self._failures[1:])
            raise self._failures[0]


def _note(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"and besides: {error_text(other)}")
