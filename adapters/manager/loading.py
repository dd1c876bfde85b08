"""`RunLoader`: loads a run's checkpoints into a live run or a state, as its manager was told to."""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.adapters.live.optional import left_out
from trainfold.adapters.manager.protocol import LoadDecision, load_decision
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.best_reader import measured_best
from trainfold.backends.runs.load import Loaded, Quarantine, load_run, plan_run
from trainfold.backends.runs.snapshot import describe_state, prove_alike
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import InvalidState, Refused, ResumeRefused
from trainfold.core.format.file_names import step_of
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.drift import Drift, DriftAction
from trainfold.core.resume.request import resume_request
from trainfold.core.state.audit import component_of
from trainfold.core.state.components import validate_components
from trainfold.core.state.descent import Descent
from trainfold.core.state.state import TrainState


@final
@attrs.define(eq=False)
class RunLoader:
    """What a manager knows of resuming.

    Attributes:
        store: the run, whose lock is held.
        collectives: the ranks.
        components: which components are restored; None for all.
        policy: what to do about each kind of difference.
        contract: what must be equal, beside what the run says itself.
        proves: whether the ranks compare what a restore has made (B06).
        descent: what was loaded last, the same on every rank: what the state that is in memory now descends from. None before
            the first load that succeeded. The weights of the best alone do not change it.
    """

    store: Store
    collectives: Collectives
    components: tuple[str, ...] | None
    policy: Mapping[str, DriftAction] | None
    contract: Mapping[str, Any]
    proves: bool = attrs.field(default=False, kw_only=True)
    descent: Descent | None = attrs.field(default=None, init=False)

    def decide(self, run: Live | TrainState, *, step: int | None) -> LoadDecision:
        """Say whether there is something to resume; loads nothing."""
        names, like = self._like(run)
        request = resume_request(step=step, components=names, policy=self.policy)
        outcome = plan_run(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives)
        mine = load_decision(outcome, step=step)
        return next((each for each in self.collectives.gather(mine) if not each), mine)

    def load(self, run: Live | TrainState, *, step: int | None, reset: Mapping[str, str] | None) -> TrainState:
        """Load, and write into a live run.

        Raises:
            ResumeRefused: with every reason why a resume would not be exact, or if there is nothing.
            RestoreRefused: if the live objects cannot take the state.
            RankFailed: if those of another rank cannot, which is named (B07).
        """
        names, like = self._like(run)
        try:
            loaded = self._loaded(like, names, step, reset)
        except ResumeRefused as refused:
            owing = _optional_alone(refused.refusal, run.optional if isinstance(run, Live) else frozenset())
            if not owing:
                raise
            for name in owing:
                left_out(name, f"cannot be restored: {refused.refusal.reasons[0]}")
            loaded = self._loaded(like, names, step, {**(reset or {}), **dict.fromkeys(owing, "it is optional")})
        if isinstance(run, Live):
            on_all_ranks(self.collectives, lambda: run.restore(loaded.state, components=names, policy=self.policy))
            if self.proves and self.collectives.world_size > 1:
                prove_alike(lambda: describe_state(run.capture(), components=names), self.collectives)
        self.descent = loaded.descent
        return loaded.state

    def _loaded(
        self, like: TrainState, names: tuple[str, ...] | None, step: int | None, reset: Mapping[str, str] | None
    ) -> Loaded:
        request = resume_request(step=step, components=names, policy=self.policy, reset=reset)
        return load_run(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives,
                        quarantine=Quarantine())  # fmt: skip

    def load_best(self, run: Live | TrainState) -> tuple[TrainState, int]:
        """Load the model of the checkpoint that ``best.json`` names, and nothing else; the state, and the best's step.

        Raises:
            InvalidState: if the run has no best, or a rewind has left it behind, or replaced it.
        """
        name = on_rank_zero(self.collectives, lambda: measured_best(self.store))
        if name is None:
            raise InvalidState(
                f"{self.store.url}/best.json", expected="a best", found="none", fix="save_best comes first"
            )
        _, like = self._like(run)
        step = step_of(name)
        assert step is not None  # the name was made of it
        request = resume_request(step=step, components=["model"], policy=self.policy)
        state = load_run(
            self.store, like=like, request=request, contract=self.contract, collectives=self.collectives
        ).state
        if isinstance(run, Live):
            on_all_ranks(self.collectives, lambda: run.restore(state, components=["model"]))
        return state, step

    def _like(self, run: Live | TrainState) -> tuple[tuple[str, ...] | None, TrainState]:
        """The components to load, and the state to load them for."""
        if isinstance(run, TrainState):
            return self.components, run
        run.will_save(self.components)
        captured = run.capture()
        # What is pending, and its settings, this run does not want yet: `register` compares them.
        extra = {name: value for name, value in captured.extra.items() if name not in run.pending}
        theirs = tuple(f"attached.{name}." for name in run.pending)
        contract = {key: value for key, value in captured.contract.items() if not key.startswith(theirs)}
        return validate_components(self.components, declared=run.names), captured.evolve(extra=extra, contract=contract)


def _optional_alone(refusal: Refused, optional: frozenset[str]) -> list[str]:
    """The optional components that a refusal is about; empty where there is another reason as well (B07)."""
    names = [component_of(each.where) if isinstance(each, Drift) else "" for each in refusal.reasons]
    return sorted(set(names)) if set(names) <= optional else []
