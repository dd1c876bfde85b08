"""Buffers that DistributedDataParallel broadcasts: after the next forward, every rank has those of rank 0 (ADR-0017)."""

from collections.abc import Iterable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from trainfold.core.layout.world import Collectives
from trainfold.core.state.fqn import NamedTensors


def sent_buffers(
    attached: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    modules: Mapping[str, NamedTensors],
    world: Collectives,
) -> dict[str, str]:
    """Return the buffers that the next forward overwrites with those of rank 0, so that rank 0 has the exact values to save.

    That is certain only if an attached optimizer steps parameters of the wrapper, ``broadcast_buffers`` is on, gradients were summed for
    the last forward, no hook and no ``join`` changes the broadcast, and the ranks of the wrapper are those of the save.

    Args:
        attached: the modules of the run: the wrapper and not the module inside it.
        optimizers: those of the run.
        modules: component -> the tensors of its module.
        world: the ranks of the save.

    Returns:
        Leaf path -> a text with the sender and the receivers, which the ranks compare.
    """
    sent: dict[int, str] = {}
    trained: set[int] | None = None
    for module in attached:
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):
                trained = _trained(optimizers) if trained is None else trained
                if any(id(parameter) in trained for parameter in each.parameters()):
                    sent |= _sent_by(each, world)
    return {
        f"{component}.buffers[{name!r}]": sent[id(buffer)]
        for component, named in (modules.items() if sent else ())
        for name, buffer in named.buffers.items()
        if id(buffer) in sent
    }


def _trained(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the ids of the parameters that attached optimizers step; a copy of a wrapper, as in averaged weights, has others and no forward."""
    return {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }


def _sent_by(wrapper: DistributedDataParallel, world: Collectives) -> dict[int, str]:
    group = wrapper.process_group
    is_of_all = (torch.distributed.get_rank(group), torch.distributed.get_world_size(group)) == (
        world.rank,
        world.world_size,
    )
    joins = getattr(getattr(wrapper, "_join_config", None), "enable", False)  # then another rank may be the sender
    if not is_of_all or joins or hasattr(wrapper, "buffer_hook") or not wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        return {}
    ranks = torch.distributed.get_process_group_ranks(group)
    kept = wrapper.parameters_to_ignore
    return {
        id(buffer): f"sent by rank 0 of {ranks} before the next forward"
        for name, buffer in wrapper.module.named_buffers()
        if name not in kept
    }
