"""`CheckpointManagerLike`: the protocol of a checkpoint manager, and what its calls return, so that yours can replace ours."""

from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

import attrs

from trainfold.adapters.live.live import Live
from trainfold.backends.runs.commit import SaveResult
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.triggers import Verdict
from trainfold.core.state.state import TrainState
from trainfold.core.weights.several.cover import Coverage

SaveStatus: TypeAlias = Literal["written", "staged", "skipped"]


@final
@attrs.frozen
class SaveOutcome:
    """What a call of `CheckpointManager.save` did.

    Attributes:
        status: ``written``: it is durable. ``staged``: it is being written while the loop continues. ``skipped``: another save was under
            way.
        step: the step of the run.
        result: what was written; None if it is not written yet.
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
        step: the step that the run continues from, 0 for a fresh start; or the step of the weights, if only those were loaded.
        is_fresh: whether there was nothing to resume.
        weights: which source each tensor came from, if a fresh start has taken ``initial``; else None.
        ignored: what was offered and not taken, with the reason.
        copies: the components that were copies of the model, and have its new weights too, such as an average.

    Examples:
        >>> print(Restored("runs/a", 120, is_fresh=False, ignored=("HubDirectory('base'): the run has checkpoints of its own",)))
        runs/a: resumed at step 120
        ignored  HubDirectory('base'): the run has checkpoints of its own
    """

    run: str
    step: int
    is_fresh: bool
    weights: Coverage | None = None
    ignored: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = (
            f"resumed at step {self.step}" if not self.is_fresh else "fresh" if self.weights is None else "begins with"
        )
        taken = [] if self.weights is None else [f"weights  {each}" for each in str(self.weights).splitlines()]
        copies = [f"copy     {each}: it was one of the model, and has these weights too" for each in self.copies]
        return "\n".join([f"{self.run}: {how}", *taken, *copies, *(f"ignored  {each}" for each in self.ignored)])


@attrs.frozen
class LoadDecision:
    """Whether a manager can load a run, from where, and how; true if it can. Prints as a sentence.

    Your manager may return a subclass with more fields, and gets it back in `CheckpointManagerLike.load`.

    Attributes:
        can_load: whether there is something that can be loaded.
        checkpoint: what would be loaded, such as ``step-00000120``; None if there is nothing.
        step: its step, if that is known.
        source: where it comes from: ``newest``; ``step`` for an explicit step; or a word of your manager, such as ``peer``.
        how: how it is loaded: ``exact``; ``adapted``, if a policy lets something differ; or a word of your manager, such as ``weights only``.
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
    """The decision that a plan to resume, or its refusal, leads to.

    Args:
        outcome: what ``trainfold.plan`` returned.
        step: the explicit step; None for the newest.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import plan
        >>> load_decision(plan(MemoryStore(), like=TrainState())).can_load
        False
    """
    source = "newest" if step is None else "step"
    if isinstance(outcome, Refusal):
        return LoadDecision(
            can_load=False, checkpoint=outcome.checkpoint, step=step, source=source, reason=str(outcome).strip()
        )
    how = "exact" if not outcome.drifts else "adapted"
    reason = "; ".join(outcome.warnings)
    return LoadDecision(
        can_load=True, checkpoint=outcome.checkpoint, step=outcome.step, source=source, how=how, reason=reason
    )


@runtime_checkable
class CheckpointManagerLike(Protocol):
    """A checkpoint manager: any class with these methods, which need not inherit from anything.

    Every call takes the run, either the attached objects or a state. A manager may keep caches, but never the run itself.
    All ranks make the same calls in the same order. ``isinstance`` checks only the names of the methods; `create_checkpoint_manager`
    checks the signatures too.
    """

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """Decide whether there is something to load, from where, and how; load nothing, and do not change the run.

        Args:
            run: what would be loaded into.
            step: an explicit step; None for the newest.
        """

    def should_save(self, run: Live | TrainState, *, is_last: bool = False) -> Verdict:
        """Decide what is due at this boundary, from the run and the requests alone; the same on all ranks.

        Args:
            run: at a boundary.
            is_last: whether the loop ends here without a request.
        """

    def save(self, run: Live | TrainState) -> SaveOutcome | None:
        """Save the run as it is now. Its values may be written to once `wait_staging` has returned.

        Returns:
            What was done; None if nothing was, as by a disabled manager.
        """

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Load what was decided, or the newest: return a new state, or write attached objects in place.

        Args:
            run: what to load into; it is unchanged if anything is wrong.
            decision: what `should_load` of this manager returned; None to decide here.
        """

    def poll(self) -> SaveResult | None:
        """Return what has become durable since the last call, if anything, or raise what failed; do not wait."""

    def wait_staging(self) -> None:
        """Wait until writes to the run no longer change what is being saved."""

    def close(self) -> None:
        """Wait for what is under way, and release everything; calling it again does nothing."""
