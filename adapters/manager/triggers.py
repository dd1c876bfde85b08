"""`SaveTriggers`: what is due at the boundaries of a run: its triggers, what it was asked for, and what was saved last (R01, R02)."""

import time
from typing import final

import attrs

from trainfold.adapters.manager.auto_cadence import AutoCadence
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.core.errors import RanksDisagree
from trainfold.core.layout.world import Collectives
from trainfold.core.save.auto_cadence import FIRST_SAVE_SECS
from trainfold.core.save.requests import StopRequest, merge_requests
from trainfold.core.save.triggers import Triggers, Verdict, decide


@final
@attrs.frozen
class Boundary:
    """What is known at a boundary; what the ranks have agreed on, once `SaveTriggers.agreed` has asked them.

    Attributes:
        step: optimizer steps done.
        is_last: whether the run ends here, on any rank.
        is_best: whether this state is the best so far, as any rank says.
        has_ended: whether the save under way has ended, on every rank.
        secs_since_save: by rank 0's clock.
        every: the cadence that rank 0 has chosen; None where it has chosen none.
    """

    step: int
    is_last: bool
    is_best: bool
    has_ended: bool
    secs_since_save: float = 0.0
    every: int | None = None


@final
@attrs.frozen
class Before:
    """What was known before the save of a step was begun, in case it fails."""

    step: int
    last_saved: int | None
    saved_at: float
    asked: tuple[StopRequest, ...]


@final
class SaveTriggers:
    """Remembers what decides whether to save and to stop; see `trainfold.core.save.triggers.decide`.

    Args:
        triggers: when to save without being asked to.
        requests: where requests come from; None for nowhere.
        world: the ranks.
        auto: chooses a cadence; None where one is given.

    Attributes:
        stops: whether a boundary decided that the loop ends.
        is_aborted: whether it was asked to end without a save.
        auto: what chooses a cadence, or None.
        last_saved: the step of the newest checkpoint, saved or resumed from. Where the loop went back in memory, to before that
            one, it is the step before the one that it was seen at: what is trained again is not saved yet.
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
        every = None if self.auto is None else self.auto.every
        return Boundary(step, is_last, is_best, has_ended, time.monotonic() - self._saved_at, every)

    def agreed(self, mine: Boundary) -> Boundary:
        """Take the requests that have come, and make one boundary of all ranks'; every rank calls.

        Requests are remembered until a save or a verdict that saves nothing has answered them.

        Raises:
            RanksDisagree: if the ranks are at different steps.
            RankFailed: if another rank's source of requests failed, or that failure.
        """
        if self._world.world_size == 1:  # there is nobody to agree with, and this runs at each step
            self._take_requests()
            return mine

        def tell() -> tuple[tuple[StopRequest, ...], Boundary]:
            self._take_requests()
            return self._asked, mine

        told = on_all_ranks(self._world, tell)
        self._asked = merge_requests([asked for asked, _ in told])
        all_of = [each for _, each in told]
        steps = [each.step for each in all_of]
        if len(set(steps)) > 1:
            raise RanksDisagree("the step", expected="the same on every rank", found=f"{steps}, by rank",
                                fix="call the manager at the same boundaries on every rank")  # fmt: skip
        return Boundary(
            mine.step,
            secs_since_save=all_of[0].secs_since_save,
            every=all_of[0].every,
            is_last=any(each.is_last for each in all_of),
            is_best=any(each.is_best for each in all_of),
            has_ended=all(each.has_ended for each in all_of),
        )

    def _take_requests(self) -> None:
        if self._requests is not None:
            self._asked = merge_requests([self._asked, self._requests.take()])

    def decide(self, boundary: Boundary) -> Verdict:
        """What happens at a boundary; what it says of the loop's end is remembered, whoever carries out the rest."""
        self.see(boundary.step)
        verdict = decide(
            boundary.step,
            triggers=self._triggers if self.auto is None else self._chosen(boundary),
            last_saved=self.last_saved,
            secs_since_save=boundary.secs_since_save,
            requests=self._asked,
            is_last=boundary.is_last,
            is_best=boundary.is_best,
        )
        self.stops = self.stops or verdict.stop
        self.is_aborted = self.is_aborted or "abort" in verdict.reasons
        return verdict

    def _chosen(self, boundary: Boundary) -> Triggers:
        """The triggers with the cadence that was chosen; before that the first save is due by the clock."""
        if boundary.every is None:
            return attrs.evolve(self._triggers, every_secs=FIRST_SAVE_SECS)
        return attrs.evolve(self._triggers, every=boundary.every)

    def answered(self) -> None:
        """What was asked for is answered, without a save."""
        self._asked = ()

    def see(self, step: int) -> None:
        """Notice a step that is before one that was seen."""
        has_gone_back = self._seen is not None and step < self._seen
        if has_gone_back and self.last_saved is not None and step <= self.last_saved:
            self.last_saved = step - 1
        self._seen = step

    def before(self, step: int) -> Before:
        """What to put back if the save of a step fails that is about to be begun."""
        return Before(step, self.last_saved, self._saved_at, self._asked)

    def begun(self, step: int) -> None:
        """This step is saved, or being saved, and what was asked for is answered."""
        self.last_saved, self._saved_at, self._asked = step, time.monotonic(), ()

    def undone(self, before: Before) -> None:
        """The save that was begun has failed: what it was for is due again."""
        earlier, now = before.last_saved, self.last_saved
        went_before_it = now is not None and earlier is not None and now < min(earlier, before.step)
        if not went_before_it:
            self.last_saved = earlier
        self._saved_at = before.saved_at
        self._asked = merge_requests([self._asked, before.asked])

    def loaded(self, step: int | None) -> None:
        """The run goes on from a checkpoint: it is another try."""
        self.stops = self.is_aborted = False
        self.last_saved, self._seen, self._saved_at = step, step, time.monotonic()
