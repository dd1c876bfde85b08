"""`DisabledManager`: the manager of a run that is not to be saved."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

from trainfold.adapters.live import Live
from trainfold.adapters.manager_config import CheckpointConfig
from trainfold.adapters.manager_like import LoadDecision
from trainfold.adapters.outcomes import Restored
from trainfold.core.save_due import Verdict
from trainfold.core.state import TrainState


@final
class DisabledManager:
    """A manager that does nothing, for runs that are not to be saved (O07)."""

    should_stop = False

    @classmethod
    def from_config(cls, config: CheckpointConfig, **extra: Any) -> "DisabledManager":
        """The same whatever the config says."""
        del config, extra
        return cls()

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """There is nothing."""
        del run
        return LoadDecision(can_load=False, step=step, reason="the manager is disabled")

    def should_save(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> Verdict:
        """Nothing is due."""
        del run, is_best
        return Verdict(save=False, stop=is_last)

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Leave the run as it is."""
        del decision
        return self.restore(run) if isinstance(run, Live) else run

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None) -> Restored:
        """Leave the run as it is."""
        del step, reset
        return Restored("", live.progress.step, is_fresh=True)

    def step(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> None:
        """Save nothing."""

    def save(self, run: Live | TrainState) -> None:
        """Save nothing."""

    def finish(self, run: Live | TrainState) -> None:
        """Save nothing."""

    def poll(self) -> None:
        """Nothing is under way."""

    def drain(self) -> None:
        """Nothing is under way."""

    def wait_staging(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Hold nothing."""

    def __enter__(self) -> "DisabledManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
