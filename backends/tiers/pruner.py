"""`Pruner`: deletes old checkpoints after each commit, as `plan_pruning` decides."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

from trainfold.backends.runs.best.best_reader import (
    BEST_POINTER,
    best_bytes,
    best_json_lock,
    parsed_best,
    point_to_best,
    read_best,
)
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.reuse.leftovers import leftovers
from trainfold.backends.runs.scan import examine, listed_run
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.core.best.best_json import BEST_FILE, BestFile
from trainfold.core.digest import digest_of
from trainfold.core.errors import error_text
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.indexes.needed import nothing_needed
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.history.recognise import lost_files
from trainfold.core.problem import Problem, error_from, problem_of
from trainfold.core.save.events import Event
from trainfold.core.save.pruning import (
    Pruning,
    deletes_none,
    may_be_torn,
    parts_of,
    plan_pruning,
    to_prove,
)
from trainfold.core.save.retention import Retention, Saved

if TYPE_CHECKING:  # it imports torch, and `trainfold prune` needs none
    from trainfold.backends.runs.commit import SaveResult

_MOST_SIZES = 1_000  # of a checkpoint with more files only the names are looked at: a list of names is one request for each thousand
_LOG = logging.getLogger("trainfold")


@final
class Pruner:
    """Looks at the checkpoints of a run, asks the policy, and deletes what it does not keep.

    Args:
        store: the run. The caller holds its lock.
        policy: what to keep.
        left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
        lock: a lock for the time in which it looks at ``best.json`` and deletes, against other threads of this process that write that file.
        waiting: gives the best that is still to be written here; what it names stays too. None for none.
    """

    def __init__(
        self,
        store: Store,
        policy: Retention,
        left_behind: Retention | None = None,
        *,
        lock: Callable[[], AbstractContextManager[Any]] = best_json_lock,
        waiting: Callable[[], BestFile | None] = lambda: None,
    ) -> None:
        self._lock, self._waiting = lock, waiting
        self._store = store
        self._seen = store  # at the time of a decision
        self._policy = policy
        self._left_behind = left_behind
        # file sizes, by the names of files in the run, so that each manifest is read once, and none that was written here: both readers had accepted it before its commit
        self._proved: dict[str, Mapping[str, int]] = {}
        self._parts: dict[str, frozenset[str] | None] = {}  # components of partial checkpoints
        self._durable_best: bytes | None = None
        self._has_cleared = False

    @property
    def policies(self) -> tuple[Retention, Retention | None]:
        """What to keep, and what to keep of the checkpoints that rewinds have left behind."""
        return self._policy, self._left_behind

    def retain(self, result: "SaveResult") -> list[Event]:
        """Delete what the policy does not keep, after a commit. A failure is an event, and the next call tries again.

        What a kill has left of older saves and deletions is deleted too: a step directory without a manifest in which every file has a
        name that a save gives, and, by the first call, files beside a checkpoint that replaced it, or were to.

        Returns:
            An event for each checkpoint that was deleted, and one for a failure.
        """
        events: list[Event] = []
        parts = self._parts[result.checkpoint] = parts_of(result.fingerprints, result.omitted)
        if 0 < len(result.files) <= _MOST_SIZES:
            self._proved[result.checkpoint] = result.files
        try:
            self.prune(Saved(result.checkpoint, result.step, result.timeline, parts=parts), events)
            if not self._has_cleared:
                self._seen = glimpse(self._store)
                self.clear(leftovers(self._seen, listed_run(self._seen)))
                self._has_cleared = True
        except Exception as error:  # noqa: BLE001  # of a store, or of a user's rule: the checkpoint is committed all the same
            events.append(not_pruned(self._store.url, result.step, error))
        return events

    def plan(self, written: Saved, *, alone: Collection[str] = (), now: float | None = None) -> Pruning:
        """Decide what may be deleted now; reads only.

        Args:
            written: the newest complete checkpoint of the present lineage.
            alone: checkpoints that count as if they referred to no others.
            now: as in `prune`.

        Raises:
            CheckpointError: if there is a best that cannot be read.
        """
        self._seen = glimpse(self._store)
        inventory = listed_run(self._seen)
        inventory = with_quarantined(inventory, quarantined(self._seen)).standing_alone(alone)
        return self._plan(written, inventory, read_best(self._seen), proves=True, now=now)

    def prune(self, written: Saved, events: list[Event], *, now: float | None = None) -> None:
        """Delete what may be deleted now.

        Args:
            written: the newest complete checkpoint of the present lineage.
            events: gets an event for each checkpoint that is deleted, at once.
            now: seconds since 1970, from which ages count; None if ``written`` was committed just now: then the store's clock alone decides, and one of this machine that is wrong deletes nothing.

        Raises:
            CheckpointError: if there is a best that cannot be read, or if something would go and it is not known to what a checkpoint refers.
            SaveFailed: if the store cannot delete; what it deleted before is in ``events``.
        """
        with self._lock():
            self._prune(written, events, now)

    def clear(self, left: Mapping[str, Collection[str]]) -> None:
        """Delete files beside checkpoints.

        Args:
            left: as `leftovers` returns them.
        """
        for name, files in left.items():
            for file in files:
                self._store.delete(f"{name}/{file}")

    def _prune(self, written: Saved, events: list[Event], now: float | None) -> None:
        self._seen = glimpse(self._store)
        inventory = listed_run(self._seen)
        data = best_bytes(self._seen)
        best = None if data is None else parsed_best(self._store, data)
        self._lead_best_back(inventory, best)
        inventory = with_quarantined(inventory, quarantined(self._seen))
        proves = not deletes_none(self._policy, self._left_behind)
        plan = self._plan(written, inventory, best, proves=proves, now=now)
        if plan.held is not None:
            raise error_from(plan.held)
        if plan.deleted and data is not None and data != self._durable_best:
            self._store.commit(BEST_FILE, data, replaces=digest_of(data))  # else a crash may bring an earlier one back
            self._durable_best = data
        spared: set[str] = set()
        for name in plan.deleted:
            if name in spared or name in self._store.pointers().values():  # since the plan
                spared.update(plan.refers.get(name, ()))
                continue
            self._store.delete(f"{name}/")
            self._proved.pop(name, None)
            self._parts.pop(name, None)
            events.append(Event("pruned", self._store.url, checkpoint=name))
        for name in plan.torn:
            self._store.delete(f"{name}/")

    def _lead_best_back(self, inventory: Inventory, best: BestFile | None) -> None:
        """If a rewind has left the best behind, move its pointer to the best of the kept ones that are left, or remove it.

        The file itself stays, because its readers compare timelines. A person who follows a pointer does not compare them.
        """
        if best is None or self._seen.pointers().get(BEST_POINTER) != best.name:
            return
        found = point_to_best(self._store, inventory, best, pointed=best.name)
        if found is None:
            _LOG.warning("%s: the rewind has left the best, %s, behind: the pointer `best` is removed until one is saved",
                         self._store.url, best.name)  # fmt: skip
        elif found != best.name:
            _LOG.warning("%s: the rewind has left the best, %s, behind: the pointer `best` leads to %s, the best of those that are kept",
                         self._store.url, best.name, found)  # fmt: skip

    def _plan(
        self, written: Saved, inventory: Inventory, best: BestFile | None, *, proves: bool, now: float | None
    ) -> Pruning:
        """Look at what the decision needs, and decide. Without proofs, no checkpoint is deleted."""
        names = to_prove(inventory, written, with_left_behind=self._left_behind is not None) if proves else ()
        problems = {name: problem for name in names if (problem := self._problem(inventory, name)) is not None}
        whole = (*(name for name in names if name not in problems), written.name)
        entries = [entry for name in whole if (entry := inventory.entry(name)) is not None]
        pointed = {target: f"the pointer {name}" for name, target in self._seen.pointers().items()}
        bests = [each for each in (self._waiting(), best) if each is not None]
        named = {name: why for each in bests for name, why in each.names_in(inventory.timelines).items()}
        now = self._committed_at(written.name) if now is None else now
        return plan_pruning(
            inventory,
            written=written,
            proved={one.name: one for one in self._saved(entries, best.scores if best is not None else {}, now)},
            files={name: self._seen.list(name) for name in may_be_torn(inventory, written)},
            policy=self._policy,
            left_behind=self._left_behind,
            protected={**pointed, **named},
            problems=problems,
        )

    def _committed_at(self, name: str) -> float | None:
        return self._seen.committed_at(f"{name}/{MANIFEST}")

    def _saved(
        self, entries: Iterable[Entry], scores: Mapping[tuple[str, int], float], now: float | None
    ) -> list[Saved]:
        found = []
        for entry in entries:
            if entry.head is None:
                continue
            committed_at = self._committed_at(entry.name)
            age_secs = None if committed_at is None or now is None else now - committed_at
            score = scores.get((entry.name, entry.head.timeline))
            parts = self._parts.get(entry.name)
            found.append(Saved(entry.name, entry.head.step, entry.head.timeline, score, age_secs, parts))
        return found

    def _problem(self, inventory: Inventory, name: str) -> Problem | None:
        """Why a checkpoint does not have all its files now: other programs delete too, and one that lost a file protects nothing."""
        present = self._present(name)
        is_large = len(present) > _MOST_SIZES
        sizes = self._proved.get(name)
        if (
            sizes is not None
            and sizes.keys() <= self._present(*_directories(sizes))
            and (is_large or self._has_sizes(sizes))
        ):
            return None
        self._proved.pop(name, None)
        entry = examine(self._seen, inventory, name, needs=nothing_needed(most_files=0) if is_large else None).entry(
            name
        )
        assert entry is not None  # the plan asks for entries only
        if entry.manifest is None or entry.problem is not None:
            return entry.problem
        files = {file.path(name) for file in entry.manifest.files}
        files |= {index.path(name) for index in entry.manifest.indexes}
        lost = files - self._present(*_directories(files))
        if lost:
            return problem_of(lost_files(self._store.url, lost))
        self._proved[name] = {file.path(name): file.size_bytes for file in entry.manifest.files}
        self._parts[name] = parts_of((each.name for each in entry.manifest.components), entry.manifest.omitted)
        return None

    def _present(self, *directories: str) -> frozenset[str]:
        """The files of some directories, by their names in the run."""
        return frozenset(f"{name}/{file}" for name in directories for file in self._seen.list(name))

    def _has_sizes(self, sizes: Mapping[str, int]) -> bool:
        found = side_by_side([partial(self._seen.size, file) for file in sizes])
        return found == [*sizes.values()]


def not_pruned(run: str, step: int | None, error: Exception) -> Event:
    """The event for a deletion that failed. As long as its cause lasts the disk fills up, so a listener is to hear of it."""
    detail = f"old checkpoints could not be deleted, and will be tried again: {error_text(error)}"
    return Event("not_pruned", run, step=step, detail=detail)


def _directories(files: Iterable[str]) -> list[str]:
    """The directories of files: that of a checkpoint, and of those that it refers to."""
    return sorted({file.partition("/")[0] for file in files})
