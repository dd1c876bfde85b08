"""`Deletions`: deletes a manager's old checkpoints after each commit, in the background."""

from typing import final

from trainfold.backends.event_log import EventLog
from trainfold.backends.job import Job
from trainfold.backends.runs.background import background_action
from trainfold.backends.runs.commit import SaveResult
from trainfold.backends.stores.protocol import Store
from trainfold.backends.tiers.pruner import Pruner


@final
class Deletions:
    """One at a time, each after the one before; a save starts its own writing after the last one.

    Args:
        store: the run, whose lock the manager holds.
        pruner: deletes; None on a rank that deletes nothing.
        events: gets what was deleted.
        lease: what must stay alive until a deletion has ended, because it holds the run's lock.

    Attributes:
        last: the last deletion that was started; None before the first.
    """

    def __init__(self, store: Store, pruner: Pruner | None, events: EventLog, lease: object) -> None:
        self.last: Job[None] | None = None
        self._store, self._pruner, self._events = store, pruner, events
        self._lease = lease
        self._planned: SaveResult | None = None

    def plan(self, result: SaveResult) -> None:
        """Delete what is old after this commit, from the next `start` on."""
        self._planned = result

    def start(self) -> None:
        """Start what is planned: in the background, because in the call it would delay the save that starts there."""
        result = self._planned
        if result is None or self._pruner is None:
            return
        before = self.last
        job = self.last = background_action(self._store, lambda: self.carry_out(result), after=before)
        try:
            job.start()
        except BaseException:
            if job.withdraw():
                self.last = before
            raise
        self._planned = None  # not before: after an interrupt it is done twice rather than never

    def carry_out(self, result: SaveResult) -> None:
        """Delete in the caller's thread what is old after this commit."""
        if self._pruner is not None:
            self._events.defer(self._pruner.retain(result))

    def wait(self) -> None:
        """Return when everything planned is deleted."""
        self.start()
        if self.last is not None:
            self.last.wait()
