"""`OutsideWeights`: the tensors of the attached model that come from a `WeightSource`, and not from checkpoints."""

from typing import Any, Final, final

import attrs
import torch

from trainfold.adapters.components.module import module_state
from trainfold.adapters.outside.fill import fill
from trainfold.adapters.sharded.dtensor import leaf_of, named_shards, reshard
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.json_values import Json
from trainfold.core.layout.stage import Stage
from trainfold.core.layout.world import Collectives
from trainfold.core.state.components import components_of
from trainfold.core.state.fqn import NamedTensors
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, TrainState
from trainfold.core.weights.source import WeightSource
from trainfold.core.weights.wrapped import Frozen

OUTSIDE: Final = "weights.outside"  # the key of the contract: the fingerprint of frozen weights from outside
WHY: Final = "its weights come from outside"


@final
class OutsideWeights:
    """What comes from a source: the whole model, which then is in no checkpoint, or its frozen parameters.

    Args:
        source: as given to `attach`.
        model: the module.
        stage: of a pipeline, that the module is; None for a whole model.

    Attributes:
        is_whole: whether no tensor of the model is in a checkpoint.
        lineage: where what was taken last came from; None before.

    Raises:
        InvalidArgument: for something else than a source, or a model without frozen parameters where only they are meant.
    """

    def __init__(self, source: Any, model: torch.nn.Module, stage: Stage | None = None) -> None:
        if not isinstance(source, WeightSource):
            raise InvalidArgument(
                "attach.weights",
                expected="a WeightSource: an object with supply(wanted)",
                found=type(source).__qualname__,
                fix="pass one of trainfold.weights, such as trainfold.weights.CheckpointWeights(run)",
            )
        self.is_whole = not isinstance(source, Frozen)
        self._model, self._stage = model, stage
        self._is_taken = False  # whether the source has supplied all
        self._has_trained = False  # since then
        self._source: WeightSource = source.source if isinstance(source, Frozen) else source
        self._fingerprint: str | None = None
        self.lineage: Json = None
        params = named_shards(model).params
        self._frozen = frozenset(name for name, each in params.items() if not each.requires_grad)
        if not self.is_whole and not self._frozen:
            raise InvalidArgument(
                "attach.weights",
                expected="a model with frozen parameters",
                found="none without requires_grad",
                fix="freeze them before attach, or pass the source without trainfold.weights.Frozen(...)",
            )

    def contract(self) -> dict[str, str]:
        """The fingerprint of frozen weights, once they are known."""
        return {} if self._fingerprint is None else {OUTSIDE: self._fingerprint}

    def stepped(self, where: str) -> None:
        """Note a step: weights that are trained are no longer those of the source.

        Raises:
            InvalidState: if nothing was supplied yet.
        """
        self.check_taken(where)
        self._has_trained = self.is_whole

    @property
    def is_current(self) -> bool:
        """Whether the model has what the source has supplied."""
        return self._is_taken and not self._has_trained

    def check_taken(self, where: str) -> None:
        """Raise if nothing was supplied yet.

        Raises:
            InvalidState: with the call that was forgotten.
        """
        if not self._is_taken:
            raise InvalidState(
                where,
                expected=f"weights from {self._source!r}",
                found="none: the source was not asked yet",
                fix="call manager.restore(live) before the loop, or live.take_weights() without a manager",
            )

    def parts(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The tensors of the model now, this rank's part of each by its first name: what is trained, frozen parameters, and buffers."""
        named = named_shards(self._model)
        params = {name: leaf_of(each.detach(), f"model.params[{name!r}]") for name, each in named.params.items()}
        trained = {name: each for name, each in params.items() if named.params[name].requires_grad}
        frozen = {name: each for name, each in params.items() if name not in trained}
        return (
            trained,
            frozen,
            {name: leaf_of(each, f"model.buffers[{name!r}]") for name, each in named.buffers.items()},
        )

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that come from the source; none if all do."""
        return frozenset() if self.is_whole else self._frozen

    def take(self, world: Collectives) -> None:
        """Write what the source supplies into the model; every rank calls, and a failure on one is raised on all.

        Raises:
            InvalidState: for a tensor that is missing, that was not asked for, or has another dtype or shape.
        """
        reshard(self._model)
        named = named_shards(self._model)
        leaves = self._leaves(named)
        self._is_taken = False
        self.lineage = fill(leaves, named.ties, self._source, world).lineage
        if not self.is_whole:
            params = ModelState(params=Leaves(leaves), buffers=Leaves())
            sums = content_fingerprint(TrainState(model=params, stage=self._stage), collectives=world)
            self._fingerprint = sums["model"]
        self._is_taken, self._has_trained = True, False

    def _leaves(self, named: NamedTensors) -> dict[str, Any]:
        """What is wanted: this rank's part of each tensor, by its first name."""
        found = {
            name: leaf_of(each.detach(), f"model.params[{name!r}]")
            for name, each in named.params.items()
            if self.is_whole or name in self._frozen
        }
        if self.is_whole:
            found |= {name: leaf_of(each, f"model.buffers[{name!r}]") for name, each in named.buffers.items()}
        return found

    # --- for a manager -----------------------------------------------------------------------------------------------

    def saved(self, state: TrainState, names: tuple[str, ...] | None) -> tuple[TrainState, tuple[str, ...] | None]:
        """What of a captured state goes into a checkpoint, and the names of its components.

        Raises:
            InvalidState: if a parameter was unfrozen whose values would be lost.
        """
        self.check_taken("save")
        self._check_frozen()
        if self.is_whole:
            return state, tuple(name for name in names or components_of(state) if name != "model")
        return self.without(state), names

    def _check_frozen(self) -> None:
        """Raise if a parameter is trained now whose values would be in no checkpoint.

        Raises:
            InvalidState: naming it.
        """
        params = {} if self.is_whole else named_shards(self._model).params
        trained = next((name for name in self._frozen if name in params and params[name].requires_grad), None)
        if trained is not None:
            raise InvalidState(
                f"model.params[{trained!r}]",
                expected="a frozen parameter: its values come from outside, and no checkpoint has them",
                found="requires_grad=True",
                fix="freeze it again; or attach the model as it is trained now, so that it is saved",
            )

    def without(self, state: TrainState) -> TrainState:
        """The state without the frozen weights; the same if none of its model is in checkpoints."""
        if self.is_whole or state.model is None:
            return state
        model = state.model
        params = {name: each for name, each in model.params.items() if name not in self._frozen}
        ties = tuple((alias, name) for alias, name in model.ties if name not in self._frozen)
        return state.evolve(model=attrs.evolve(model, params=Leaves(params), ties=ties))

    def completed(self, state: TrainState) -> TrainState:
        """The state with the live tensors that no checkpoint has; the same if it has a value for each."""
        own = module_state(named_shards(self._model))
        if self.is_whole:
            return state.evolve(model=own) if state.model is None else state
        if state.model is None or own.params.keys() <= state.model.params.keys():
            return state
        params = {name: state.model.params.get(name, each) for name, each in own.params.items()}
        extra = {name: each for name, each in state.model.params.items() if name not in params}
        return state.evolve(model=attrs.evolve(state.model, params=Leaves({**params, **extra}), ties=own.ties))

    def resets(self) -> dict[str, str]:
        """The components that no load touches, with the reason."""
        return {"model": WHY} if self.is_whole else {}
