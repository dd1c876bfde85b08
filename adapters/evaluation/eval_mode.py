"""`in_eval_mode`: runs a block with modules in evaluation mode, then puts everything back."""

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from trainfold.adapters.evaluation.reachability import reachable
from trainfold.adapters.sharded.whole import is_a
from trainfold.adapters.streams.rng_streams import bound_device, preserved_rng
from trainfold.backends.ranks.launcher import warn_for_all

_LEVELS = 4  # forward itself, a helper or a trainer that it names, and two behind that
_SHOWN = 5
_LOCK = threading.RLock()
# by id, because a module may have a hash that changes; only while it is evaluated
_MODES: dict[int, tuple[int, bool]] = {}
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


@contextmanager
def in_eval_mode(
    modules: Sequence[torch.nn.Module], data: object, generators: Iterable[torch.Generator]
) -> Iterator[None]:
    """Run a block without gradients, with modules in evaluation mode; then put everything back, also if the block raises.

    This puts back the mode of each submodule, when the last thread that evaluates it is done; the grad mode; parameters that FSDP2
    gathered; the global random streams of Python, NumPy, torch and the modules' device; the generators; and the position of
    ``data`` if it has ``state_dict`` and ``load_state_dict`` itself.

    Args:
        modules: the modules to evaluate.
        data: the iterable of batches: a loader, or anything else.
        generators: the generators that it draws from.
    """
    parts = [part for module in modules for part in module.modules()]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserved_rng(bound_device(tensors)))
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        if callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None)):
            stack.callback(data.load_state_dict, copy.deepcopy(data.state_dict()))  # type: ignore[attr-defined]
        for part in parts:
            if is_a(part, "FSDPModule"):
                stack.callback(_reshard, part)
        with _LOCK:
            modes = _held(parts)
            stack.callback(_restore_modes, modes)
            for module in modules:
                with suppress(NotImplementedError):  # an exported program has one mode
                    module.eval()
        yield


def modules_of(function: object, given: Sequence[torch.nn.Module] = ()) -> list[torch.nn.Module]:
    """The modules of a forward: those given, and those that it is, is bound to, closes over or names, directly or through helpers.

    A warning names the objects that were not searched, if no module with parameters was found.

    Examples:
        >>> model = torch.nn.Linear(1, 1)
        >>> modules_of(lambda batch: model(batch)) == modules_of(model) == [model]
        True
    """
    found, beyond = reachable(function, torch.nn.Module, levels=_LEVELS, fix="name the model: modules=[model]")
    modules = [*found, *given]
    if beyond and not any(True for module in modules for _ in module.parameters()):
        names = list(dict.fromkeys(getattr(each, "__qualname__", type(each).__qualname__) for each in beyond))
        warn_for_all(
            f"evaluate found no model in forward, and did not look into {', '.join(names[:_SHOWN])}"
            f"{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}: a model there stays in its mode; "
            "name it: modules=[model]"
        )
    return modules


def communicate(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether a forward call of a module is known to wait for other ranks: FSDP, DDP that sends buffers, DTensors."""
    for module in modules:
        for part in module.modules():
            if any(is_a(part, name) for name in _SHARDED):
                return True
            if isinstance(part, torch.nn.parallel.DistributedDataParallel) and part.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                return True
        if any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters()):
            return True
    return False


def _held(parts: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Record the modes of modules, once for all threads evaluating them."""
    distinct = list({id(part): part for part in parts}.values())
    for part in distinct:
        count, training = _MODES.get(id(part), (0, part.training))
        _MODES[id(part)] = (count + 1, training)
    return distinct


def _restore_modes(parts: Sequence[torch.nn.Module]) -> None:
    """Restore modes from the outside in, with each module's own ``train``; then set exactly the recorded flags."""
    with _LOCK:
        last = []
        for part in parts:
            count, training = _MODES.pop(id(part))
            if count > 1:
                _MODES[id(part)] = (count - 1, training)
            else:
                last.append((part, training))
        try:
            for part, training in last:
                if part.training is not training:
                    with suppress(NotImplementedError):
                        part.train(training)
        finally:
            for part, training in last:
                part.training = training


def _reshard(part: Any) -> None:
    """Shard the parameters again that FSDP2 leaves gathered after a forward in evaluation mode, where the optimizer does not see them."""
    part.reshard()
