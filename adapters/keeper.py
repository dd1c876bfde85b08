"""`Keeper`: deletes the checkpoints that a retention has no room for, after each commit (E03)."""

import logging
import time
from typing import final

from trainfold.backends.best_reader import best_checkpoints, best_scores
from trainfold.backends.inventory import examine, read_inventory
from trainfold.backends.protocols import Store
from trainfold.backends.quarantine_file import quarantined
from trainfold.backends.run_save import SaveResult
from trainfold.core.events import Event
from trainfold.core.inventory import lineage
from trainfold.core.quarantine import with_quarantined
from trainfold.core.retention import Retention, RetentionPlan, Saved, plan_retention
from trainfold.core.save_plan import MANIFEST

_LOG = logging.getLogger("trainfold")


@final
class Keeper:
    """Looks at the complete checkpoints of the present lineage, asks the policy, and deletes what may go.

    Args:
        store: the run, whose lock is held.
        policy: what to keep.
    """

    def __init__(self, store: Store, policy: Retention) -> None:
        self._store = store
        self._policy = policy
        self._proved: set[str] = set()  # complete checkpoints do not change, so each is read once

    def retain(self, result: SaveResult) -> list[Event]:
        """Delete what may go now that a checkpoint was committed; a failure is a warning, and tried again (E04).

        Returns:
            An event for each deleted checkpoint.
        """
        self._proved.add(result.checkpoint)
        try:
            return self._delete(self._plan(result))
        except Exception as error:  # noqa: BLE001  # of a store, or of a user's rule: the checkpoint is committed all the same
            _LOG.warning(
                "%s: old checkpoints could not be deleted, and will be tried again: %s", self._store.url, error
            )
            return []

    def _plan(self, result: SaveResult) -> RetentionPlan:
        complete = self._complete()
        written = next((one for one in complete if one.name == result.checkpoint), None)
        pointed = {target: f"the pointer {name}" for name, target in self._store.pointers().items()}
        protected = {**pointed, **best_checkpoints(self._store)}
        return plan_retention(
            complete,
            policy=self._policy,
            written=written or Saved(result.checkpoint, result.step, result.timeline),
            protected=protected,
        )

    def _delete(self, plan: RetentionPlan) -> list[Event]:
        events = []
        for name in plan.deleted:
            self._store.delete(f"{name}/")
            self._proved.discard(name)
            events.append(Event("pruned", self._store.url, checkpoint=name))
        return events

    def _complete(self) -> list[Saved]:
        """The complete checkpoints of the present lineage that can be loaded, as far as is known.

        What a rewind left behind is not this run's to delete (E16).
        """
        inventory = with_quarantined(read_inventory(self._store), quarantined(self._store))
        now, scores = time.time(), best_scores(self._store)
        found = []
        for entry in lineage(inventory):
            if entry.head is None:
                continue
            if entry.name not in self._proved:
                proved = examine(self._store, inventory, entry.name).entry(entry.name)
                if proved is None or proved.problem is not None:
                    continue
                self._proved.add(entry.name)
            committed_at = self._store.committed_at(f"{entry.name}/{MANIFEST}")
            age_secs = None if committed_at is None else now - committed_at
            score = scores.get((entry.name, entry.head.timeline))
            found.append(Saved(entry.name, entry.head.step, entry.head.timeline, score, age_secs))
        return found
