"""Refuses modules and optimizers of which each rank has only a part that cannot be saved: FSDP1, ZeRO, DTensors cut otherwise than by FSDP2.

They look whole. What ``fully_shard`` (FSDP2) makes is saved: see `trainfold.adapters.sharded.dtensor`.
"""

from collections.abc import Iterable, Mapping

import torch

from trainfold.adapters.sharded.dtensor import cut_problem, is_dtensor
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.printable import with_article

_NOT_CUT = {
    "Adafactor": "torch's own step fails on them",
    "Rprop": "torch's own step fails on them",
    "LBFGS": "it gathers the history of all of them on each rank, and fails on uneven parts",
}
MEAN_OF_ALL = "let the closure of LBFGS return the mean loss of all ranks, from torch.distributed.all_reduce, as its line search and its end depend on it"
_STATELESS = ("ProcessGroup", "_AllreduceUpcastHookState")  # the second belongs to DDP's own mixed precision


def check_whole_module(module: torch.nn.Module, where: str) -> None:
    """Refuse a module that FSDP1 has sharded, one with DTensors that cannot be saved, or one with a communication hook that has state.

    Raises:
        InvalidArgument: naming the first such module or parameter.

    Examples:
        >>> check_whole_module(torch.nn.Linear(2, 1), "attach.model")
    """
    for name, each in module.named_modules():
        if is_a(each, "FullyShardedDataParallel"):
            raise _sharded(
                where,
                f"a FullyShardedDataParallel{f' at {name!r}' if name else ''}: its flat parameters are this rank's part of the whole",
            )
        for hook_state in _states_of_hooks(each):
            raise InvalidArgument(
                where,
                expected="a module that keeps no state of its own on each rank",
                found=f"a communication hook with {with_article(type(hook_state).__qualname__)}{f' at {name!r}' if name else ''}: it keeps the part of the gradients that it did not send",
                fix="register a hook without state, such as fp16_compress_hook with state=None: the state of this hook cannot be saved yet",
            )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
            raise _sharded(
                where,
                f"a flat parameter of FullyShardedDataParallel at {name!r}: its flat parameters are this rank's part of the whole",
            )
        if is_dtensor(parameter) and (problem := cut_problem(parameter)) is not None:
            raise InvalidArgument(
                where,
                expected="DTensors of which each rank has a part, as fully_shard (FSDP2) and tensor parallelism make them",
                found=f"{problem} at {name!r}",
                fix="redistribute it: a sum that is still to be made cannot be saved",
            )


def check_whole_optimizer(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuse an optimizer whose slots for parameters that are cut over the ranks cannot be saved.

    Raises:
        InvalidArgument: for a ``ZeroRedundancyOptimizer``, and for one of torch that does not work with DTensors.

    Examples:
        >>> check_whole_optimizer(torch.optim.SGD([torch.ones(1)]), "attach.optimizer")
    """
    if is_a(optimizer, "ZeroRedundancyOptimizer"):
        raise InvalidArgument(
            where,
            expected="an optimizer that has the slots of all its parameters on every rank",
            found="a ZeroRedundancyOptimizer, which keeps only the slots of this rank's share, in an inner optimizer",
            fix="use the optimizer class that it wraps, under DistributedDataParallel, or shard the model with fully_shard (FSDP2)",
        )
    name = next((name for name in _NOT_CUT if is_a(optimizer, name)), None)
    if name is not None and any(is_dtensor(each) for group in optimizer.param_groups for each in group["params"]):
        raise InvalidArgument(
            where,
            expected="an optimizer whose slots are cut as its parameters are",
            found=f"{with_article(name)} for DTensors: {_NOT_CUT[name]}",
            fix="use another optimizer, such as AdamW, or DistributedDataParallel"
            + (f"; there, {MEAN_OF_ALL}" if name == "LBFGS" else ""),
        )


def name_closure(error: BaseException) -> None:
    """Say what makes the last loss of LBFGS equal on all ranks, in an error that has found it unequal; leave any other error alone.

    Examples:
        >>> from trainfold.core.errors import RanksDisagree
        >>> error = RanksDisagree("optimizer.slots['w']['prev_loss']", expected="0.2", found="0.1", fix="declare it")
        >>> name_closure(error)
        >>> error.fix
        'let the closure of LBFGS return the mean loss of all ranks, from torch.distributed.all_reduce, as its line search and its end depend on it'
    """
    if isinstance(error, RanksDisagree) and error.where.endswith("['prev_loss']"):
        error.fix = MEAN_OF_ALL


def check_whole(targets: Iterable[tuple[str, object]]) -> None:
    """Check the objects that a run attaches: (where, object) pairs; other kinds of objects pass.

    Raises:
        InvalidArgument: for the first object that holds only a part of its state.
    """
    for where, target in targets:
        if isinstance(target, torch.nn.Module):
            check_whole_module(target, where)
        elif isinstance(target, torch.optim.Optimizer):
            check_whole_optimizer(target, where)


def wheres(model: object, optimizer: object, extra: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the attached objects, each with the argument that it was passed as."""
    named = {f"extra[{name!r}]": target for name, target in extra.items()}
    return [("attach.model", model), ("attach.optimizer", optimizer), *named.items()]


def _states_of_hooks(module: torch.nn.Module) -> list[object]:
    """Return the states of a DDP wrapper's communication hooks; a process group does not count."""
    hooks = getattr(module, "_comm_hooks", None) if is_a(module, "DistributedDataParallel") else None
    states = [hook[-1] for hook in hooks or () if isinstance(hook, tuple) and hook]
    return [state for state in states if state is not None and not any(is_a(state, name) for name in _STATELESS)]


def is_a(target: object, name: str) -> bool:
    """Whether a class of this name is among the object's, without importing it."""
    return any(kind.__name__ == name for kind in type(target).__mro__)


def _sharded(where: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        where,
        expected="a module whose parameters are whole on every rank",
        found=found,
        fix="shard it with torch.distributed.fsdp.fully_shard (FSDP2), or wrap the model in DistributedDataParallel",
    )
