"""`CheckpointManagerLike`: what trainfold asks of a checkpoint manager, and what its calls answer, so that yours can stand in for ours (O01)."""

from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

import attrs

from trainfold.adapters.live.live import Live
from trainfold.backends.runs.save import SaveResult
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.triggers import Verdict
from trainfold.core.state.state import TrainState

SaveStatus: TypeAlias = Literal["written", "staged", "skipped"]


@final
@attrs.frozen
class SaveOutcome:
    """What a call of `CheckpointManager.save` did (C16).

    Attributes:
        status: ``written``: it is durable. ``staged``: it is being written, and the loop may go on. ``skipped``: another save
            was under way.
        step: the step that was saved.
        result: what was written; None if it is not yet.
    """

    status: SaveStatus
    step: int
    result: SaveResult | None = None


@final
@attrs.frozen
class Restored:
    """What `CheckpointManager.restore`, `load` or `load_best` did to a live run.

    Attributes:
        run: where the run is.
        step: the step that the run goes on from, 0 for a fresh start; or that the weights are of, where only those were loaded.
        is_fresh: whether there was nothing to resume.
    """

    run: str
    step: int
    is_fresh: bool


@attrs.frozen
class LoadDecision:
    """Whether a manager can load a run, from where, and how; true if it can. Prints as a sentence.

    A manager of your own may return a subclass with more in it, and gets it back in `CheckpointManagerLike.load`.

    Attributes:
        can_load: whether there is something to load that can be.
        checkpoint: what will be loaded, such as ``step-00000120``; None where there is nothing.
        step: its step, where that is known.
        source: where it comes from: ``newest``; ``step`` for one asked for; or a word of the manager's own, such as ``peer``.
        how: how it is loaded: ``exact``; ``adapted``, where a policy lets something differ; or a word of the manager's own, such as ``weights only``.
        reason: why it is loaded, or why not, in words.

    Examples:
        >>> print(LoadDecision(can_load=True, checkpoint="step-00000120", step=120))
        load step-00000120 (newest, exact)
        >>> bool(LoadDecision(can_load=False, reason="the run holds no checkpoint"))
        False
    """

    can_load: bool
    checkpoint: str | None = None
    step: int | None = None
    source: str = "newest"
    how: str = "exact"
    reason: str = ""

    def __bool__(self) -> bool:
        return self.can_load

    def __str__(self) -> str:
        what = f"load {self.checkpoint or 'the run'} ({self.source}, {self.how})" if self.can_load else "do not load"
        return f"{what}: {self.reason}" if self.reason else what


def load_decision(outcome: ResumePlan | Refusal, *, step: int | None = None) -> LoadDecision:
    """What a plan to resume, or its refusal, means for a load.

    Args:
        outcome: what ``trainfold.plan`` returned.
        step: the step that was asked for; None for the newest.

    Examples:
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> from trainfold.backends.runs.api import plan
        >>> load_decision(plan(MemoryStore(), like=TrainState())).can_load
        False
    """
    source = "newest" if step is None else "step"
    if isinstance(outcome, Refusal):
        return LoadDecision(
            can_load=False, checkpoint=outcome.checkpoint, step=step, source=source, reason=str(outcome).strip()
        )
    how = "exact" if not outcome.drifts else "adapted"
    told = "; ".join(outcome.warnings)
    return LoadDecision(
        can_load=True, checkpoint=outcome.checkpoint, step=outcome.step, source=source, how=how, reason=told
    )


@runtime_checkable
class CheckpointManagerLike(Protocol):
    """A checkpoint manager. Nothing has to be inherited: a class with these methods is one.

    Every call takes the run, either the attached objects or a state: a manager keeps caches, and never the run itself (O03).
    All ranks make the same calls in the same order. ``isinstance`` looks at the names alone; `create_checkpoint_manager`
    looks at the signatures too.
    """

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """Say whether there is something to load, from where, and how; loads nothing, and changes nothing of the run.

        Args:
            run: what would be loaded into.
            step: an explicit step; None for the newest.
        """

    def should_save(self, run: Live | TrainState, *, is_last: bool = False) -> Verdict:
        """Say what is due at this boundary; a function of the run and of what has been asked for, the same on all ranks.

        Args:
            run: at a boundary.
            is_last: whether the loop ends here by itself.
        """

    def save(self, run: Live | TrainState) -> SaveOutcome | None:
        """Save the run as it is now. Its values may be written to once `wait_staging` has returned.

        Returns:
            What was done; None where nothing was, as by a manager that is disabled.
        """

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Load what was decided, or the newest. A state is returned anew; attached objects are written in place.

        Args:
            run: what to load into; it is unchanged if anything is wrong.
            decision: what `should_load` of this manager returned; None asks for one.
        """

    def poll(self) -> SaveResult | None:
        """What has become durable since the last call, if anything; does not wait, and raises what failed (D05)."""

    def wait_staging(self) -> None:
        """Wait until the run may be changed without changing what is being saved."""

    def close(self) -> None:
        """Wait for what is in flight, and let go of everything; calling it again does nothing (D07)."""
