"""`DisabledManager`: the manager for a run that must not be saved."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import attrs

from trainfold.adapters.flight.pure_steps import B, PureStep, S
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.config import CheckpointConfig
from trainfold.adapters.manager.protocol import LoadDecision, Restored
from trainfold.adapters.manager.triggers import SaveTriggers
from trainfold.adapters.outside.follow import check_follow, take_followers
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.launcher import world_given
from trainfold.core.layout.world import Collectives
from trainfold.core.save.triggers import Verdict, make_triggers
from trainfold.core.state.state import TrainState
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.source import WeightSource


@final
class DisabledManager:
    """A `CheckpointManager` that saves and loads nothing. The loop runs, stops on request and ends as with a real one.

    Args:
        requests: where requests to stop come from; closed with the manager. A request to save is dropped.
        collectives: the ranks, each of which has its own manager and makes the same calls; None for a single process.

    Examples:
        >>> with DisabledManager() as manager:
        ...     print(manager.should_save(TrainState(), is_last=True))
        do not save and stop: the last step
    """

    def __init__(self, *, requests: RequestSource | None = None, collectives: Collectives | None = None) -> None:
        world = world_given(collectives, os.environ, where="DisabledManager.collectives")
        self._world = world
        self._due = SaveTriggers(make_triggers(at_end=False), requests, world)
        self._held = ExitStack()
        if requests is not None:
            self._held.callback(requests.close)

    def __repr__(self) -> str:
        return "DisabledManager(saves and loads nothing)"

    @classmethod
    def from_config(cls, config: CheckpointConfig, **extra: Any) -> "DisabledManager":
        """The same whatever the config says; of ``extra`` it takes ``requests`` and ``collectives``."""
        del config
        return cls(requests=extra.get("requests"), collectives=extra.get("collectives"))

    @property
    def should_stop(self) -> bool:
        """Whether a boundary decided that the loop ends: on request, or because the step was the last."""
        return self._due.stops

    def step(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> None:
        """Save nothing; decide whether the loop ends."""
        if is_last or not (isinstance(run, Live) and run.is_in_window):
            if isinstance(run, Live):
                run.check_counted()
            self.should_save(run, is_last=is_last, is_best=is_best)
            self._due.answered()

    def should_save(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> Verdict:
        """Decide whether the loop ends, from the requests; one decision for all ranks, and never to save."""
        progress = run.progress if isinstance(run, Live) else run.trainer
        step = 0 if progress is None else progress.step
        verdict = self._due.decide(self._due.arrive(step, is_last=is_last, is_best=is_best, has_ended=False))
        self._due.leave(step, has_ended=False, is_saving=False)
        return attrs.evolve(verdict, save=False)

    def finish(self, run: Live | TrainState) -> None:
        """Save nothing."""
        if not self._due.is_aborted:
            self.step(run, is_last=True)

    def save(self, run: Live | TrainState) -> None:
        """Save nothing; drop a request to save."""
        del run
        self._due.answered()

    def recorded(self, step: PureStep[S, B]) -> PureStep[S, B]:
        """The step itself: nothing is recorded."""
        return step

    def wait_staging(self) -> None:
        """Return at once: nothing is being saved."""

    def poll(self) -> None:
        """Return at once: nothing is being saved."""

    def drain(self) -> None:
        """Return at once: nothing is being saved."""

    def close(self) -> None:
        """Release the source of requests; calling it again does nothing."""
        self._held.close()

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """Decide to load nothing."""
        del run
        return LoadDecision(can_load=False, step=step, reason="the manager is disabled")

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Leave the run as it is."""
        del decision
        return self.restore(run) if isinstance(run, Live) else run

    def restore(  # noqa: PLR0913 - those of a manager
        self,
        live: Live,
        *,
        step: int | None = None,
        reset: Mapping[str, str] | None = None,
        in_place: bool = False,
        initial: WeightSource | None = None,
        follow: Sequence[str] = (),
        transform: Transform | None = None,
    ) -> Restored:
        """Leave the run as it is, but for the weights with which it begins."""
        del step, reset, in_place, transform
        if initial is None:
            return Restored("", live.progress.step, is_fresh=True)
        live.check_initial(initial)
        names = check_follow(live, follow, initial, None)
        plan, copies = live.take_initial(initial, self._world, follows=names)
        take_followers(live, names, plan.source, self._world)
        return Restored("", live.progress.step, is_fresh=True, weights=plan.coverage, copies=copies)

    def load_best(self, run: Live | TrainState) -> TrainState | Restored:
        """Leave the run as it is."""
        return self.load(run)

    def __enter__(self) -> "DisabledManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
