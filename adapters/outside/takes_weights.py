"""`TakesWeights`: the part of a live run that takes weights from outside, at each start or where it begins."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from trainfold.adapters.outside.derived_copies import DerivedCopies, warn_of_copies
from trainfold.adapters.outside.fill import fill
from trainfold.adapters.outside.held_masters import HeldMasters
from trainfold.adapters.outside.outside_weights import OutsideWeights
from trainfold.adapters.sharded.dtensor import leaf_of, named_shards, reshard
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.weights.plan import PlannedWeights
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.world import Collectives
from trainfold.core.state.notes import LINEAGE
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.weights.several.lineage import lineage_of, lineage_source
from trainfold.core.weights.source import WeightSource
from trainfold.core.weights.wrapped import check_begins


class TakesWeights:
    """A run that may have a source of weights.

    Attributes:
        outside: what comes from a source, and not from checkpoints; None for nothing.
        began: where the weights that are trained came from: tensor -> source, as far as that is known.
    """

    outside: OutsideWeights | None
    began: Mapping[str, str]

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The attached optimizers, by component."""
        raise NotImplementedError

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The attached modules, the model first."""
        raise NotImplementedError

    def attached(self) -> Mapping[str, Any]:
        """Every attached object, by component."""
        raise NotImplementedError

    def extra_values(self) -> Mapping[str, Any]:
        """The values of the components under ``extra``."""
        raise NotImplementedError

    @property
    def progress(self) -> Progress:
        """The counters."""
        raise NotImplementedError

    def overwrites(self, *, is_over: bool = False) -> None:
        """Note that memory is overwritten from here on, or that all of it was."""
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
        copies = DerivedCopies(self.modules[0], {} if self.progress.step else self.attached(), {})
        self.outside.take(ALONE if collectives is None else collectives)
        masters.refresh()
        copies.refresh()  # a resume loads them after this

    def check_initial(self, source: object) -> None:
        """Raise if this run cannot begin with the weights of a source.

        Raises:
            InvalidArgument: saying why.
        """
        check_begins(source, where="restore", is_outside=self.outside is not None and self.outside.is_whole)

    def take_initial(
        self, source: WeightSource, world: Collectives, *, follows: Sequence[str] = ()
    ) -> tuple[PlannedWeights, tuple[str, ...]]:
        """Begin with the weights of a source: every tensor of the model that checkpoints have. Nothing else changes but masters and copies of the model.

        Args:
            source: of these weights.
            world: the ranks, all of which call.
            follows: components that come from elsewhere afterwards.

        Returns:
            What was decided and done, and the components that are copies of the model and have its new weights. Of other copies the user is warned.

        Raises:
            InvalidState: if the weights cannot be taken so, or the run has steps; nothing was changed. Also for tied tensors that differ, and for what a source
                that does not list supplies in another form: these are seen when they come, and the next two lines hold.
            SourceFailed: if the source failed while it was read.
            HalfRestored: after that, at the next step and the next save.
        """
        if self.progress.step:
            raise InvalidState("restore.initial", expected="a run that begins, at step 0", found=f"one at step {self.progress.step}",
                               fix="call manager.restore(live, initial=...) before the loop")  # fmt: skip
        model, frozen = self.modules[0], frozenset() if self.outside is None else self.outside.frozen
        reshard(model)
        named = named_shards(model)
        params = {name: each.detach() for name, each in named.params.items() if name not in frozen}
        leaves = {name: leaf_of(each, f"model.params[{name!r}]") for name, each in params.items()}
        leaves |= {name: leaf_of(each, f"model.buffers[{name!r}]") for name, each in named.buffers.items()}
        masters = HeldMasters(self.optimizers.values())
        attached = {name: each for name, each in self.attached().items() if name not in follows}
        copies = DerivedCopies(model, attached, self.extra_values())
        plan = fill(leaves, named.ties, source, world, begins=self.overwrites)
        masters.refresh()
        copies.refresh()
        self.overwrites(is_over=True)
        self.began = plan.sources
        warn_of_copies(copies.others, world)
        return plan, copies.followers

    def _outside(self) -> dict[str, Any]:
        found = {} if self.outside is None else self.outside.contract()
        theirs = [] if self.outside is None else self.outside.lineage
        lineage = [*(theirs if isinstance(theirs, list) else []), *lineage_of(self.began)]
        return {**found, LINEAGE: lineage} if lineage else found

    def _with_outside(self, state: TrainState, world: Collectives) -> TrainState:
        """The state to restore, with the weights that no checkpoint has; they are taken now if they were not."""
        if self.outside is None:
            return state
        if not self.outside.is_current:
            self.take_weights(world)
        return self.outside.completed(state)

    def _restored_weights(self, state: TrainState, chosen: Collection[str] | None) -> None:
        """Note where the weights of a restored state came from."""
        if state.model is None or (chosen is not None and "model" not in chosen):
            return
        frozen = frozenset() if self.outside is None else self.outside.frozen
        lineage = state.contract.get(LINEAGE)
        found = {name: lineage_source(lineage, name) for name in (*state.model.params, *state.model.buffers)}
        is_whole = self.outside is not None and self.outside.is_whole
        self.began = {} if is_whole else {name: each for name, each in found.items() if each is not None and name not in frozen}  # fmt: skip
