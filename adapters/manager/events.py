"""`EventLog`: tells what happens to a run to `logging` and to the user's callback, in the thread that asks it to (D06)."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, final

from trainfold.core.save.events import Event, EventKind

_LOG = logging.getLogger("trainfold")
_LEVELS: Final = {"saved": logging.DEBUG, "pruned": logging.DEBUG, "failed": logging.WARNING, "refused": logging.WARNING,
                  "skipped": logging.WARNING, "cadence": logging.WARNING}  # fmt: skip


@final
class EventLog:
    """Logs events and hands them to a listener; what another thread leaves is told when the owner asks for it.

    Args:
        run: where the run is.
        listener: is given each event; what it raises is logged, because it is none of a save's.

    Attributes:
        is_telling: whether the listener is being called just now.

    Examples:
        >>> seen = []
        >>> EventLog("runs/a", seen.append).tell("committed", step=3)
        >>> print(seen[0])
        committed runs/a at step 3
    """

    def __init__(self, run: str, listener: Callable[[Event], object] | None) -> None:
        self._run = run
        self._listener = listener
        self._left: deque[Event] = deque()
        self.is_telling = False

    def tell(self, kind: EventKind, **about: Any) -> None:
        """Tell of something, after all that was left before."""
        self.tell_left()
        self._deliver(Event(kind, self._run, **about))

    def leave(self, events: Iterable[Event]) -> None:
        """Leave events to be told; from any thread."""
        self._left.extend(events)

    def tell_left(self) -> None:
        """Tell what was left."""
        while self._left:
            self._deliver(self._left.popleft())

    def _deliver(self, event: Event) -> None:
        _LOG.log(_LEVELS.get(event.kind, logging.INFO), "%s", event)
        if self._listener is not None:
            self.is_telling = True
            try:
                self._listener(event)
            except Exception:  # noqa: BLE001  # see the class
                _LOG.exception("on_event failed for %s", event)
            finally:
                self.is_telling = False
