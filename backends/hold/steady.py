"""Which leaves of a run are steady: only an announced update writes to them, so a save may hold them instead of copying them."""

from collections.abc import Collection, Mapping
from typing import Final

import torch

from trainfold.backends.hold.write_watch import LeafName

_ADDRESS: Final = torch.Tensor.data_ptr


def steady_leaves(
    leaves: Mapping[LeafName, torch.Tensor],
    parameters: Collection[torch.Tensor],
    slots: tuple[str, ...] = (),
    frozen: Collection[torch.Tensor] = (),
    rescaled: Collection[torch.Tensor] = (),
) -> set[LeafName]:
    """The leaves that change only in a step of an optimizer that announces its steps.

    Parameters are compared by address, because other tensors may share their memory, such as those of a `state_dict`.

    Args:
        leaves: what is saved.
        parameters: what the announcing optimizers update.
        slots: how the paths of their slots begin.
        frozen: parameters that no update writes to. One of them may be a teacher, which the loop moves and announces nothing.
        rescaled: parameters that a forward writes to, such as the weight of an embedding with ``max_norm``.

    Examples:
        >>> weight, teacher, mean = torch.ones(2), torch.ones(2), torch.ones(2)
        >>> leaves = {("model", "w"): weight, ("model", "t"): teacher, ("model", "mean"): mean, ("optimizer", "slots[0]"): torch.ones(2)}
        >>> sorted(steady_leaves(leaves, [weight, teacher], ("slots[",), frozen=[teacher]))
        [('model', 'w'), ('optimizer', 'slots[0]')]
    """
    apart = set(map(id, frozen))
    trained = [each for each in parameters if id(each) not in apart]
    known = set() if rescaled else set(map(id, trained))  # nearly all leaves: an address costs more than an id
    steady = {name for name, leaf in leaves.items() if id(leaf) in known or name[1].startswith(slots)}
    if len(steady) == len(leaves):
        return steady
    places = set(map(_ADDRESS, trained)) - {0, *map(_ADDRESS, rescaled)}  # 0: the address of every empty tensor
    return steady | {name for name, leaf in leaves.items() if name not in steady and _ADDRESS(leaf) in places}


def leased_leaves(leaves: Mapping[LeafName, torch.Tensor], leased: Collection[torch.Tensor]) -> set[LeafName]:
    """The leaves of a state that a donating step announces, because they lie in its `Leaves`.

    Args:
        leaves: what is saved.
        leased: the tensors of the `Leaves`. Another view of one of them is not announced.
    """
    known = set(map(id, leased))
    steady = {name for name, leaf in leaves.items() if id(leaf) in known}
    others = {name: leaf for name, leaf in leaves.items() if name not in steady}
    addresses = set(map(_ADDRESS, others.values()))
    places = {_place(leaf) for leaf in leased if _ADDRESS(leaf) in addresses}
    return steady | {name for name, leaf in others.items() if _place(leaf) in places}


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
