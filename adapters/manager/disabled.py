"""`DisabledManager`: the manager of a run that is not to be saved."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.config import CheckpointConfig
from trainfold.adapters.manager.protocol import LoadDecision, Restored
from trainfold.adapters.manager.triggers import Boundary, SaveTriggers
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.launcher import world_given
from trainfold.core.layout.world import Collectives
from trainfold.core.save.triggers import Verdict, make_triggers
from trainfold.core.state.state import TrainState


@final
class DisabledManager:
    """A `CheckpointManager` that saves and loads nothing (O07): the loop around it runs, is asked to stop, and ends as with that.

    Args:
        requests: where requests to stop come from; closed with the manager. One to save is answered by doing nothing.
        collectives: the ranks, each of which has its own manager and makes the same calls; None for a single process.

    Examples:
        >>> with DisabledManager() as manager:
        ...     print(manager.should_save(TrainState(), is_last=True))
        do not save and stop: the last step
    """

    def __init__(self, *, requests: RequestSource | None = None, collectives: Collectives | None = None) -> None:
        world = world_given(collectives, os.environ, where="DisabledManager.collectives")
        self._due = SaveTriggers(make_triggers(at_end=False), requests, world)
        self._held = ExitStack()
        if requests is not None:
            self._held.callback(requests.close)

    @classmethod
    def from_config(cls, config: CheckpointConfig, **extra: Any) -> "DisabledManager":
        """The same whatever the config says; of ``extra`` it takes ``requests`` and ``collectives``."""
        del config
        return cls(requests=extra.get("requests"), collectives=extra.get("collectives"))

    @property
    def should_stop(self) -> bool:
        """Whether a boundary decided that the loop ends: it was asked to, or the step was the last (R01)."""
        return self._due.stops

    def step(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> None:
        """Save nothing; decide whether the loop ends."""
        if is_last or not (isinstance(run, Live) and run.is_in_window):
            if isinstance(run, Live):
                run.check_counted()
            self.should_save(run, is_last=is_last, is_best=is_best)
            self._due.answered()

    def should_save(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> Verdict:
        """Say what has been asked for, and whether the loop ends; one decision for all ranks, never to save."""
        progress = run.progress if isinstance(run, Live) else run.trainer
        mine = Boundary(0 if progress is None else progress.step, is_last=is_last, is_best=is_best, has_ended=True)
        return attrs.evolve(self._due.decide(self._due.agreed(mine)), save=False)

    def finish(self, run: Live | TrainState) -> None:
        """Save nothing; the loop has ended."""
        if not self._due.is_aborted:
            self.step(run, is_last=True)

    def save(self, run: Live | TrainState) -> None:
        """Save nothing; a request to save is answered."""
        del run
        self._due.answered()

    def wait_staging(self) -> None:
        """Nothing is held."""

    def poll(self) -> None:
        """Nothing is under way."""

    def drain(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Let go of the requests; calling it again does nothing (D07)."""
        self._held.close()

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """There is nothing."""
        del run
        return LoadDecision(can_load=False, step=step, reason="the manager is disabled")

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Leave the run as it is."""
        del decision
        return self.restore(run) if isinstance(run, Live) else run

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None) -> Restored:
        """Leave the run as it is."""
        del step, reset
        return Restored("", live.progress.step, is_fresh=True)

    def load_best(self, run: Live | TrainState) -> TrainState | Restored:
        """Leave the run as it is."""
        return self.load(run)

    def __enter__(self) -> "DisabledManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
