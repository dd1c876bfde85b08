"""`DerivedCopies`: components that are copies of the model, such as an average that the script has made of it, when the model gets other weights. `warn_of_copies`: of those that keep them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch

from trainfold.adapters.components.component import copy_values
from trainfold.adapters.sharded.dtensor import local_part, named_shards, reshard
from trainfold.adapters.sharded.parts import memory_of
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.user_warning import warn_user
from trainfold.core import tree
from trainfold.core.errors import StaleCopy
from trainfold.core.layout.world import Collectives
from trainfold.core.state.names.wrapper_names import under_names_of
from trainfold.core.state.state import Opaque

_STAYS: Final = (
    "{name}: it has the values that the model had before it got its initial weights, and keeps them: make it after the restore, and add it by "
    "live.register({name!r}, ...); or let it follow the checkpoint of the weights: restore(..., follow=[{name!r}])"
)


@final
class DerivedCopies:
    """The components whose values are those of the model, bit by bit, before it gets other weights: they would keep the weights that the script has made.

    A module with the names of the model follows it, in its own dtype. Of something else, such as an average that holds a list of tensors, it is known that it
    is a copy, and not what it is made of.

    Args:
        model: before its weights change.
        attached: the attached objects, by component.
        values: the captured values of these components.

    Attributes:
        followers: the modules that follow, by component.
        others: the components that stay as they are.

    Examples:
        >>> import copy
        >>> model = torch.nn.Linear(1, 1)
        >>> ema = copy.deepcopy(model).double()
        >>> copies = DerivedCopies(model, {"ema": ema}, {})
        >>> _ = model.weight.data.fill_(3)
        >>> copies.refresh()
        >>> copies.followers, ema.weight.item()
        (('ema',), 3.0)
    """

    def __init__(self, model: torch.nn.Module, attached: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        reshard(model)
        params, buffers = _memory(model)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        followers, others = [], []
        for name, target in attached.items():
            if target is model or isinstance(target, torch.optim.Optimizer):
                continue
            pairs = _pairs(target, params, buffers) if isinstance(target, torch.nn.Module) else None
            if pairs is not None:
                self._pairs += pairs
                followers.append(name)
            elif name in values and _holds(values[name], params):
                others.append(name)
        self.followers, self.others = tuple(followers), tuple(others)

    def refresh(self) -> None:
        """Give the modules that follow the values that the model has now."""
        copy_values(self._pairs)


def warn_of_copies(names: Iterable[str], world: Collectives) -> None:
    """Warn once a run of components that are copies of the model as the script has made it, and stay so; every rank calls.

    Args:
        names: of the components, on this rank.
        world: the ranks.
    """
    told = world.gather(tuple(names), doing="name copies of the model")
    texts = [_STAYS.format(name=name) for name in dict.fromkeys(name for each in told for name in each)]

    def warn() -> None:
        for text in texts:
            warn_user(text, StaleCopy)

    if texts:
        on_rank_zero(world, warn, doing="warn", is_vote=True)


def _memory(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    named = named_shards(module)
    return (
        {name: local_part(each).detach() for name, each in named.params.items()},
        {name: local_part(each).detach() for name, each in named.buffers.items()},
    )


def _pairs(
    target: torch.nn.Module, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The tensors of a module that is a copy, each with that of the model; None if it is not one."""
    reshard(target)
    held, kept = _memory(target)
    theirs, others = under_names_of(params, held), under_names_of(buffers, kept)
    if not _are_equal([(theirs.get(name), each) for name, each in params.items()]):
        return None
    found = [(theirs[name], each) for name, each in params.items()]
    return found + [(others[name], each) for name, each in buffers.items() if name in others and _equal(others[name], each)]  # fmt: skip


def _holds(value: Any, params: Mapping[str, torch.Tensor]) -> bool:
    """Whether a component has tensors with the values of all parameters; those of one shape in their order."""
    value = value.value if isinstance(value, Opaque) else value
    leaves = [memory_of(leaf) for _, leaf in tree.named_leaves(value) if hasattr(memory_of(leaf), "shape")]
    tensors = [each.detach() for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for each in tensors:
        by_shape.setdefault(tuple(each.shape), []).append(each)
    queues = {shape: iter(each) for shape, each in by_shape.items()}
    return _are_equal([(next(queues.get(tuple(each.shape), iter(())), None), each) for each in params.values()])


def _are_equal(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor]]) -> bool:
    """Whether all are equal, and some of them are not zero: what is zero everywhere is equal to slots that begin so."""
    found = list(pairs)
    return all(a is not None and _equal(a, b) for a, b in found) and any(b.any() for _, b in found if not b.is_meta)


def _equal(copied: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether one is the other, in its own dtype and on its own device; in another memory."""
    if copied.shape != own.shape or copied.is_meta or own.is_meta or copied.data_ptr() == own.data_ptr() != 0:
        return False
    return copied.dtype.is_floating_point == own.dtype.is_floating_point and torch.equal(
        copied, own.to(copied.device, copied.dtype)
    )
