"""`TrainState`: a training run as one frozen value, made of components."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.errors import InvalidState
from trainfold.core.layout.stage import Stage
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.parent_checkpoint import ParentCheckpoint

Scalar: TypeAlias = int | float | bool | str | bytes | None
_STATIC = {"pytree_node": False}


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class Progress:
    """The trainer component: the progress of the run, in exact Python ints.

    Attributes:
        step: optimizer steps done, which is the index of the next step.
        epoch: finished epochs of data, as counted by a live loop. A pure step does not change it; its epoch is in the data cursor.
        samples: samples consumed, over all ranks; in a live run, as passed to `Live.advance`.
        tokens: the sum of the loss weights (valid tokens), over all ranks.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class ModelState:
    """The model component: parameters and persistent buffers by canonical FQN.

    Attributes:
        params: FQN -> tensor, each tied parameter once, under its first name.
        buffers: FQN -> tensor, without non-persistent buffers.
        ties: (alias, FQN) pairs of parameters that are the same tensor.
    """

    params: Leaves[torch.Tensor]
    buffers: Leaves[torch.Tensor]
    ties: tuple[tuple[str, str], ...] = attrs.field(default=(), metadata=_STATIC)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class ParamGroup:
    """One param group of an optimizer.

    Attributes:
        hyper: hyperparameter -> value, such as ``{"lr": 3e-4, "betas": (0.9, 0.999)}``.
        params: the FQNs of the group, in the optimizer's order.
    """

    hyper: Mapping[str, Any]
    params: tuple[str, ...] = attrs.field(metadata=_STATIC)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class OptimizerState:
    """The optimizer component, keyed by FQN, so that it survives reordering.

    Attributes:
        kind: the class of the optimizer, such as ``"torch.optim.adamw.AdamW"``.
        slots: FQN -> slot -> leaf, such as ``slots["h.0.w"]["exp_avg"]``; as in torch, a parameter that never had a
            gradient has no entry.
        groups: the param groups, with their hyperparameters.
        masters: FQN -> fp32 master copy of a low-precision parameter; None if there are no masters.
        with_grad: the FQNs that had a gradient when a live optimizer was captured. At a boundary the gradient is
            equivalent to zeros: an optimizer steps on zeros, but skips a parameter whose gradient is None.
    """

    kind: str
    slots: Leaves[Mapping[str, Any]]
    groups: tuple[ParamGroup, ...]
    masters: Leaves[torch.Tensor] | None = None
    with_grad: tuple[str, ...] = attrs.field(default=(), metadata=_STATIC)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class OwnOptimizerState:
    """The state of an optimizer that has more state than groups and slots of parameters.

    Attributes:
        base: class, groups, and the slots of parameters; without slots if the class overrides ``state_dict()``.
        own: the result of its own ``state_dict()``, if its class overrides it or a hook changes it; else None.
        loose: entries of ``state`` whose keys are not parameters.
        attributes: plain attributes that changed since the optimizer was attached.
        held: the states of the optimizers in its attributes, by attribute.
    """

    base: OptimizerState
    own: Any = None
    loose: Any = None
    attributes: Any = None
    held: Mapping[str, Any] = attrs.field(factory=dict)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class Opaque:
    """A subtree whose structure belongs to another library, such as a loader's ``state_dict()``.

    It is saved and restored as a whole, and not compared leaf by leaf; its owner checks it.
    """

    value: Any


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class PerRank:
    """A component under ``extra`` of which each rank has its own value, such as a meter or a generator.

    A save stores the value of each rank, or of the first rank of each share of the data, and a load gives each rank its own again. Another number
    of ranks is refused (``per_rank``), unless the value belongs to a share and there are as many shares.

    Attributes:
        value: any tree.
        share: the share of the data that it belongs to; None if it belongs to the rank. Ranks with the same share must have the same value.
        shares: the number of shares.
    """

    value: Any
    share: int | None = attrs.field(default=None, metadata=_STATIC)
    shares: int | None = attrs.field(default=None, metadata=_STATIC)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class OfRankZero:
    """A component under ``extra`` whose value on rank 0 counts, such as a log. The other ranks' values are not compared; a load gives them rank 0's.

    Attributes:
        value: any tree of whole tensors and scalars.
    """

    value: Any


@final
@attrs.frozen(eq=False)
class Origin:
    """The origin of a state. It is not part of the state's value: all origins compare equal.

    Attributes:
        runs: the id of a run -> the checkpoint of that run that the state was loaded from, or saved as.
        adapts: keys of the contract for which a policy prefers the value of the resuming run to that of the checkpoint.
        without: components that the whole has and this selection of it does not; a checkpoint of it lists them as left out.
        outside: components whose values come from outside: a save or load that selects nothing leaves them out.
        frozen: parameters whose values come from outside.
    """

    runs: Mapping[str, ParentCheckpoint] = attrs.field(factory=dict)
    adapts: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen
class TrainState:
    """A training run as a value. An absent component is None.

    Attributes:
        model: parameters and buffers.
        optimizer: the optimizer's slots and hyperparameters, or any tree of a user's own optimizer.
        scheduler: the schedule's description, or a stateful scheduler's state.
        trainer: the counters.
        dataset: the data position, a `DataCursor` or any tree.
        rng: the random key, or the captured streams of a mutable loop.
        extra: user-declared components by name, such as ``{"ema": ...}``.
        contract: settings that a resume must keep, such as ``{"step.accumulate": 4}``. It is not a component. It is saved,
            restored by a resume, and compared by the next step.
        origin: the checkpoint that it descends from, for the manager that saves it; not saved, and equal in all states.
        stage: the stages of a pipeline whose tensors it has, under their names in the whole model; None for a whole model. It is not saved:
            a save puts the stages of all ranks together.
    """

    model: ModelState | None = None
    optimizer: Any = None
    scheduler: Any = None
    trainer: Progress | None = None
    dataset: Any = None
    rng: Any = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    contract: Mapping[str, Any] = attrs.field(factory=dict, metadata=_STATIC, repr=False)
    origin: Origin = attrs.field(factory=Origin, metadata=_STATIC, repr=False, kw_only=True)
    stage: Stage | None = attrs.field(default=None, metadata=_STATIC, repr=False, kw_only=True)

    def evolve(self, **changes: Any) -> "TrainState":
        """Return this state with some components replaced.

        Examples:
            >>> TrainState(trainer=Progress(step=3)).evolve(trainer=Progress(step=4)).trainer.step
            4
        """
        return attrs.evolve(self, **changes)


if TYPE_CHECKING:

    class TrainableState(TrainState):  # type: ignore[misc]  # final at run time: this only narrows types
        """A state that has a model and counters, as returned by `init_state` and steps; type checkers need no assert for them."""

        model: ModelState
        trainer: Progress

        def evolve(self, **changes: Any) -> "TrainableState":  # noqa: D102 (that of `TrainState`)
            ...

else:
    TrainableState = TrainState


def make_progress(*, step: int = 0, epoch: int = 0, samples: int = 0, tokens: int = 0) -> Progress:
    """Return checked counters.

    Raises:
        InvalidState: if a counter is negative or not an int.

    Examples:
        >>> make_progress(step=2, samples=64)
        Progress(step=2, epoch=0, samples=64, tokens=0)
    """
    counters = {"step": step, "epoch": epoch, "samples": samples, "tokens": tokens}
    fix = "count in whole units from 0"
    return Progress(
        **{
            name: count(f"state.trainer.{name}", value, least=0, fix=fix, error=InvalidState)
            for name, value in counters.items()
        }
    )
