"""`UpdateGate`: knows which tensors of a run only an update writes to, and lets a save finish or copy before it does (D02)."""

import weakref
from collections.abc import Mapping
from typing import Any, Final, final

import torch

from trainfold.adapters.live.live import Live
from trainfold.adapters.live.view import LiveView
from trainfold.backends.hold.hold import Hold
from trainfold.backends.hold.write_watch import LeafName
from trainfold.core import tree
from trainfold.core.state.components import components_of
from trainfold.core.state.leaves import leaves_in
from trainfold.core.state.state import OwnOptimizerState, TrainState

_ADDRESS: Final = torch.Tensor.data_ptr


@final
class UpdateGate:
    """Stands before the updates of a run while a save reads what they will write to.

    Of a live run, slots of an attached optimizer and the parameters that it trains change at no other moment than in a step,
    so they are held and not copied; a hook that runs before each step of each attached optimizer protects them. What else it
    has (buffers, which a forward writes to, an average of the weights) is copied at once; so are parameters that are frozen or in
    no attached optimizer, such as a teacher's, because whoever moves them announces nothing (W16); and so are the weights of an embedding with ``max_norm``, which its forward writes to. An optimizer that takes no hooks, because its
    class never called ``Optimizer.__init__``, answers for nothing: what it holds is copied. So it is with one that holds another
    optimizer or has a ``state_dict`` of its own: nothing shows that it writes in its steps alone.

    A forward that writes to other parameters, such as one that moves a frozen teacher, makes one save fail, and what it wrote
    to is copied from then on. If it writes through ``tensor.data``, nothing shows it, and what is saved is torn: such a loop
    calls ``manager.wait_staging()`` before.

    Of a state, the `Leaves` are held: a donating step protects them before it writes. What lies elsewhere in it is copied.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        # a manager that nobody closed leaves no hooks behind; they do not lead to it
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._hold: Hold | None = None
        self._written: set[LeafName] = set()  # by somebody who announced nothing, while an earlier save was under way

    def changing(
        self, run: Live | TrainState, lent: LiveView, leaves: Mapping[LeafName, torch.Tensor]
    ) -> set[LeafName]:
        """The names of the leaves that have to be copied at once, because nothing tells when they change.

        Args:
            run: what is saved; the optimizers of a live run get their hooks here.
            lent: the same, to be read.
            leaves: its tensors by name.
        """
        if isinstance(run, Live):
            changing = self._changing_in_live(run.optimizers, lent, leaves)
        else:
            changing = _elsewhere(run, leaves)
        return changing | (self._written & leaves.keys())

    def close_for(self, hold: Hold, run: Live | TrainState) -> None:
        """From now on, let updates wait for this hold."""
        self.open()
        self._hold = hold
        if isinstance(run, TrainState):
            for leaves in leaves_in(run):
                leaves.lease.add_reader(hold)

    def protect(self) -> None:
        """Return when everything may be written to; a comparison where no save is under way."""
        if self._hold is not None:
            self._hold.protect()

    def open(self) -> None:
        """The save has ended; what was written to unannounced meanwhile is copied from now on."""
        if self._hold is not None:
            self._written |= self._hold.written()
        self._hold = None

    def remove(self) -> None:
        """Take the hooks away."""
        _remove(self._handles)

    def _changing_in_live(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        lent: LiveView,
        leaves: Mapping[LeafName, torch.Tensor],
    ) -> set[LeafName]:
        own = {name: each for name, each in components_of(lent.state).items() if isinstance(each, OwnOptimizerState)}
        # who holds another optimizer, or says its own state, may write at other moments too, as SAM does to climb
        elsewhere = {name for name, each in own.items() if each.held or each.own is not None}
        hooked = {name: each for name, each in optimizers.items() if name not in elsewhere and self._is_hooked(each)}
        steady = [
            parameter
            for optimizer in hooked.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad  # what was frozen just then may be a teacher, which nobody's hook announces
        ]
        rescaled = [parameter for each in lent.modules.values() for parameter in each.rescaled]
        slots = tuple(f"{name}.base.slots[" if name in own else f"{name}.slots[" for name in hooked)
        known = set() if rescaled else set(map(id, steady))  # nearly all leaves
        others = {
            name: leaf for name, leaf in leaves.items() if id(leaf) not in known and not name[1].startswith(slots)
        }
        if not others:
            return set()
        # by address, because other tensors may lie there too, such as those of a `state_dict`; 0: of all that is empty
        places = set(map(_ADDRESS, steady)) - {0, *map(_ADDRESS, rescaled)}
        return {name for name, leaf in others.items() if _ADDRESS(leaf) not in places}

    def _is_hooked(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._handles:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                return False
            gate = weakref.ref(self)  # an optimizer that outlives the manager does not keep it alive

            def before_step(*_: Any) -> None:
                if (found := gate()) is not None:
                    found.protect()

            # a compiled step calls it as it is: it waits for threads, and reads what is there now
            hook = torch.compiler.disable(before_step)  # type: ignore[no-untyped-call]
            self._handles[optimizer] = optimizer.register_step_pre_hook(hook)
        return True


def _remove(handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _elsewhere(state: TrainState, leaves: Mapping[LeafName, torch.Tensor]) -> set[LeafName]:
    """The names of those that no `Leaves` of a state hold."""
    held = [leaf for each in leaves_in(state) for leaf in tree.leaves(each) if isinstance(leaf, torch.Tensor)]
    known = set(map(id, held))
    others = {name: leaf for name, leaf in leaves.items() if id(leaf) not in known}
    addresses = set(map(_ADDRESS, others.values()))
    places = {_place(leaf) for leaf in held if _ADDRESS(leaf) in addresses}
    return {name for name, leaf in others.items() if _place(leaf) not in places}


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
