"""`Resumer`: loads a run's checkpoints into a live run or a state, as its manager was told to."""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.adapters.live import Live
from trainfold.adapters.manager_like import LoadDecision, load_decision
from trainfold.backends.protocols import Store
from trainfold.backends.run_load import Quarantine, load_run, plan_run
from trainfold.core.components import validate_components
from trainfold.core.request import make_request
from trainfold.core.state import TrainState
from trainfold.core.world import Collectives


@final
@attrs.frozen(eq=False)
class Resumer:
    """What a manager knows of resuming.

    Attributes:
        store: the run, whose lock is held.
        collectives: the ranks.
        components: which components are restored; None for all.
        policy: what to do about each kind of difference.
        contract: what must be equal, beside what the run says itself.
    """

    store: Store
    collectives: Collectives
    components: tuple[str, ...] | None
    policy: Mapping[str, str] | None
    contract: Mapping[str, Any]

    def decide(self, run: Live | TrainState, *, step: int | None) -> LoadDecision:
        """Say whether there is something to resume; loads nothing."""
        names, like = self._like(run)
        request = make_request(step=step, components=names, policy=self.policy)
        outcome = plan_run(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives)
        mine = load_decision(outcome, step=step)
        return next((each for each in self.collectives.gather(mine) if not each), mine)

    def load(self, run: Live | TrainState, *, step: int | None, reset: Mapping[str, str] | None) -> TrainState:
        """Load, and write into a live run.

        Raises:
            ResumeRefused: with every reason why a resume would not be exact, or if there is nothing.
            RestoreRefused: if the live objects cannot take the state.
        """
        names, like = self._like(run)
        request = make_request(step=step, components=names, policy=self.policy, reset=reset)
        state = load_run(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives,
                         quarantine=Quarantine())  # fmt: skip
        if isinstance(run, Live):
            run.restore(state, components=names)
        return state

    def _like(self, run: Live | TrainState) -> tuple[tuple[str, ...] | None, TrainState]:
        """The components to load, and the state to load them for."""
        if isinstance(run, TrainState):
            return self.components, run
        captured = run.capture()
        extra = {name: value for name, value in captured.extra.items() if name not in run.pending}  # owed to nobody yet
        return validate_components(self.components, declared=run.names), captured.evolve(extra=extra)
