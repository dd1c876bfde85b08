"""`Uploads`: sends the checkpoints of a near tier, and its logs, to a far one, the oldest first, in a thread; again after a failure."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Final, final

import attrs

from trainfold.backends.job import Job, is_process_ending
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import is_damaged
from trainfold.backends.runs.scan import examine, listed_run, read_root
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.tiers.carried_copy import check_copy
from trainfold.backends.tiers.compare_runs import Steps, inventory_in, planned_copy
from trainfold.backends.tiers.copy_checkpoints import carry_out
from trainfold.backends.tiers.pruner import Pruner, not_pruned
from trainfold.backends.tiers.sent_logs import SentLogs
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    CheckpointQuarantined,
    CheckpointUnreadable,
    CommitConflict,
    SaveFailed,
    TrainfoldError,
    error_text,
)
from trainfold.core.format.file_names import directory_of, step_of
from trainfold.core.history.best_copy import best_copy, usable_heads
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.history.inventory import Inventory, lineage
from trainfold.core.problem import Problem, error_from
from trainfold.core.save.events import Event, EventKind
from trainfold.core.save.pruning import parts_of
from trainfold.core.save.retention import Retention, Saved

_FIRST_PAUSE_SECS: Final = 1.0
_LONGEST_PAUSE_SECS: Final = 60.0
_ELSEWHERE: Final = (
    "name a new place as far=, which gets all that the near tier has: this one keeps what another machine saved"
)

_NOT_WHOLE: Final = (
    "check the disk, which has not all of it, or of a checkpoint that it refers to. If a newer checkpoint is in the far tier, no more is needed; "
    "else start the program again: it goes on from the newest that either tier has whole, and trains the rest again"
)
_LOST_BEST: Final = (
    "it is one of the best, and neither tier has it whole: put its files back from a copy of the run; "
    "or delete its manifest in the near tier: load_best and load_best_n go on without it, and the next save_best is sent"
)
_STANDS_ON: Final = (
    "it is one of the best, and refers to files of a checkpoint that neither tier has whole: trainfold prune RUN --keep-last 0 --flatten, "
    "with the near tier as RUN, writes it again so that it stands alone, and the next start sends it; "
    "if that finds wrong bytes of it, put them back from a copy of the run, or delete its manifest in the near tier"
)
_NOWHERE: Final = "best.json names it, and neither tier has it: load_best and load_best_n go on without it, and the record stays on the disk until the next save_best"
_AGAIN: Final = "start the program again, or trainfold copy the near tier to the far one"


@final
@attrs.frozen(eq=False)
class _Waiting:
    """A checkpoint that is to be sent. One that is saved again meanwhile is another one.

    Attributes:
        since: when it was durable, by the monotonic clock.
    """

    since: float


@final
@attrs.frozen
class _Unsent:
    """Why a checkpoint is not in the far tier, and what helps."""

    error: BaseException
    fix: str


@final
class Uploads:
    """Sends checkpoints while their run goes on. The caller holds the locks of both tiers.

    Args:
        near: the tier that is read.
        far: the tier that is written.
        keep: what stays in the far tier; None for all.
        most_waiting: how many may wait besides the one that is being sent; those before them are given up. None for any number.
        report: gets each event, from any thread.

    Attributes:
        logs: what is sent of the logs, and is not.
    """

    def __init__(
        self,
        near: Store,
        far: Store,
        *,
        keep: Retention | None,
        most_waiting: int | None,
        report: Callable[[Event], object],
    ) -> None:
        self._near, self._far = near, far
        best = partial(read_best, near)  # the file is sent after each checkpoint that waits
        self._pruner = None if keep is None else Pruner(far, keep, lock=nullcontext, waiting=best)
        self._most_waiting = most_waiting
        self._report_event = report
        self._mutex = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._job: Job[None] | None = None
        self._given_up: dict[str, _Unsent] = {}
        self._last_error: TrainfoldError | None = None
        self._is_closing = threading.Event()
        self.logs = SentLogs(near, far)

    @property
    def waiting(self) -> tuple[str, ...]:
        """What is not in the far tier yet, the oldest first."""
        with self._mutex:
            return tuple(self._waiting)

    def compare_logs(self) -> None:
        """See `SentLogs.compare`."""
        self.logs.compare()

    def add(self, *names: str) -> None:
        """Send checkpoints, or ``best.json``, after what waits."""
        with self._mutex:
            for name in names:
                self._waiting.pop(name, None)
                self._waiting[name] = _Waiting(time.monotonic())
            spare = self._spare()
            for name in spare:
                del self._waiting[name]
            job = None
            if self._job is None and self._waiting:  # at once: what waits has a job, or the last try has failed
                job = self._job = Job(self._work, name="trainfold-upload")
        if job is not None:
            job.start()  # in this thread, if no other can be started
        for name in spare:
            self._report("not_uploaded", name, f"given up for newer ones: more than {self._most_waiting} wait (most_waiting=)")  # fmt: skip

    def _spare(self) -> list[str]:
        """Those that need not wait any more; never the first one, which is being sent."""
        waiting = [name for name in self._waiting if step_of(name) is not None]
        return [] if self._most_waiting is None else waiting[1 : max(1, len(waiting) - self._most_waiting)]

    def wait(self) -> None:
        """Return when everything is sent. What fails from now on is tried once more, and not again.

        Raises:
            SaveFailed: with what is not in the far tier.
        """
        self._is_closing.set()
        try:
            unsent = self._unsent()
        finally:
            self._is_closing.clear()
        if unsent:
            self._given_up.clear()
            first = next(iter(unsent))
            fix = "; ".join(dict.fromkeys(each.fix for each in unsent.values()))
            raise SaveFailed(f"{self._far.url}/{first}", expected="every checkpoint of this run in the far tier",
                             found=f"{', '.join(unsent)} in {self._near.url} alone, because of {error_text(unsent[first].error)}", fix=fix)  # fmt: skip
        self.logs.send()

    def _unsent(self) -> dict[str, _Unsent]:
        """What is not in the far tier when nothing is being sent any more."""
        while True:
            with self._mutex:
                job = self._job
                if job is None or job.is_over:  # one that has ended in order is forgotten before
                    self._job, error = None, self._last_error if job is None else job.failure
                    assert error is not None or not self._waiting, "what waits without a job was tried; see `add`"
                    waiting = {} if error is None else dict.fromkeys(self._waiting, _Unsent(error, _AGAIN))
                    return {**self._given_up, **waiting}
            job.wait()

    def _next(self) -> tuple[str, _Waiting] | None:
        with self._mutex:
            found = next(iter(self._waiting.items()), None)
            if found is None:
                self._job = None
            return found

    def _work(self) -> None:
        pause_secs = _FIRST_PAUSE_SECS
        while (found := self._next()) is not None:
            name, waiting = found
            is_last_try = self._is_closing.is_set() or is_process_ending()
            try:
                self._send(name, waiting)
            except Exception as error:  # noqa: BLE001  # of a store; the run goes on
                if self._gives_up(name, waiting, error) or self._comes_last(name, waiting):
                    continue
                if is_last_try:
                    self._report("not_uploaded", name, f"{error_text(error)}; the run ends without it")
                    with self._mutex:
                        self._job = None
                    return
                self._report("not_uploaded", name, f"{error_text(error)}; tried again in {pause_secs:g} s")
                self._is_closing.wait(pause_secs)
                pause_secs = min(2 * pause_secs, _LONGEST_PAUSE_SECS)
            else:
                pause_secs = _FIRST_PAUSE_SECS

    def _gives_up(self, name: str, waiting: _Waiting, error: Exception) -> bool:
        """Whether another try would fail in the same way: the far tier has another checkpoint of the step, or the near one has not all of this one."""
        if not isinstance(error, TrainfoldError):
            error = SaveFailed(self._far.url, expected="an upload", found=error_text(error), fix="look at the far tier")
        self._last_error = error
        if not (isinstance(error, CommitConflict) or type(error) is CheckpointDamaged or self._has_lost(name, error)):
            return False
        with self._mutex:
            if self._waiting.get(name) is not waiting:
                return True  # it was saved again meanwhile
            del self._waiting[name]
        self._given_up[name] = _Unsent(error, _ELSEWHERE if isinstance(error, CommitConflict) else _NOT_WHOLE)
        self._report("not_uploaded", name, f"{error_text(error)}; it is not tried again")
        return True

    def _comes_last(self, name: str, waiting: _Waiting) -> bool:
        """Whether others go first: ``best.json`` may fail for an old checkpoint that it names, and keeps no new one waiting."""
        with self._mutex:
            if step_of(name) is not None or len(self._waiting) == 1:
                return False
            if self._waiting.get(name) is waiting:
                self._waiting[name] = self._waiting.pop(name)
            return True

    def _has_lost(self, name: str, error: TrainfoldError) -> bool:
        """Whether a checkpoint is not whole in the near tier; or one that it refers to, and that the far tier has neither."""
        if step_of(name) is None:
            return False
        try:
            found = listed_run(self._near)
            entry = found.entry(name)
            needed = [name]
            if entry is not None and not isinstance(error, SaveFailed | CheckpointUnreadable):  # those pass
                there = inventory_in(glimpse(self._far), may_be_new=True)
                needed += [each for each in entry.refers if not _may_be_in(there, each)]
            return found.problem is None and any(self._is_lost(found, each) for each in needed)
        except TrainfoldError:
            return False  # such as a disk that cannot be read now

    def _is_lost(self, run: Inventory, name: str) -> bool:
        """Whether the near tier has a checkpoint not whole. Deaths while it was loaded prove nothing: the load that is under way may go well."""
        entry = run.entry(name)
        if entry is not None and entry.problem is None:
            entry = examine(self._near, run, name).entry(name)
        if entry is None or entry.problem is not None:
            return entry is None or not entry.is_unreadable
        return self._is_damaged(name)

    def _is_held_back(self, name: str, problem: Problem) -> bool:
        """Whether a checkpoint is in quarantine for deaths alone."""
        return problem.error == CheckpointQuarantined.__name__ and not self._is_damaged(name)

    def _is_damaged(self, name: str) -> bool:
        """Whether a load has proved the bytes of a checkpoint of the near tier wrong."""
        return is_damaged(self._near, name, digest_of(read_root(self._near, name)))

    def _send(self, name: str, waiting: _Waiting) -> None:
        began = time.monotonic()
        step = step_of(name)
        plan, wrong = self._copied("newest" if step is None else [step])
        for error in wrong.values():
            raise error
        if step is None:
            is_sent = plan.best or BEST_FILE in plan.left_out
            self._lose({} if is_sent else self._send_bests())
        with self._mutex:
            self._given_up.pop(name, None)  # of an earlier save of the step
            if self._waiting.get(name) is waiting:
                del self._waiting[name]
        if step is None:  # of best.json, which goes with any checkpoint
            if BEST_FILE in plan.left_out:  # it cannot be parsed, or the disk has lost it: no other try would help
                self._report("not_uploaded", name, plan.left_out[BEST_FILE])
            return
        secs = time.monotonic() - began
        sent = sum(each.size_bytes for each in plan.checkpoints if each.action != "there")
        late = time.monotonic() - waiting.since
        self._report("uploaded", name, f"{sent} bytes, durable here {late:.1f} s before", secs=secs)
        self._prune(step)

    def _copied(self, steps: Steps) -> tuple[CopyPlan, dict[str, TrainfoldError]]:
        """Send checkpoints, and ``best.json`` if the far tier then has what it names; with what is wrong with those that could not be read."""
        plan = planned_copy(self._near, self._far, steps=steps, replaces=True)
        check_copy(plan)
        self.logs.send()  # before: a resume from there finds the log of the steps before it
        return plan, carry_out(plan, self._near, self._far)

    def _send_bests(self) -> dict[str, _Unsent]:
        """Send what the best names and the far tier lacks, and its record: a checkpoint that is found to be the best late may be deleted there by then.

        Returns:
            Name -> why it is not there, of those that the near tier has not whole.
        """
        file = read_best(self._near)
        names = {} if file is None else file.timelines
        here, there = inventory_in(self._near), inventory_in(glimpse(self._far))
        copied = usable_heads(there)
        for name in names:
            entry = here.entry(name)
            if entry is not None and entry.is_candidate and entry.head != copied.get(name):
                here = examine(self._near, here, name)
        best = best_copy(names, here, there)
        held = {name for name, each in best.damaged.items() if self._is_held_back(name, each)}
        late = [error_from(each) for each in (*best.unread, *map(best.damaged.__getitem__, held))]
        lost = {name: _Unsent(error_from(each), _LOST_BEST) for name, each in best.damaged.items() if name not in held}
        for step in best.lacking:  # each by itself: one that cannot be sent keeps no other
            name = directory_of(step)
            try:
                wrong = self._copied([step])[1]
            except SaveFailed:
                raise
            except CheckpointError as error:  # its own files are there: it is of one that it refers to
                wrong = {"": error}
            late += [each for each in wrong.values() if isinstance(each, CheckpointUnreadable | CheckpointMissing)]
            if not wrong:
                self._given_up.pop(name, None)
                self._report("uploaded", name, "it is one of the best")
            elif type(wrong.get(name)) is CheckpointDamaged:
                lost[name] = _Unsent(wrong[name], _LOST_BEST)
            else:
                lost[name] = _Unsent(next(iter(wrong.values())), _STANDS_ON)
        if late:
            raise late[0]  # another try may read it
        for name in best.nowhere:
            self._report("not_uploaded", name, _NOWHERE)
        return lost

    def _lose(self, lost: Mapping[str, _Unsent]) -> None:
        """Give up these of the best, and no others any more."""
        fixes = (_LOST_BEST, _STANDS_ON)
        for name in [name for name, each in self._given_up.items() if each.fix in fixes and name not in lost]:
            del self._given_up[name]
        for name, each in lost.items():
            if name not in self._given_up:
                self._report("not_uploaded", name, f"{error_text(each.error)}; {each.fix}")
                self._given_up[name] = each

    def _prune(self, step: int) -> None:
        """Delete what the far tier need not keep. A failure is an event, and the next upload tries again."""
        if self._pruner is None:
            return
        events: list[Event] = []
        try:
            newest = next(iter(lineage(inventory_in(glimpse(self._far)))), None)
            if newest is not None and newest.head is not None:
                summary = newest.summary
                parts = None if summary is None else parts_of(summary.fingerprints, summary.omitted)
                self._pruner.prune(Saved(newest.name, newest.head.step, newest.head.timeline, parts=parts), events)
        except Exception as error:  # noqa: BLE001  # of a store, or of a user's rule
            events.append(not_pruned(self._far.url, step, error))
        for event in events:
            self._report_event(event)

    def _report(self, kind: EventKind, name: str, detail: str, *, secs: float | None = None) -> None:
        self._report_event(Event(kind, self._far.url, step=step_of(name), checkpoint=name, detail=detail, secs=secs))


def _may_be_in(tier: Inventory, name: str) -> bool:
    entry = tier.entry(name)
    return entry is not None and (entry.is_candidate or entry.is_unreadable)
