"""What a script gave to the run that it attached, for the resume contract: hyperparameters, and who is frozen."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainfold.adapters.optimizer import OptimizerPart
from trainfold.core.codec import digest_of
from trainfold.core.contract import contract_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.names import named_tensors
from trainfold.core.state import TrainState

_FROZEN_SHOWN = 64
# What a torch scheduler leaves in a group that it works on -> the hyperparameters that it then changes at each step.
_SCHEDULED = {"initial_lr": {"lr"}, "max_momentum": {"momentum", "betas"}}


def check_scheduled(
    optimizers: Mapping[str, torch.optim.Optimizer], schedulers: Iterable[Any], extra: Mapping[str, Any], *, where: str
) -> None:
    """Check that no scheduler works on an optimizer without being attached: its state would be lost at a resume.

    Args:
        optimizers: component -> optimizer.
        schedulers: the attached ones.
        extra: the run's other objects, among which there may be schedulers.
        where: the call, for the message.

    Raises:
        InvalidArgument: naming the optimizer.
    """
    bases = {
        name: each for name, each in optimizers.items() if any("initial_lr" in group for group in each.param_groups)
    }
    if not bases:
        return
    known = [*schedulers, *(target for target in map(_bare, extra.values()) if _is_scheduler(target))]
    for name, optimizer in bases.items():
        others = [other for other in optimizers.values() if other is not optimizer]
        if all(_is_one_of(getattr(scheduler, "optimizer", None), others) for scheduler in known):
            raise InvalidArgument(
                where,
                expected=f"the scheduler of {name}, which has put initial_lr into its param groups",
                found="none" if not known else "only those of other optimizers",
                mend="attach(..., scheduler=scheduler), or name it under extra=: a resume would begin it anew otherwise; "
                "if none works on the optimizer any more, delete initial_lr from its param groups",
            )


def hyperparameters(optimizers: Mapping[str, OptimizerPart]) -> dict[str, Any]:
    """Contract key -> plain value, for each hyperparameter of each group of every optimizer, as they are now.

    What a scheduler works on says ``"live"``. The main optimizer's keys begin with ``optimizer.``, those of another
    with ``attached.<its name>.``.
    """
    found: dict[str, Any] = {}
    for name, part in optimizers.items():
        prefix = "optimizer." if name == "optimizer" else f"attached.{name}."
        said = contract_of(TrainState(optimizer=part.capture()))
        found |= {prefix + key.removeprefix("optimizer."): said[key] for key in said if ".groups[" in key}
        for group in part.optimizer.param_groups:
            label = min((part.names[id(parameter)] for parameter in group["params"]), default="")
            moving = {key for sign, keys in _SCHEDULED.items() if sign in group for key in keys & set(group)}
            found |= {f"{prefix}groups[{label!r}].{key}": "live" for key in moving}
    return found


def frozen(model: torch.nn.Module) -> list[str]:
    """The names of the parameters that are not trained; of many the first, and a digest of all.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> frozen(model)
        ['bias']
    """
    names = sorted(name for name, parameter in named_tensors(model).params.items() if not parameter.requires_grad)
    if len(names) <= _FROZEN_SHOWN:
        return names
    digest = digest_of("\n".join(names).encode("utf-8", "surrogatepass"))
    return [*names[:_FROZEN_SHOWN], f"and {len(names) - _FROZEN_SHOWN} more: {digest}"]


def _bare(target: Any) -> Any:
    """The object itself, where its two methods were attached."""
    return getattr(target[0], "__self__", target) if isinstance(target, tuple) and target else target


def _is_scheduler(target: Any) -> bool:
    """Whether an extra works on a learning rate; others too have a ``step`` and a state, such as a ``GradScaler``."""
    is_scheduler = isinstance(target, torch.optim.lr_scheduler.LRScheduler) or hasattr(target, "get_last_lr")
    return is_scheduler or isinstance(getattr(target, "optimizer", None), torch.optim.Optimizer)


def _is_one_of(target: Any, those: list[torch.optim.Optimizer]) -> bool:
    return any(target is each for each in those)
