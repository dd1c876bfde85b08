"""`Fetches`: brings into the near tier what the far one alone has."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

import attrs

from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import end_attempt
from trainfold.backends.runs.scan import listed_run, read_root, sees_root
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.tiers.carried_copy import check_copy
from trainfold.backends.tiers.compare_runs import inventory_in, newest_whole, planned_copy
from trainfold.backends.tiers.copy_checkpoints import carry_out
from trainfold.backends.tiers.sent_logs import SentLogs
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointQuarantined,
    CheckpointUnreadable,
    CommitConflict,
    SaveFailed,
    TrainfoldError,
    error_text,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, step_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory, current_head, head_order, lineage
from trainfold.core.history.quarantine import outcome_of
from trainfold.core.problem import error_from
from trainfold.core.save.events import Event

_NOWHERE: Final = (-1, -1, -1)
_COMPARED: Final = 8


@final
class Fetches:
    """Fetches of a run in two tiers.

    Args:
        near: the near tier. The caller holds the locks of both.
        far: the far one.
        logs: of the two.
        report: gets an event for each fetch.
    """

    def __init__(self, near: LocalStore, far: Store, logs: SentLogs, report: Callable[[Event], None]) -> None:
        self._near, self._far, self._logs, self._report = near, far, logs, report

    def catch_up(self) -> list[str]:
        """Fetch the newest checkpoint if the far tier alone has it; return what the near tier alone has, the oldest first."""
        far = glimpse(self._far)
        problem = listed_run(self._near).problem
        if problem is not None and problem.error != CheckpointMissing.__name__:
            return []  # a manager, a save and a load raise it
        with self._reading():
            there = inventory_in(far, may_be_new=True)
        here = inventory_in(self._near, may_be_new=True)
        if there.run_id is not None:
            if here.run_id not in {None, there.run_id}:
                raise CheckpointForeign(self._far.url, expected=f"run {here.run_id}, as in {self._near.url}", found=f"run {there.run_id}",
                                        fix="name the far tier of this run, or a new place")  # fmt: skip
            mine = newest_whole(self._near, here)
            got = self._fetch(far, there, _NOWHERE if mine is None else _age_in(here, mine))
            if got is None and mine is None:
                self._check_empty(there)
                self._take_over_run(far, here)
            self._logs.fetch(missing=got is None)
            here = inventory_in(self._near, may_be_new=True)
            self._report_parted(far, here, there)
        sent = max((_age(entry.head) for entry in lineage(there) if entry.head is not None), default=_NOWHERE)
        left = [entry.name for entry in lineage(here) if entry.head is not None and _age(entry.head) > sent]
        return [*reversed(left), *([BEST_FILE] if self._near.size(BEST_FILE) is not None else [])]

    def _check_empty(self, there: Inventory) -> None:
        """Check that there is nothing to go on from, where nothing was fetched and the near tier has nothing.

        Raises:
            SaveFailed: if the far tier has checkpoints: a start would begin the run again, beside them.
        """
        lost = [entry.name for entry in there.entries if entry.head is not None]
        if lost:
            raise SaveFailed(self._far.url, expected="a whole checkpoint of the run", found=f"none, of {', '.join(lost[-8:])}",
                             fix=f"see `trainfold verify {self._far.url}`; to begin again on purpose, name a new place as far=")  # fmt: skip

    def _take_over_run(self, far: Store, here: Inventory) -> None:
        """Be the run of the far tier, where a machine was lost before its first upload had ended: nothing could be sent into it as another one."""
        if here.run_id is None:
            with self._reading():
                record = far.read(RUN_FILE)
            self._near.commit(RUN_FILE, record)

    def _report_parted(self, far: Store, here: Inventory, there: Inventory) -> None:
        """Report the newest checkpoints that are other ones in the two tiers: the run went on in two places."""
        common = [entry.name for entry in lineage(here) if _age_in(there, entry.name) == _age_in(here, entry.name)]
        for name in common[:_COMPARED]:
            if not sees_root(far, name, read_root(self._near, name)):
                detail = "the far tier has another checkpoint of this step, and both stay: the run was also continued elsewhere"
                self._report(Event("not_uploaded", self._far.url, step=step_of(name), checkpoint=name, detail=detail))

    def _fetch(
        self, far: Store, there: Inventory, mine: tuple[int, int, int], *, before: tuple[int, int, int] | None = None
    ) -> str | None:
        """Copy the newest checkpoint that is newer, and whole, into the near tier; with what the best names, if that has lost its record. Returns its name.

        Raises:
            SaveFailed: if one that may be newer cannot be read now: an older one is not taken for it.
        """
        self._check_read(there.maybe_newer(current_head(there)))
        has_best = self._near.size(BEST_FILE) is not None
        for entry in lineage(there):
            self._check_read(there.maybe_newer(entry.head))
            if entry.head is None or _age(entry.head) <= mine:
                return None
            if before is not None and _age(entry.head) >= before:
                continue
            with self._reading():
                best = None if has_best else read_best(far)
            kept = [step_of(name) for name in (() if best is None else best.names) if there.entry(name) is not None]
            if self._has_fetched(entry.name, *(step for step in kept if step is not None)):
                return entry.name
        self._check_read([entry for entry in there.maybe_newer(None) if (step_of(entry.name) or 0) > mine[1]])
        return None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name what a read of the far tier raises that does not answer."""
        try:
            yield
        except CheckpointUnreadable as error:
            raise self._unread(error) from error

    def _check_read(self, unread: Sequence[Entry]) -> None:
        for entry in reversed(unread):
            if entry.problem is not None:
                raise self._unread(error_from(entry.problem), entry.name)

    def fetched_again(self, name: str, *, or_older: bool) -> str | None:
        """See `HasFarTier.refetch`."""
        far = glimpse(self._far)
        with self._reading():
            there = inventory_in(far, may_be_new=True)
        if there.entry(name) is None:
            self._report_lost(name, "the far tier does not have it either")
        elif self._has_fetched(name, lost=[name]):
            return name
        here = inventory_in(self._near)
        failed = here.entry(name)
        if not or_older or failed is None or failed.head is None:
            return None
        others = attrs.evolve(here, entries=tuple(each for each in here.entries if each is not failed))
        mine = newest_whole(self._near, others)
        return self._fetch(far, there, _NOWHERE if mine is None else _age_in(here, mine), before=_age(failed.head))

    def _has_fetched(self, name: str, *best: int, lost: Sequence[str] = ()) -> bool:
        """Copy a checkpoint into the near tier, and those that the best names; without these if they keep it back. Whether that succeeded.

        Raises:
            SaveFailed: if the near tier cannot be written, or the far one cannot be read now.
        """
        began, step = time.monotonic(), step_of(name)
        assert step is not None  # of an entry
        self._check_near(name)
        try:
            plan = planned_copy(self._far, self._near, steps=sorted({step, *best}), replaces=True, lost=lost)
            check_copy(plan)
            self._look_at(carry_out(plan, self._far, self._near), name)
        except CheckpointError as error:
            if isinstance(error, SaveFailed) and not isinstance(error, CommitConflict):
                raise
            is_known = isinstance(error, CommitConflict | CheckpointQuarantined)
            if not is_known and outcome_of(error).ending != "damaged":
                raise self._unread(error) from error
            if best:
                has_name = self._has_fetched(name)
                if has_name:
                    self._report_lost(BEST_FILE, error_text(error))
                return has_name
            self._report_lost(name, error_text(error))
            return False
        detail = f"{plan.size_bytes} bytes to {self._near.url}, which has lost it"
        secs = time.monotonic() - began
        self._report(Event("fetched", self._far.url, step=step, checkpoint=name, detail=detail, secs=secs))
        return True

    def _check_near(self, name: str) -> None:
        """Check that the near tier gives what it has of a manifest that is to be replaced.

        Raises:
            SaveFailed: if it does not: it would be taken for damage of the far tier.
        """
        try:
            if self._near.size(f"{name}/{MANIFEST}") is not None:
                read_root(self._near, name)
        except CheckpointDamaged as error:
            look = "look at the device and its log" if type(error) is CheckpointDamaged else error.fix
            raise SaveFailed(error.where, expected="a manifest that the disk gives, or none: the far tier has a checkpoint of this step", found=error.found,
                             fix=f"{look}; only if it is lost for good, delete that file, and start again: that of the far tier is fetched, which is an earlier one if the step was trained again and not sent") from error  # fmt: skip

    def _look_at(self, wrong: dict[str, TrainfoldError], name: str) -> None:
        """Mark what is damaged in the far tier, so that an upload of the same step sends it again.

        Raises:
            TrainfoldError: if this checkpoint was not copied; or another one for a reason that proves no damage.
        """
        for other, error in wrong.items():
            if type(error) is CheckpointDamaged:
                end_attempt(self._far, other, outcome_of(error))
        for other, error in wrong.items():
            if other == name or outcome_of(error).ending != "damaged":
                raise error
            self._report_lost(other, error_text(error))

    def _report_lost(self, name: str, why: str) -> None:
        self._report(Event("not_fetched", self._far.url, step=step_of(name), checkpoint=name, detail=why))

    def _unread(self, error: TrainfoldError, name: str | None = None) -> SaveFailed:
        """What is raised where nothing proves that the far tier has nothing newer, or that this checkpoint of it is not: to go on without it would be a guess."""
        and_then = f", and {name} can be read there, or was deleted there" if name else ""
        return SaveFailed(self._far.url, expected="a far tier that can be read: it may have a newer checkpoint than the near one", found=error_text(error),
                          fix=f"start again when it answers; or, if no other machine has continued this run, use {self._near.url} by itself as the run: what it saves is sent when both are used again{and_then}")  # fmt: skip


def _age(head: Head) -> tuple[int, int, int]:
    return (*head_order(head), head.revision)


def _age_in(inventory: Inventory, name: str) -> tuple[int, int, int]:
    entry = inventory.entry(name)
    return _NOWHERE if entry is None or entry.head is None else _age(entry.head)
