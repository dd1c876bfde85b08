"""The wrappers of DistributedDataParallel in and around modules, and what they carry from one forward to the next, which no state of a module has."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, final

import torch
from torch.nn.parallel import DistributedDataParallel

K = TypeVar("K")


def ddp_wrappers(modules: Mapping[K, torch.nn.Module], *, least_ranks: int) -> dict[K, list[Any]]:
    """Return component -> the wrappers in its module, or around it.

    Nothing in a module leads to a wrapper around it, so those are searched for among all objects of the process.

    Args:
        modules: component -> its module.
        least_ranks: on fewer ranks nothing is searched for.
    """
    found: dict[K, list[Any]] = {
        component: [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
        for component, module in modules.items()
    }
    owners = {each: component for component, module in modules.items() for each in module.parameters()}
    known = {id(each) for wrappers in found.values() for each in wrappers}
    wrapped = {each for wrappers in found.values() for wrapper in wrappers for each in wrapper.parameters()}
    if not any(type(each) is torch.nn.Parameter for each in owners.keys() - wrapped) or not _are_ranks(least_ranks):
        return found
    kinds = _subclasses(DistributedDataParallel)
    # an object refers to its class; to look at all objects here takes three times as long
    for each in gc.get_referrers(*kinds):
        if type(each) in kinds and id(each) not in known:  # `isinstance` would ask a proxy
            component = next((owners[one] for one in each.parameters() if one in owners), None)
            if component is not None:
                found[component].append(each)
    return found


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _are_ranks(least: int) -> bool:
    is_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return bool(is_several and torch.distributed.get_world_size() >= least)


@final
class BetweenForwards:
    """What wrappers carry from one forward to the next, as it is now.

    That is whether the next forward broadcasts buffers, whether gradients are summed, and, with ``find_unused_parameters``, which parameters a window has used
    before the batch that sums its gradients.

    Args:
        wrappers: of DistributedDataParallel.
    """

    def __init__(self, wrappers: Iterable[Any]) -> None:
        self._kept = [
            (each, each.require_forward_param_sync, each.require_backward_grad_sync, _sums_of_used(each))
            for each in wrappers
        ]

    def back(self) -> None:
        """Put it back, after a step whose gradients are put back already."""
        for wrapper, broadcasts, sums, sums_of_used in self._kept:
            wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync = broadcasts, sums
            if _sums_of_used(wrapper) != sums_of_used:
                _mark_used_again(wrapper.reducer)


def _sums_of_used(wrapper: Any) -> int:
    """How often a wrapper has summed over the ranks which parameters were used, as it does where it finds unused ones."""
    finds = wrapper.find_unused_parameters and not wrapper.static_graph and hasattr(wrapper, "reducer")
    return wrapper.reducer._get_local_used_map()._version if finds else 0  # noqa: SLF001


def _mark_used_again(reducer: Any) -> None:
    """Mark what some rank has used in the last sum, as the earlier batches of the window had: a sum has cleared the marks, which only DDP can read.

    What is used by the batch that runs again is marked by it anyway, and what has no gradient now was not used before it: DDP passes those over.
    """
    used = reducer._get_local_used_map().nonzero().flatten().tolist()  # noqa: SLF001
    reducer._reset_state()  # noqa: SLF001  # else a forward without a backward, at the end of a step, lets a mark begin a sum
    for each in used:
        reducer._autograd_hook(each)  # noqa: SLF001
