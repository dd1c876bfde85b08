"""The wrappers of DistributedDataParallel in and around modules, and what they carry from one forward to the next, which no state of a module has."""

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
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
    """What wrappers carry from one forward to the next, as it is now, to put it back for a second run of a step.

    That is whether the next forward broadcasts buffers, whether gradients are summed, and, with ``find_unused_parameters``, which parameters a window has used
    before the batch that sums its gradients.

    Args:
        wrappers: of DistributedDataParallel.
    """

    def __init__(self, wrappers: Iterable[Any]) -> None:
        self._wrappers = [_Carried(each) for each in wrappers]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The first run of the step, whose forwards are seen: part of what a wrapper carries shows only in what it does."""
        hooks = []
        for each in self._wrappers:
            hook = torch.compiler.disable(each.saw_forward)  # type: ignore[no-untyped-call]
            hooks.append(each.wrapper.register_forward_hook(hook))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def is_lost(self) -> bool:
        """Whether, after the first run, a forward without a backward cannot be put back, and changes which backwards of the second one sum."""
        return any(each.is_lost for each in self._wrappers)

    def back(self) -> None:
        """Put it back, after a step whose gradients are put back already."""
        for each in self._wrappers:
            each.back()


@final
class _Carried:
    """What one wrapper carries.

    A forward that is to sum lets DDP wait for its backward. If none comes, the next backward is summed, in ``no_sync()`` too, unless another forward that is to
    sum comes before it. Whether it waits cannot be read, only when it has summed last.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._broadcasts, self._sums = wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync
        self._sums_of_used = _sums_of_used(wrapper)
        self._used: torch.Tensor | None = None  # by the first sum of the first run
        self._summed_at = _summed_at(wrapper)
        self._is_first_sum: bool | None = None  # whether the first forward is to sum
        self._waits_since: list[list[int]] = []  # when DDP had summed last, at each forward that is to sum

    def saw_forward(self, *_: object) -> None:
        """A forward of the first run is over."""
        self._keep_used()
        if torch.is_grad_enabled() and _has_reducer(self.wrapper):
            sums = self.wrapper.require_backward_grad_sync
            self._is_first_sum = sums if self._is_first_sum is None else self._is_first_sum
            if sums:
                self._waits_since.append(_summed_at(self.wrapper))

    @property
    def is_lost(self) -> bool:
        """Whether DDP waited before the first run, or waits after it, and its first backward is not one that is to sum."""
        if self._is_first_sum is not False:
            return False
        now = _summed_at(self.wrapper)
        waited = (self._waits_since or [now])[0] != self._summed_at
        waits = self._waits_since[-1:] == [now]
        return waited or waits

    def _keep_used(self) -> None:
        if self._used is None and _sums_of_used(self.wrapper) != self._sums_of_used:
            self._used = self.wrapper.reducer._get_local_used_map().clone()  # noqa: SLF001

    def back(self) -> None:
        """Put it back."""
        wrapper = self.wrapper
        self._keep_used()
        wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync = self._broadcasts, self._sums
        if self._used is not None:
            _mark_used_again(wrapper.reducer, self._used)


def _has_reducer(wrapper: Any) -> bool:
    """Whether DDP sums in C++, as it does unless all its parameters are summed late, or in Python."""
    return hasattr(wrapper, "reducer") and not getattr(wrapper, "_use_python_reducer", False)


def _sums_of_used(wrapper: Any) -> int:
    """How often a wrapper has summed over the ranks which parameters were used, as it does where it finds unused ones."""
    finds = wrapper.find_unused_parameters and not wrapper.static_graph and _has_reducer(wrapper)
    return wrapper.reducer._get_local_used_map()._version if finds else 0  # noqa: SLF001


def _summed_at(wrapper: Any) -> list[int]:
    """When each gradient was last given to a sum: other numbers mean another sum."""
    return list(wrapper.reducer.get_backward_stats()) if _has_reducer(wrapper) else []


def _mark_used_again(reducer: Any, used: torch.Tensor) -> None:
    """Mark what some rank has used in a sum, as the earlier batches of the window had: the sum has cleared the marks, which only DDP can read.

    What is used by the batch that runs again is marked by it anyway, and what has no gradient now was not used before it: DDP passes those over.
    """
    reducer._reset_state()  # noqa: SLF001  # else a forward without a backward, at the end of a step, lets a mark begin a sum
    for each in used.nonzero().flatten().tolist():
        reducer._autograd_hook(each)  # noqa: SLF001
