"""`TakesWeights`: the part of a live run that takes weights from outside."""

from collections.abc import Mapping

import torch

from trainfold.adapters.outside.held_masters import HeldMasters
from trainfold.adapters.outside.outside_weights import OutsideWeights
from trainfold.backends.ranks.in_process import ALONE
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import TrainState


class TakesWeights:
    """A run that may have a source of weights.

    Attributes:
        outside: what comes from a source, and not from checkpoints; None for nothing.
    """

    outside: OutsideWeights | None

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The attached optimizers, by component."""
        raise NotImplementedError

    def take_weights(self, collectives: Collectives | None = None) -> None:
        """Write the weights of the source that was given to `attach` into the model; `CheckpointManager.restore` does it.

        Args:
            collectives: the ranks, all of which call. None for this process alone.

        Raises:
            InvalidState: if a tensor is missing, was not asked for, or has another shape or dtype: nothing trains then. On the other ranks it is `RankFailed`.
            InvalidArgument: if `attach` got no source.
        """
        if self.outside is None:
            raise InvalidArgument("live.take_weights", expected="a source of weights", found="none",
                                  fix="pass it to attach(..., weights=...)")  # fmt: skip
        masters = HeldMasters(self.optimizers.values())
        self.outside.take(ALONE if collectives is None else collectives)
        masters.refresh()

    def _outside(self) -> dict[str, str]:
        return {} if self.outside is None else self.outside.contract()

    def _with_outside(self, state: TrainState, world: Collectives) -> TrainState:
        """The state to restore, with the weights that no checkpoint has; they are taken now if they were not."""
        if self.outside is None:
            return state
        if not self.outside.is_current:
            self.take_weights(world)
        return self.outside.completed(state)
