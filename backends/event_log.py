"""`EventLog`: sends the events of a run to `logging` and to the user's callback, in the thread that calls it."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, final

from trainfold.core.errors import InvalidState
from trainfold.core.save.events import Event, EventKind

_LOG = logging.getLogger("trainfold")
_NOT_DONE: Final = {"not_uploaded", "not_fetched", "not_pruned"}
_AFTER_COMMIT: Final = {"uploaded", "not_uploaded"}
_LEVELS: Final = {"saved": logging.DEBUG, "pruned": logging.DEBUG, "failed": logging.WARNING, "refused": logging.WARNING,
                  "skipped": logging.WARNING, "cadence": logging.WARNING, "not_uploaded": logging.WARNING,
                  "not_fetched": logging.WARNING, "not_pruned": logging.WARNING}  # fmt: skip


@final
class EventLog:
    """Logs events and hands them to a listener. Another thread defers its events until the owner reports them.

    On several ranks each has its listener, and rank 0 alone logs: a run is one run.

    Args:
        run: the location of the run.
        listener: gets each event. An exception of it is logged, because it must not fail a save.
        logs: whether events are logged here.

    Attributes:
        journal: gets each event before the listener; None for no journal.
        expects: the step of a save whose end is not reported yet; None if there is none. A deferred event of an upload of it waits for that.

    Examples:
        >>> seen = []
        >>> EventLog("runs/a", seen.append).report("committed", step=3)
        >>> print(seen[0])
        committed runs/a at step 3
    """

    def __init__(self, run: str, listener: Callable[[Event], object] | None, *, logs: bool = True) -> None:
        self._logs = logs
        self._run = run
        self._listener = listener
        self._deferred: deque[Event] = deque()
        self._is_calling = False
        self.journal: Callable[[Event], object] | None = None
        self.expects: int | None = None

    def check_not_calling(self) -> None:
        """Check that the listener is not the caller: a save during the report of another save would disturb that save.

        Raises:
            InvalidState: if it is.
        """
        if self._is_calling:
            raise InvalidState("CheckpointManager", expected="a call from the loop", found="one from on_event",
                               fix="remember what to do, and do it when the manager's call has returned")  # fmt: skip

    def report(self, kind: EventKind, **about: Any) -> None:
        """Report an event, after all deferred ones."""
        self.report_deferred()
        self._deliver(Event(kind, self._run, **about))

    def defer(self, events: Iterable[Event]) -> None:
        """Keep events until `report_deferred`; from any thread."""
        self._deferred.extend(events)

    def report_deferred(self) -> None:
        """Report the deferred events."""
        early: list[Event] = []
        while self._deferred:
            event = self._deferred.popleft()
            if event.step is not None and event.step == self.expects and event.kind in _AFTER_COMMIT:
                early.append(event)
            else:
                self._deliver(event)
        self._deferred.extendleft(reversed(early))

    def _deliver(self, event: Event) -> None:
        if self._logs:
            _LOG.log(_LEVELS.get(event.kind, logging.INFO), "%s", event)
        # of another tier, only what could not be done: its checkpoints are not those of this one
        if self.journal is not None and (event.run == self._run or event.kind in _NOT_DONE):
            self.journal(event)
        if self._listener is not None:
            self._is_calling = True
            try:
                self._listener(event)
            except Exception:  # noqa: BLE001  # see the class
                _LOG.exception("on_event failed for %s", event)
            finally:
                self._is_calling = False
