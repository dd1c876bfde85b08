"""`RunContents`: reads a run for a save: its snapshot, and which of its leaves must be copied during the call."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, final
from weakref import WeakMethod

import attrs
import torch

from trainfold.adapters.live.live import Live
from trainfold.adapters.live.view import LiveView
from trainfold.adapters.parallel.ddp_buffers import sent_buffers
from trainfold.adapters.sharded.dtensor import is_dtensor, local_part
from trainfold.adapters.watch.update_hooks import UpdateHooks
from trainfold.backends.hold.steady import leased_leaves, steady_leaves
from trainfold.backends.hold.write_watch import LeafName
from trainfold.backends.ranks.left_out import texts_of_left_out, warn_of_left_out
from trainfold.backends.runs.snapshot import Snapshot, describe_state
from trainfold.core import tree
from trainfold.core.component_names import in_order
from trainfold.core.format.structure.describe import Describer
from trainfold.core.format.structure.ownership import belongs_to_rank, counts_on_rank_zero
from trainfold.core.format.structure.united_contract import shown_as_whole
from trainfold.core.json_values import Json
from trainfold.core.layout.world import Collectives
from trainfold.core.save.replicas import Level, of_stages, proof_of
from trainfold.core.state.components import components_of
from trainfold.core.state.contract_kinds import shared_settings
from trainfold.core.state.leaves import leaves_in
from trainfold.core.state.state import OwnOptimizerState, TrainState


@final
class RunContents:
    """Reads a run for its saves.

    Args:
        world: the ranks.
        hooks: what announces the updates of a live run.
        components: which components are saved; None for all.
        contract: what must be equal at a resume, beside what the run says itself.
        check_replicas: how much each save compares of what all ranks should have alike.
    """

    def __init__(
        self,
        world: Collectives,
        hooks: UpdateHooks,
        *,
        components: tuple[str, ...] | None,
        contract: Mapping[str, Any],
        check_replicas: Level,
    ) -> None:
        self._world = world
        self._hooks = hooks
        self._components = components
        self._selected = components  # of the live run that was described last; None for all
        self._contract = contract
        self._check_replicas = check_replicas
        self._describer = Describer()
        self._proofs = 0
        self._has_read = False  # whether the batches of the ranks were compared
        self._written: set[LeafName] = set()

    def proved(self) -> None:
        """Note that a save has succeeded, which shows that the ranks have the same values."""
        self._proofs += 1

    def found_written(self, names: frozenset[LeafName]) -> None:
        """Note leaves that were written to without announcement during a save: from now on they are copied in the call."""
        self._written |= names

    def whole_snapshot(self, run: Live | TrainState) -> Snapshot:
        """A snapshot with the random streams."""
        view = view_of(run)
        return self.with_streams(self.snapshot(run, view), view.rng)

    def snapshot(self, run: Live | TrainState, view: LiveView) -> Snapshot:
        """A snapshot without the random streams of a live run.

        Args:
            run: what is saved.
            view: of the run.
        """
        if isinstance(run, Live) and self._world.world_size > 1 and not self._proofs:
            run.check_whole()  # again, because an attached module may have been wrapped since
        found = self.described(run, view)
        left_out = {name: why for name, why in view.left_out.items() if name not in found.omitted}
        if self._world.world_size == 1:
            warn_of_left_out(texts_of_left_out([left_out]), self._world)
            return found
        if isinstance(run, Live):
            read = None if self._has_read else run.batches_read(self._world)
            settings = _settings(found, own=run.sharing.own_settings)
            optional = run.optional.difference(found.omitted)
            found = attrs.evolve(found, optional=optional, left_out=left_out, read=read, settings=settings)
            self._has_read = self._has_read or bool(read and read[1])
        return found.with_copies(proof_of(self._check_replicas, saves=self._proofs))

    def described(self, run: Live | TrainState, view: LiveView) -> Snapshot:
        """A snapshot that reads no tensor: what it has, and what is sent to the other ranks before it is used.

        Args:
            run: what is described.
            view: of the run.
        """
        names, state = self._components, view.state
        if isinstance(run, Live):
            names = self._selected = run.selected(names, where="CheckpointManager.components")
        if isinstance(run, Live) and run.outside is not None:
            state, names = run.outside.saved(state, names)
        found = describe_state(state, components=names, contract=self._contract, describe=self._describer.describe)
        if names is not None and view.left_out:
            found = attrs.evolve(
                found, omitted=tuple(in_order([*found.omitted, *sorted(view.left_out.keys() - {*names})]))
            )
        if self._world.world_size == 1 or not isinstance(run, Live):
            return found
        sent = sent_buffers(run.modules, run.optimizers.values(), view.modules, self._world)
        return attrs.evolve(found, sent={**sent, **run.sharing.sent(view.modules)})

    def with_streams(self, snapshot: Snapshot, streams: Callable[[], Any] | None) -> Snapshot:
        """Add the random streams, which the view has read; an async save does this in its thread."""
        if streams is None:
            return snapshot
        return snapshot.with_own("rng", streams(), is_saved=self._selected is None or "rng" in self._selected)

    def unannounced(
        self, run: Live | TrainState, view: LiveView, snapshot: Snapshot, leaves: Mapping[LeafName, torch.Tensor]
    ) -> set[LeafName]:
        """The leaves that have to be copied in the call, because no update announces when they change.

        Args:
            run: what is saved. The optimizers of a live run get their hooks here.
            view: of the run.
            snapshot: of the run.
            leaves: its tensors by name.
        """
        steady = self._steady_of_live(run, view, leaves) if isinstance(run, Live) else _steady_of_state(run, leaves)
        return (leaves.keys() - steady) | (self._written & leaves.keys()) | snapshot.arrays()

    def counters(self, run: Live | TrainState, leaves: Mapping[LeafName, torch.Tensor]) -> dict[LeafName, torch.Tensor]:
        """The DTensors whose version counters move at writes to leaves that are their local parts; those of the leaves stay.

        Args:
            run: what is saved.
            leaves: its tensors by name.
        """
        if not isinstance(run, Live):
            return {}
        groups = [group for each in run.optimizers.values() for group in each.param_groups]
        stepped = [each for group in groups for each in group["params"] if is_dtensor(each)]
        slots = [own.values() for each in run.optimizers.values() for own in each.state.values()] if stepped else []
        known = {id(local_part(each)): each for each in (*stepped, *filter(is_dtensor, chain.from_iterable(slots)))}
        return {name: known[id(leaf)] for name, leaf in leaves.items() if id(leaf) in known} if known else {}

    def _steady_of_live(self, run: Live, view: LiveView, leaves: Mapping[LeafName, torch.Tensor]) -> set[LeafName]:
        own = {name: each for name, each in components_of(view.state).items() if isinstance(each, OwnOptimizerState)}
        # an optimizer that holds another one, or has its own state_dict, may write at other moments too, as SAM does to climb
        anytime = {name for name, each in own.items() if each.held or each.own is not None}
        run.before_writes = WeakMethod(self._hooks.announce)  # a run does not keep its manager alive
        hooked = self._hooks.install({name: each for name, each in run.optimizers.items() if name not in anytime})
        groups = [group for name in hooked for group in run.optimizers[name].param_groups]
        updated = [each for group in groups for each in group["params"]]
        parameters = [local_part(each) for each in updated]
        return steady_leaves(
            leaves,
            parameters,
            slots=tuple(f"{name}.base.slots[" if name in own else f"{name}.slots[" for name in hooked),
            frozen=[local_part(each) for each in updated if not each.requires_grad],
            rescaled=[local_part(each) for module in view.modules.values() for each in module.rescaled],
        )


def _steady_of_state(state: TrainState, leaves: Mapping[LeafName, torch.Tensor]) -> set[LeafName]:
    leased = [leaf for each in leaves_in(state) for leaf in tree.leaves(each) if isinstance(leaf, torch.Tensor)]
    return leased_leaves(leaves, leased)


def _settings(found: Snapshot, *, own: Collection[str]) -> dict[str, dict[str, Json]]:
    """The settings that ranks must have alike, of stages those with the same ones: none of what a rank has of its own."""
    contract = found.contract if found.stage is None else shown_as_whole(found.contract)
    return {
        of_stages(name, found.stage): settings
        for name, each in found.described.items()
        if name not in own and not belongs_to_rank(name, each.node) and not counts_on_rank_zero(each.node)
        if (settings := shared_settings(contract, name))
    }


def view_of(run: Live | TrainState, *, is_saved: bool = True) -> LiveView:
    """The view of a live run; a state is its own view."""
    return run.read(view=True, is_saved=is_saved) if isinstance(run, Live) else LiveView(run)
