"""The parameter groups of FSDP2, whose state torch keeps private: whether they synchronise, what they divide by, and the gradients that they hold back.

``set_requires_gradient_sync`` is public, and there is no way to ask for its last value, nor for gradients that are not reduced yet: ``.grad`` stays None.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_SCATTERS: Final = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter")  # torch's own, with the same bits
HELD_BACK: Final = "gradients that FSDP2 holds back: the last backward did not synchronise them, or did not finish"
SYNCHRONISE: Final = "wrap each microbatch in live.microbatch, or call set_requires_gradient_sync(True) and set_requires_all_reduce(True) before the last one"


def fsdp2_modules(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return every module that ``fully_shard`` was called on, each once."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    found = {id(each): each for module in modules for each in module.modules() if isinstance(each, FSDPModule)}
    return list(found.values())


def param_groups(sharded: Iterable[Any]) -> list[Any]:
    """Return the groups of parameters that communicate together, of modules as `fsdp2_modules` returns them."""
    found: list[Any] = []
    for module in sharded:
        state = module._get_fsdp_state()  # noqa: SLF001
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13 there was at most one
            groups = [group] if (group := state._fsdp_param_group) is not None else []  # noqa: SLF001
        found += groups
    return found


@contextmanager
def synchronised(groups: Iterable[Any], *, enabled: bool) -> Iterator[None]:
    """Set whether a backward inside reduces gradients; each group gets back what it had, also after an error."""
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    try:
        for group, _, _ in before:
            group.reduce_grads = group.all_reduce_grads = enabled
        yield
    finally:
        for group, reduces, all_reduces in before:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def data_mesh(groups: Iterable[Any]) -> Any:
    """Return the mesh of the ranks that read different data; None without groups."""
    return next((group.mesh_info.mesh for group in groups), None)


def divide_factors(groups: Iterable[Any]) -> list[float | None]:
    """Return what ``set_gradient_divide_factor`` has set, each number once; None for the default, the number of ranks. It sets one module, not those inside it."""
    return list(dict.fromkeys(group.gradient_divide_factor for group in groups))


def reductions(groups: Iterable[Any], *, is_exact: bool) -> list[str]:
    """Return for each group how it sums gradients, where a script has set that: by a hook, by a reduce-scatter of its own, or by sums alone.

    Args:
        groups: of the modules.
        is_exact: whether a sum has the same bits if it is divided later.
    """
    found = []
    for group in groups:
        hook, scatter = group._all_reduce_hook, type(group._reduce_scatter_comm).__qualname__  # noqa: SLF001
        parts = [] if hook is None else [getattr(hook, "__qualname__", type(hook).__qualname__)]
        parts += [] if scatter in _SCATTERS else [scatter]
        parts += ["sums alone"] if group.force_sum_reduction_for_comms and not is_exact else []
        found.append(", ".join(parts))
    return found


def roots(sharded: Iterable[Any]) -> list[Any]:
    """Return the outermost modules, of which a forward has started; only they can forget a backward."""
    return [each for each in sharded if each._get_fsdp_state()._is_root]  # noqa: SLF001


def is_interrupted(sharded: Iterable[Any]) -> bool:
    """Whether a backward has begun and not ended, so that the next one would never reduce the gradients of the outermost module."""
    return any(each._get_fsdp_state()._state_ctx.post_backward_final_callback_queued for each in sharded)  # noqa: SLF001


def kept_back(groups: Iterable[Any]) -> Iterator[torch.Tensor | None]:
    """Yield what each group and each of its parameters holds of gradients that are not reduced yet; None for nothing."""
    for group in groups:
        yield group._partial_reduce_output  # noqa: SLF001
        for each in group.fsdp_params:
            yield each.unsharded_accumulated_grad
            yield getattr(getattr(each, "_unsharded_param", None), "grad", None)


def parameters_held_back(groups: Iterable[Any]) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters whose gradients a backward has left unreduced, or, in several replicas, reduced in one of them alone."""
    for group in groups:
        is_partial = group._partial_reduce_output is not None  # noqa: SLF001
        for each in group.fsdp_params:
            if (
                getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
                or each.unsharded_accumulated_grad is not None
                or (is_partial and each.sharded_param.requires_grad)
            ):
                yield each.sharded_param


def are_held_back(groups: Iterable[Any]) -> bool:
    """Whether a backward has left gradients that are not reduced yet."""
    return next(parameters_held_back(groups), None) is not None


def drop_held_back(groups: Iterable[Any]) -> None:
    """Forget gradients that are not reduced yet; ``zero_grad`` does not see them."""
    for group in groups:
        group._partial_reduce_output = None  # noqa: SLF001
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if getattr(each, "_unsharded_param", None) is not None:
                each._unsharded_param.grad = None  # noqa: SLF001
