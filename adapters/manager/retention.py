"""`Pruner`: deletes the checkpoints that a retention has no room for, after each commit (E03)."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import final

from trainfold.backends.runs.best_lock import best_json_lock
from trainfold.backends.runs.best_reader import BEST_POINTER, best_bytes, best_name, named_by, parsed_best, scores_in
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.save import SaveResult
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.best_json import BEST_FILE, BestFile
from trainfold.core.digest import digest_of
from trainfold.core.format.file_names import MANIFEST, directory_of, is_data_file, step_of
from trainfold.core.history.inventory import Entry, Inventory, lineage
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.save.events import Event
from trainfold.core.save.retention import Retention, Saved, plan_left_behind, plan_retention

_LOG = logging.getLogger("trainfold")


@final
class Pruner:
    """Looks at the complete checkpoints of the present lineage, asks the policy, and deletes what may go.

    Args:
        store: the run, whose lock is held.
        policy: what to keep.
        left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
    """

    def __init__(self, store: Store, policy: Retention, left_behind: Retention | None = None) -> None:
        self._store = store
        self._policy = policy
        self._left_behind = left_behind
        self._proved: dict[str, Mapping[str, int]] = {}  # files and their sizes, so that each manifest is read once
        self._parts: dict[str, frozenset[str] | None] = {}  # of what has a part of the run's components
        self._durable_best: bytes | None = None

    def retain(self, result: SaveResult) -> list[Event]:
        """Delete what may go now that a checkpoint was committed; a failure is a warning, and tried again (E04).

        What is left of older saves and deletions that a kill cut off goes too: a step without a manifest, of which every file
        has a name that a save gives.

        Returns:
            An event for each checkpoint that was deleted.
        """
        events: list[Event] = []
        self._parts[result.checkpoint] = _parts(result.fingerprints, result.omitted)
        try:
            with best_json_lock():
                self._retain(result, events)
        except Exception as error:  # noqa: BLE001  # of a store, or of a user's rule: the checkpoint is committed all the same
            _LOG.warning(
                "%s: old checkpoints could not be deleted, and will be tried again: %s", self._store.url, error
            )
        return events

    def _retain(self, result: SaveResult, events: list[Event]) -> None:
        inventory = read_inventory(self._store)
        data = best_bytes(self._store)
        best = None if data is None else parsed_best(self._store, data)
        self._lead_best_back(inventory, best)
        deleted = self._plan(result, inventory, best)
        if deleted and data is not None and data != self._durable_best:
            self._store.commit(BEST_FILE, data, replaces=digest_of(data))  # else a crash may bring an earlier one back
            self._durable_best = data
        for name in deleted:
            if name in self._store.pointers().values():
                continue  # since the plan
            self._store.delete(f"{name}/")
            self._proved.pop(name, None)
            self._parts.pop(name, None)
            events.append(Event("pruned", self._store.url, checkpoint=name))
        for name in self._torn(result, inventory):
            self._store.delete(f"{name}/")

    def _lead_best_back(self, inventory: Inventory, best: BestFile | None) -> None:
        """Where a rewind has left the best behind, its pointer leads to the best of those that are kept, or goes (E12).

        The file itself stays: whoever reads it looks at the timelines. A pointer is followed by people, who do not.
        """
        if best is None or self._store.pointers().get(BEST_POINTER) != best_name(best):
            return
        present = {(entry.name, entry.head.timeline) for entry in lineage(inventory) if entry.head is not None}
        if (best_name(best), best.timeline) in present:
            return
        names = ((directory_of(entry.step), of) for entry, of in best.kept)
        found = next((name for name, of in names if (name, of) in present), None)
        if found is None:
            self._store.delete(BEST_POINTER)
            _LOG.warning("%s: the rewind has left the best, %s, behind: the pointer `best` is removed until one is saved",
                         self._store.url, best_name(best))  # fmt: skip
        else:
            self._store.point(BEST_POINTER, found)
            _LOG.warning("%s: the rewind has left the best, %s, behind: the pointer `best` leads to %s, the best of those that are kept",
                         self._store.url, best_name(best), found)  # fmt: skip

    def _plan(self, result: SaveResult, inventory: Inventory, best: BestFile | None) -> tuple[str, ...]:
        """What may go, in order."""
        complete = self._complete(result, inventory, scores_in(best))
        written = next((one for one in complete if one.name == result.checkpoint), None)
        pointed = {target: f"the pointer {name}" for name, target in self._store.pointers().items()}
        protected = {**pointed, **named_by(best)}
        plan = plan_retention(
            complete,
            policy=self._policy,
            written=written
            or Saved(result.checkpoint, result.step, result.timeline, parts=self._parts[result.checkpoint]),
            protected=protected,
        )
        if self._left_behind is None:
            return plan.deleted
        left = self._complete_left_behind(result, inventory, scores_in(best))
        return plan.deleted + plan_left_behind(left, policy=self._left_behind, protected=protected).deleted

    def _torn(self, result: SaveResult, inventory: Inventory) -> list[str]:
        names = [entry.name for entry in inventory.entries if entry.head is None]
        older = [name for name in names if (step_of(name) or 0) < result.step]
        files = {name: self._store.list(name) for name in older}
        return [name for name in older if files[name] and all(is_data_file(file) for file in files[name])]

    def _complete(
        self, result: SaveResult, inventory: Inventory, scores: Mapping[tuple[str, int], float]
    ) -> list[Saved]:
        """The complete checkpoints of the present lineage that can be loaded, as far as is known.

        What a rewind left behind goes by a rule of its own, if there is one (E16).
        """
        inventory = with_quarantined(inventory, quarantined(self._store))
        chosen = lineage(inventory)
        whole = [each for each in chosen if each.name == result.checkpoint or self._is_whole(inventory, each.name)]
        return self._saved(whole, scores)

    def _complete_left_behind(
        self, result: SaveResult, inventory: Inventory, scores: Mapping[tuple[str, int], float]
    ) -> list[Saved]:
        """The complete checkpoints of earlier timelines that the present lineage does not go through."""
        inventory = with_quarantined(inventory, quarantined(self._store))
        mine = {entry.name for entry in lineage(inventory)}
        earlier = [
            entry
            for entry in inventory.entries
            if entry.is_candidate
            and entry.head is not None
            and entry.head.timeline < result.timeline
            and entry.name not in mine
        ]
        return self._saved([each for each in earlier if self._is_whole(inventory, each.name)], scores)

    def _saved(self, entries: Iterable[Entry], scores: Mapping[tuple[str, int], float]) -> list[Saved]:
        now = time.time()
        found = []
        for entry in entries:
            if entry.head is None:
                continue
            committed_at = self._store.committed_at(f"{entry.name}/{MANIFEST}")
            age_secs = None if committed_at is None else now - committed_at
            score = scores.get((entry.name, entry.head.timeline))
            parts = self._parts.get(entry.name)
            found.append(Saved(entry.name, entry.head.step, entry.head.timeline, score, age_secs, parts))
        return found

    def _is_whole(self, inventory: Inventory, name: str) -> bool:
        """Whether a checkpoint has all its files, looked at anew: others delete too, and what they leave protects nothing (E05)."""
        sizes = self._proved.get(name)
        if sizes is None or any(self._store.size(f"{name}/{file}") != size for file, size in sizes.items()):
            self._proved.pop(name, None)
            entry = examine(self._store, inventory, name).entry(name)
            if entry is None or entry.problem is not None or entry.manifest is None:
                return False
            self._proved[name] = {file.name: file.size_bytes for file in entry.manifest.files}
            self._parts[name] = _parts((each.name for each in entry.manifest.components), entry.manifest.omitted)
        return True


def _parts(components: Iterable[str], omitted: Collection[str]) -> frozenset[str] | None:
    """The components of a checkpoint that was saved without others; None for a whole one."""
    return frozenset(components) if omitted else None
