"""`SaveTriggers`: decides what is due at the boundaries of a run; `AutoCadence`: the cadence of ``every="auto"``, chosen from measurements."""

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, final

import attrs

from trainfold.adapters.manager.arguments import PLACE
from trainfold.adapters.parallel.end_together import by_rank
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.event_log import EventLog
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.ranks.process_group import is_of_transport
from trainfold.core.errors import RankFailed, RanksDisagree, place
from trainfold.core.json_values import shown
from trainfold.core.layout.world import Collectives, HasBulletin, HasCome, PendingRows
from trainfold.core.save.boundary import (
    Boundary,
    agreed_boundary,
    flag_missing,
    never_come,
    passed_number,
    without_flag,
)
from trainfold.core.save.cadence import choose_cadence, describe_cadence
from trainfold.core.save.requests import StopRequest, merge_requests
from trainfold.core.save.triggers import (
    Triggers,
    Verdict,
    decide,
    last_saved_after_failure,
    last_saved_at,
    with_chosen_cadence,
)

_REMEMBERED: Final = 64
_LOG: Final = logging.getLogger("trainfold")
PATIENCE_SECS: Final = 10.0
_LOOK_SECS: Final = 1.0  # how often a rank that waits looks whether the others have passed


@final
class AutoCadence:
    """Chooses a cadence once a save has been measured: the one that loses the least time. Before that there is none.

    It measures the time from the end of one boundary to the beginning of the next, the median of which is a step; how long the call of
    a save takes; and how much longer than the median steps take while a save is written in the background.

    Args:
        report: gets what was chosen, in words.
        clock: seconds that only increase.

    Attributes:
        every: what was chosen, in optimizer steps; None until then.
    """

    def __init__(self, report: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.every: int | None = None
        self._report = report
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)  # seconds each
        self._left: tuple[float, int] | None = None  # when the last boundary ended, and its step
        self._began: float | None = None  # of the save under way
        self._cost = 0.0  # of that save, or of the last one, until the choice
        self._write = 0.0
        self._is_measured = False

    def arrive(self, step: int) -> None:
        """Note that a boundary begins."""
        if self._left is None or step <= self._left[1]:
            return
        left, done = self._clock() - self._left[0], step - self._left[1]
        if self._began is None:
            self._steps.append(left / done)
        elif self._steps:
            self._cost += max(0.0, left - done * statistics.median(self._steps))
        if self._is_measured and self._steps:
            self._choose()

    def leave(self, step: int) -> None:
        """Note that a boundary, or a save at one, ends."""
        self._left = (self._clock(), step)

    def begun(self, call_secs: float, *, is_durable: bool) -> None:
        """Note how many seconds the call of a save took; the save may be durable already."""
        self._cost, self._began = call_secs, self._clock() - call_secs
        if is_durable:
            self.ended()

    def ended(self) -> None:
        """Note that the save under way has ended."""
        if self._began is not None:
            self._write, self._began, self._is_measured = self._clock() - self._began, None, True

    def _choose(self) -> None:
        self._is_measured = False
        step_secs = statistics.median(self._steps)
        every = choose_cadence(self.every, save_secs=self._cost, step_secs=step_secs, write_secs=self._write)
        if every != self.every:
            self.every = every
            self._report(describe_cadence(every, save_secs=self._cost, step_secs=step_secs))


def auto_cadence(events: EventLog, world: Collectives) -> AutoCadence:
    """A cadence reported on rank 0 and followed by the other ranks; it does not keep the manager alive."""
    return AutoCadence(lambda detail: events.report("cadence", detail=detail) if world.rank == 0 else None)


def _check_alike(told: Sequence[Mapping[str, object]]) -> None:
    for name, value in told[0].items():
        if name != PLACE and any(each.get(name) != value for each in told):
            raise RanksDisagree(
                f"CheckpointManager.{name}",
                expected="the same on every rank, because all save together",
                found=by_rank([shown(each.get(name)) for each in told]),
                fix="pass the same everywhere; only rank 0 commits and deletes, whatever the others pass",
            )


@final
@attrs.frozen
class Before:
    """What was due before a save started, in case it fails."""

    step: int
    last_saved: int | None
    saved_at: float
    asked: tuple[StopRequest, ...]


@final
class SaveTriggers:
    """Remembers what decides whether to save and to stop; see `trainfold.core.save.triggers.decide`.

    Ranks agree without waiting: at the end of each boundary a rank starts to send what it knows, and all read it at the next one, when it
    has long arrived. So a request, rank 0's clock, and the end of a save in the background are acted on one boundary later than on a single
    rank. ``is_last`` and ``is_best`` belong to their boundary: with one of them the ranks wait for each other there. Nothing is sent where
    nothing can come of it: no rank has a source of requests, no cadence goes by a clock, and no save is under way.

    Args:
        triggers: when to save without a request.
        requests: where requests come from; None for nowhere.
        world: the ranks; all of them make this object at the same point.
        auto: chooses the cadence; None if one is given.
        alike: the arguments of the manager that all ranks must give alike, or some would save where others train; and under `PLACE` where the run is, which is logged
            if it differs, since mounts may have other names on other ranks.

    Raises:
        RanksDisagree: on every rank, if they do not.

    Attributes:
        stops: whether a boundary decided that the loop ends.
        is_aborted: whether a request ended the loop without a save.
        places: the place of the run on each rank, as a text; empty if they are the same.
        auto: see the argument.
        last_saved: the step of the newest checkpoint, saved or resumed from. If the loop went back in memory, to a step at or
            before that one, this is the step before the one where that was seen: what is trained again is not saved yet.
    """

    def __init__(
        self,
        triggers: Triggers,
        requests: RequestSource | None,
        world: Collectives,
        *,
        auto: AutoCadence | None = None,
        alike: Mapping[str, object] | None = None,
    ) -> None:
        self.stops = False
        self.is_aborted = False
        self.last_saved: int | None = None
        self.auto = auto
        self._triggers = triggers
        self._requests = requests
        self._world = world
        self._asked: tuple[StopRequest, ...] = ()
        self._saved_at = time.monotonic()
        self._seen: int | None = None
        self._made: object = None  # what was seen then
        self._every: int | None = None  # the last agreed cadence
        self._pending: PendingRows | None = None
        self._sent_at = -1  # the step where it was sent
        # the last step of which this rank has left the boundary, or begun a save with all ranks
        self._done: int | None = None
        self._flags = 0  # boundaries that this rank has come to with a flag
        self._is_outdated = False  # a save or a load came after the row that is on its way
        self._failure: Exception | None = None  # of the source of requests, for the next boundary
        self._passed = world.bulletin() if world.world_size > 1 and isinstance(world, HasBulletin) else None
        by_clock = auto is not None or triggers.every_secs is not None
        told = [(False, alike)]
        if world.world_size > 1:
            told = world.gather((requests is not None, alike), doing="make its manager")
            _check_alike([each or {} for _, each in told])
        self._always_sends = world.world_size > 1 and (any(has_source for has_source, _ in told) or by_clock)
        places = [(each or {}).get(PLACE) for _, each in told]
        self.places = by_rank(places) if len(set(places)) > 1 else ""
        if self.places and world.rank == 0:
            _LOG.warning(
                "the run has not the same path on every rank: %s. Each rank writes its part below its own path: if these are not mounts of one "
                "directory, the first save fails. Compute a name with a time or a number in it on rank 0, and broadcast it",
                self.places,
            )

    def arrive(self, step: int, *, is_last: bool, is_best: bool, has_ended: bool) -> Boundary:
        """What all ranks agree on at a boundary; every rank calls, and calls `leave` when it has acted on it.

        Requests are remembered until a save answers them, or a decision not to save does.

        Args:
            step: optimizer steps done.
            is_last: whether the run ends here.
            is_best: whether this state is the best so far.
            has_ended: whether the save under way has ended on this rank.

        Raises:
            RanksDisagree: if the ranks were at different steps, or differ in ``is_last`` or ``is_best``.
            RankFailed: if another rank's source of requests failed; on that rank, its own exception.
        """
        with _at(step):
            return self._arrive(step, is_last=is_last, is_best=is_best, has_ended=has_ended)

    def _arrive(self, step: int, *, is_last: bool, is_best: bool, has_ended: bool) -> Boundary:
        if self.auto is not None:
            self.auto.arrive(step)
        if self._world.world_size == 1:
            mine = self._here(step, is_last=is_last, is_best=is_best, has_ended=has_ended)
            self._raise_failure()
            self._every, self._asked = mine.every, merge_requests([self._asked, mine.asked])
            return mine
        if self._passed is not None and self._pending is None:
            self._passed.check()
        found = self._agreed() or Boundary(step)
        if is_last or is_best:
            self._flags += 1
            self._send(self._here(step, is_last=is_last, is_best=is_best, has_ended=has_ended))
            with self._until_all_have_the_flag(step, "is_last" if is_last else "is_best"):
                found = self._agreed(is_watched=True) or found
        return attrs.evolve(found, step=step, is_last=is_last, is_best=is_best)

    def leave(self, step: int, *, has_ended: bool, is_saving: bool) -> None:
        """Start to send what this rank knows at the end of a boundary, for the next one.

        Args:
            step: optimizer steps done.
            has_ended: whether the save under way has ended on this rank.
            is_saving: whether there is one, which all ranks say alike.
        """
        self._done = step if self._done is None else max(self._done, step)
        if self._always_sends or (is_saving and self._world.world_size > 1):
            self._send(self._here(step, is_last=False, is_best=False, has_ended=has_ended))
        elif self._passed is not None:
            self._passed.put(passed_number(step, self._flags))

    def close(self) -> None:
        """Let ranks that wait for this one see that it comes to no further boundary."""
        if self._passed is not None:
            self._passed.put(passed_number(self._done, self._flags, is_closed=True))

    def until_all_come(self, step: int, world: Collectives | None = None) -> AbstractContextManager[None]:
        """Fail if ranks have closed their managers before a boundary where this one waits for them in the block.

        Args:
            step: of the boundary.
            world: in which it waits; None for that of the boundaries.
        """
        passed = self._passed
        if passed is None:
            return nullcontext()
        return _watched(self._world if world is None else world, lambda: never_come(passed.numbers(), step))

    def _until_all_have_the_flag(self, step: int, flag: str) -> AbstractContextManager[None]:
        """Fail if other ranks have passed a boundary without a flag, or closed their managers before it; where that does not show, log it soon.

        Without a flag a rank does not come here, and it may wait for this one in the training.
        """
        rank, passed, flags = self._world.rank, self._passed, self._flags
        where = f"rank {rank} was given {flag}=True at step {step}, and waits there for all ranks: give it on every rank at this boundary"

        def find() -> RanksDisagree | None:
            ranks, closed = ([], []) if passed is None else without_flag(passed.numbers(), rank, step, flags)
            return flag_missing(flag, rank, ranks, closed) if ranks else None

        return _watched(self._world, find, where)

    def _here(self, step: int, *, is_last: bool, is_best: bool, has_ended: bool) -> Boundary:
        """What this rank knows now, with the requests that have come."""
        asked: tuple[StopRequest, ...] = ()
        if self._requests is not None:
            try:
                asked = merge_requests([self._requests.take()])
            except Exception as error:  # noqa: BLE001 - raised at the boundary where all ranks know of it
                self._failure = error
        every = None if self.auto is None else self.auto.every
        secs = time.monotonic() - self._saved_at
        return Boundary(step, is_last, is_best, has_ended, secs, every, asked, self._failure is not None)

    def _send(self, mine: Boundary) -> None:
        self._pending, self._is_outdated, self._sent_at = (
            self._world.start_gather(mine.numbers(), doing="come to the next boundary"),
            False,
            mine.step,
        )

    def _agreed(self, *, is_watched: bool = False) -> Boundary | None:
        """What all ranks knew when they sent it; None if nothing was sent."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        if is_watched or (isinstance(pending, HasCome) and pending.has_come):
            rows = pending.wait()
        else:
            with self.until_all_come(self._sent_at):
                rows = pending.wait()
        found = agreed_boundary(rows)
        self._asked = merge_requests([self._asked, found.asked])
        self._every = found.every
        if found.has_failed:
            on_all_ranks(self._world, self._raise_failure, doing="ask for requests", is_vote=True)
        return attrs.evolve(found, secs_since_save=0.0, has_ended=False) if self._is_outdated else found

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def explain(self, error: BaseException | None) -> None:
        """Let an error of the training's communication name the rank that has ended, and why."""
        if error is not None and self._world.world_size > 1 and is_of_transport(error):
            self._world.fail(error)

    def decide(self, boundary: Boundary, made: object = None) -> Verdict:
        """Decide what happens at a boundary, and remember whether the loop ends.

        Args:
            boundary: what all ranks agree on.
            made: see `see`.
        """
        if self.auto is not None:
            if boundary.has_ended:
                self.auto.ended()
            self.auto.leave(boundary.step)
        self.see(boundary.step, made)
        verdict = decide(
            boundary.step,
            triggers=self._triggers if self.auto is None else with_chosen_cadence(self._triggers, self._every),
            last_saved=self.last_saved,
            secs_since_save=boundary.secs_since_save,
            requests=self._asked,
            is_last=boundary.is_last,
            is_best=boundary.is_best,
        )
        self.stops = self.stops or verdict.stop
        self.is_aborted = self.is_aborted or "abort" in verdict.reasons
        return verdict

    def answered(self) -> None:
        """Drop the requests: they are answered without a save."""
        self._asked = ()

    def see(self, step: int, made: object = None) -> None:
        """Notice a step before one already seen, or the same step made again.

        Args:
            step: optimizer steps done.
            made: an object that is another one when the loop has gone back and made this step again; None if that is not known.
        """
        is_other = made is not None and self._made is not None and made is not self._made
        seen = step + 1 if is_other and step == self._seen else self._seen
        self.last_saved = last_saved_at(step, seen=seen, last_saved=self.last_saved)
        self._seen, self._made = step, made

    def before(self, step: int) -> Before:
        """What to restore if the save of this step, which is about to start, fails."""
        return Before(step, self.last_saved, self._saved_at, self._asked)

    def begun(self, step: int) -> None:
        """Note that this step is saved, or being saved, which answers the requests."""
        self.last_saved, self._saved_at, self._asked = step, time.monotonic(), ()
        self._done = step if self._done is None else max(self._done, step)
        self._is_outdated = True

    def measured(self, step: int, call_secs: float, *, is_durable: bool) -> None:
        """Note how many seconds the call of a save took."""
        if self.auto is not None:
            self.auto.begun(call_secs, is_durable=is_durable)
            self.auto.leave(step)

    def undone(self, before: Before) -> None:
        """Note that the save failed: what it was for is due again."""
        self.last_saved = last_saved_after_failure(self.last_saved, before=before.last_saved, failed=before.step)
        self._saved_at = before.saved_at
        self._asked = merge_requests([self._asked, before.asked])

    def loaded(self, step: int | None) -> None:
        """Note that the run continues from a checkpoint, as another try."""
        self.stops = self.is_aborted = False
        self.last_saved, self._seen, self._saved_at, self._is_outdated = step, step, time.monotonic(), True
        self._done, self._made = step, None


@final
@attrs.frozen
class _at:  # noqa: N801 (used as a function; a generator would cost each boundary more)
    """Give an error of a block the step of the boundary."""

    step: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            place(error, step=self.step)


@contextmanager
def _watched(world: Collectives, find: Callable[[], RanksDisagree | None], late: str = "") -> Iterator[None]:
    """Look again and again, while this rank waits in the block, whether the ranks for which it waits can still come.

    Args:
        world: in which it waits.
        find: returns why they do not.
        late: what to log if that does not show for some time, and to note on the error; empty for nothing.
    """
    found: list[RanksDisagree] = []
    is_over = threading.Event()

    def look() -> None:
        began, is_said = time.monotonic(), not late
        while not is_over.wait(min(_LOOK_SECS, PATIENCE_SECS)):
            reason = find()
            if reason is not None:
                found.append(reason)
                world.fail(reason)  # ends the wait
                return
            if not is_said and time.monotonic() - began >= PATIENCE_SECS:
                _LOG.warning("%s, which some have not reached for %g s", late, PATIENCE_SECS)
                is_said = True

    watch = threading.Thread(target=look, daemon=True, name="trainfold-watch")
    watch.start()
    try:
        yield
    except RankFailed as error:
        if late:
            error.add_note(late)
        if found:
            raise found[0] from error
        raise
    finally:
        is_over.set()
        watch.join()  # it could be the last to hold the group of the ranks, and freeing that while Python shuts down aborts the process
