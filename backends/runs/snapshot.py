"""`Snapshot`: the state of a save. Everything but the values of its tensors is copied."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import Any, final

import attrs
import numpy as np
import torch

from trainfold.backends.environment import environment_of
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.hold.write_watch import LeafName
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.runs.alike.replicas import check_copies, copies_of, replicated
from trainfold.core.checks import mapping_given
from trainfold.core.component_names import in_order, torn_pairs
from trainfold.core.data.batches_read import BatchesRead
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.codec import DENSE, as_tensor
from trainfold.core.format.structure.describe import Describe, describe
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.ownership import without_value
from trainfold.core.json_values import Json, shown
from trainfold.core.layout.stage import Stage
from trainfold.core.layout.world import Collectives
from trainfold.core.optim.slot_layout import check_layouts
from trainfold.core.save.replicas import Leaves, Proof, summary
from trainfold.core.state.components import all_of, components_of, names_to_save, select
from trainfold.core.state.contract import checked_contract, contract_of, is_of_live_run
from trainfold.core.state.state import ModelState, OptimizerState, TrainState


@final
@attrs.frozen(eq=False)
class Snapshot:
    """The state of a save. Everything but the values of its tensors is copied, so only those values can still change.

    Attributes:
        step: the step of the state.
        described: component -> its structure, scalars included, and the specs of its tensors.
        tensors: component -> leaf path -> the tensor leaf itself, with its values.
        omitted: components that the run has and that the selection leaves out.
        contract: what must be equal at a resume.
        own: components whose tensors belong to the snapshot alone.
        copies: component -> leaf path -> the digest of a tensor that must be equal on all ranks; None before the tensors were read.
        optional: components that are left out if not all ranks have them.
        left_out: those that this rank cannot save, each with the reason.
        sent: leaf path -> what sends it to the other ranks before it is used, so that the value of rank 0 is saved.
        stage: the stages of a pipeline whose leaves it has; None for a whole model.
        read: what this rank has read last, to be compared with the other ranks; None if it is not known, or was compared.
        settings: component -> the settings of its object that ranks must have alike; those of stages under their names, from `of_stages`.
    """

    step: int
    described: Mapping[str, Described]
    tensors: Mapping[str, Mapping[str, Any]]
    omitted: tuple[str, ...]
    contract: Mapping[str, Json]
    own: frozenset[str] = frozenset()
    copies: Leaves | None = None
    optional: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    sent: Mapping[str, str] = attrs.field(factory=dict)
    stage: Stage | None = None
    read: BatchesRead | None = None
    settings: Mapping[str, Mapping[str, Json]] = attrs.field(factory=dict)

    def named(self) -> dict[LeafName, torch.Tensor]:
        """Every tensor by component and path, dense; an array shares its memory."""
        found: dict[LeafName, torch.Tensor] = {}
        for component, leaves in self.tensors.items():
            names, tensors = zip(repeat(component), leaves), leaves.values()
            if set(map(type, tensors)) <= DENSE:  # nearly all of them
                found.update(zip(names, tensors, strict=False))
            else:
                found.update(zip(names, map(as_tensor, tensors, leaves), strict=False))
        return found

    def with_own(self, name: str, component: Any, *, is_saved: bool) -> "Snapshot":
        """The snapshot with one more component, made for this snapshot and owned by it alone.

        Args:
            name: a name that the snapshot does not have yet.
            component: the tree.
            is_saved: False to list the component as omitted only.

        Raises:
            UnsupportedLeaf: for a leaf that the format cannot hold.
        """
        if not is_saved:
            return attrs.evolve(self, omitted=tuple(in_order((*self.omitted, name))))
        described, tensors = describe(component, name)
        every = {**self.described, name: described}
        return attrs.evolve(
            self,
            described={each: every[each] for each in in_order(every)},
            tensors={**self.tensors, name: tensors},
            own=self.own | {name},
        )

    def with_copies(self, proof: Proof) -> "Snapshot":
        """The snapshot with digests of what must be equal on all ranks. This reads the tensors.

        Args:
            proof: how much is compared.
        """
        return attrs.evolve(self, copies=copies_of(self.replicated(), proof=proof))

    def replicated(self) -> dict[str, dict[str, Any]]:
        """Every tensor that must be equal on several ranks, by name and path."""
        return replicated(self.described, self.tensors, sent=self.sent, stage=self.stage)

    def summary(self) -> dict[str, str]:
        """The digests by which ranks compare what must be equal on all of them; stages have contracts of their own, which are put together."""
        found = summary(self.copies or {}, self.contract, self.settings)
        if self.stage is not None:
            del found["contract"]
        return found

    def without(self, names: Collection[str]) -> "Snapshot":
        """The snapshot without these components."""
        described = {name: each for name, each in self.described.items() if name not in names}
        tensors = {name: each for name, each in self.tensors.items() if name not in names}
        copies = {name: each for name, each in (self.copies or {}).items() if name not in names}
        return attrs.evolve(self, described=described, tensors=tensors, copies=None if self.copies is None else copies)

    def stored_elsewhere(self, names: Collection[str]) -> "Snapshot":
        """The snapshot without the values of these components of a share, which another rank stores."""
        bare = {name: Described(without_value(self.described[name].node), {}) for name in names}
        return attrs.evolve(
            self, described={**self.described, **bare}, tensors={**self.tensors, **{name: {} for name in names}}
        )

    def arrays(self) -> set[LeafName]:
        """The names of NumPy arrays; writes to them cannot be detected."""
        return {
            (component, path)
            for component, leaves in self.tensors.items()
            if not set(map(type, leaves.values())) <= DENSE
            for path, leaf in leaves.items()
            if isinstance(leaf, np.ndarray)
        }


@without_collecting
def describe_state(
    state: TrainState,
    *,
    components: Sequence[str] | None = None,
    contract: Mapping[str, Any] | None = None,
    describe: Describe = describe,
) -> Snapshot:
    """Describe a state without reading the values of its tensors.

    Args:
        state: any state with a trainer component.
        components: what to save; None for all that does not come from outside.
        contract: what must be equal at a resume, in addition to the contract of the state.
        describe: the method of a `Describer`, if one run is described repeatedly.

    Raises:
        InvalidState: if the state has no trainer component, and so no step; or an optimizer and no weights, although no selection leaves them out.
        InvalidArgument: if it is not a state, or if ``components``, or the `select` that made the state, has an optimizer without its scheduler, or the
            other way round.
        UnknownComponent: for an unknown name.
        UnsupportedLeaf: for a leaf that the format cannot hold, or a slot that would be loaded in another memory layout.
        StateDonated: if a donating step has consumed the state.

    Examples:
        >>> from trainfold import Progress
        >>> describe_state(TrainState(trainer=Progress(step=3))).step
        3
    """
    check_state(state, "state")
    step = step_of_state(state)
    if isinstance(state.optimizer, OptimizerState) and state.model is not None and not is_of_live_run(state):
        check_layouts(state.optimizer, state.model.params)
    components = names_to_save(state, components)
    every, chosen = all_of(state), components_of(select(state, components))
    for torn in torn_pairs(chosen, present=every):
        raise torn
    omitted = tuple(name for name in every if name not in chosen)
    if components is not None and "model" not in {*components, *every} and "optimizer" in every:
        omitted = ("model", *omitted)  # meant by the caller, although the state has none to leave out
    _check_has_weights(chosen, is_meant=components is not None and "model" in omitted)
    pairs = {name: describe(component, name) for name, component in chosen.items()}
    return Snapshot(
        step=step,
        described={name: described for name, (described, _) in pairs.items()},
        tensors={name: tensors for name, (_, tensors) in pairs.items()},
        omitted=omitted,
        contract=full_contract(state, contract),
        stage=state.stage,
    )


def _check_has_weights(chosen: Mapping[str, Any], *, is_meant: bool) -> None:
    """Raise for what would be a checkpoint without weights and without a mark of that.

    Raises:
        InvalidState: naming the component.
    """
    weights = any(isinstance(each, ModelState) for each in chosen.values())
    if isinstance(chosen.get("optimizer"), OptimizerState) and not weights and not is_meant:
        raise InvalidState(
            "state.model",
            expected="the weights that the optimizer trains, or components= without model",
            found="none",
            fix="save the whole state; if the weights come from elsewhere on purpose, pass save(..., components=[...]), which records it, and not a selection "
            "of the state",
        )


def full_contract(state: TrainState, contract: Mapping[str, Any] | None) -> dict[str, Json]:
    """Everything that must be equal at a resume: the environment, the state's contract, the caller's contract. Later entries win."""
    given = {**environment_of(state), **contract_of(state), **mapping_given("contract", contract)}
    return checked_contract(given)


def prove_alike(take: Callable[[], Snapshot], collectives: Collectives) -> None:
    """Compare everything that must be equal on all ranks; every rank calls.

    Raises:
        RanksDisagree: on every rank, naming the first leaf that differs.
    """
    mine: list[Snapshot] = []

    def digested() -> Mapping[str, str]:
        mine.append(take().with_copies(Proof()))
        return mine[0].summary()

    summaries = on_all_ranks(collectives, digested, doing="compare what it has restored")
    check_copies(mine[0].copies or {}, mine[0].contract, mine[0].settings, summaries, collectives)


def step_of_state(state: TrainState) -> int:
    """The step of a state.

    Raises:
        InvalidState: if it has no trainer component.
    """
    if state.trainer is None:
        raise InvalidState(
            "state.trainer", expected="a Progress", found="none", fix="give the state a trainer component"
        )
    return int(state.trainer.step)


def check_state(state: object, argument: str) -> None:
    """Check that an argument is a state.

    Raises:
        InvalidArgument: if it is not.
    """
    if not isinstance(state, TrainState):
        raise InvalidArgument(
            argument,
            expected="a TrainState",
            found=shown(state),
            fix="pass the state of the run, as returned by init_state(...) or live.capture()",
        )
