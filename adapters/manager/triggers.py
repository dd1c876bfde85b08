"""`SaveTriggers`: decides what is due at the boundaries of a run; `AutoCadence`: the cadence of ``every="auto"``, chosen from measurements."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

import attrs

from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.event_log import EventLog
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.core.layout.world import Collectives
from trainfold.core.save.auto_cadence import choose_cadence, describe_cadence
from trainfold.core.save.requests import StopRequest, merge_requests
from trainfold.core.save.triggers import (
    Boundary,
    Triggers,
    Verdict,
    agreed_boundary,
    decide,
    last_saved_after_failure,
    last_saved_at,
    with_chosen_cadence,
)

_REMEMBERED: Final = 64


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

    Args:
        triggers: when to save without a request.
        requests: where requests come from; None for nowhere.
        world: the ranks.
        auto: chooses the cadence; None if one is given.

    Attributes:
        stops: whether a boundary decided that the loop ends.
        is_aborted: whether a request ended the loop without a save.
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

    def here(self, step: int, *, is_last: bool, is_best: bool, has_ended: bool) -> Boundary:
        """A boundary as this rank knows it."""
        if self.auto is not None:
            self.auto.arrive(step)
        every = None if self.auto is None else self.auto.every
        return Boundary(step, is_last, is_best, has_ended, time.monotonic() - self._saved_at, every)

    def agreed(self, mine: Boundary) -> Boundary:
        """Take the requests that have come, and merge the boundaries of all ranks; every rank calls.

        Requests are remembered until a save answers them, or a decision not to save does.

        Raises:
            RanksDisagree: if the ranks are at different steps.
            RankFailed: if another rank's source of requests failed; on that rank, its own exception.
        """
        if self._world.world_size == 1:  # this runs at each step
            self._take_requests()
            return mine

        def take() -> tuple[tuple[StopRequest, ...], Boundary]:
            self._take_requests()
            return self._asked, mine

        found = on_all_ranks(self._world, take)
        self._asked = merge_requests([asked for asked, _ in found])
        return agreed_boundary([each for _, each in found])

    def _take_requests(self) -> None:
        if self._requests is not None:
            self._asked = merge_requests([self._asked, self._requests.take()])

    def decide(self, boundary: Boundary) -> Verdict:
        """Decide what happens at a boundary, and remember whether the loop ends."""
        if self.auto is not None:
            if boundary.has_ended:
                self.auto.ended()
            self.auto.leave(boundary.step)
        self.see(boundary.step)
        verdict = decide(
            boundary.step,
            triggers=self._triggers if self.auto is None else with_chosen_cadence(self._triggers, boundary.every),
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

    def see(self, step: int) -> None:
        """Notice a step before one already seen."""
        self.last_saved = last_saved_at(step, seen=self._seen, last_saved=self.last_saved)
        self._seen = step

    def before(self, step: int) -> Before:
        """What to restore if the save of this step, which is about to start, fails."""
        return Before(step, self.last_saved, self._saved_at, self._asked)

    def begun(self, step: int) -> None:
        """Note that this step is saved, or being saved, which answers the requests."""
        self.last_saved, self._saved_at, self._asked = step, time.monotonic(), ()

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
        self.last_saved, self._seen, self._saved_at = step, step, time.monotonic()
