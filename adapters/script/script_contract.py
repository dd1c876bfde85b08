"""What a script passed to `attach`, for the resume contract: the hyperparameters, and which parameters are frozen."""

from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum
from typing import Any, final

import torch

from trainfold.adapters.components.component import kind_of
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.components.optimizer_state import groups_of
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.codec import leaf_digest
from trainfold.core.state.contract import checked_contract
from trainfold.core.state.contract_kinds import SCHEDULED
from trainfold.core.state.fqn import named_tensors


@final
class SchedulerWatch:
    """Refuses a scheduler that works on an optimizer of the run and is not attached, so that a resume would lose its state.

    A torch scheduler wraps the ``step`` of its optimizer when it is made. The scheduler belongs to the run if the optimizer has
    not stepped since, or if the wrapping happened after `add`. It is certainly not attached if there is no attached scheduler
    that could be it, and no attached object or pair of functions whose contents are unknown.

    Where nothing is certain, nothing is raised or logged here: `Rates` warns after a resume, once a rate has restarted. Values
    that a restore writes into the param groups prove nothing. Not seen: a ``ReduceLROnPlateau``, a scheduler of the user's that
    leaves no trace, and a second scheduler for an optimizer that already has one.
    """

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._unused: dict[str, bool] = {}  # optimizer to check -> whether it had not stepped when it was added

    def add(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Watch one more optimizer."""
        self._optimizers[name] = optimizer
        self._unused[name] = not getattr(optimizer, "_opt_called", False)

    def covers(self, name: str, schedulers: Iterable[Any], extra: Mapping[str, Any]) -> bool:
        """Whether an attached object may change the learning rate of an optimizer that has had a scheduler."""
        is_wrapped = _is_wrapped(self._optimizers[name])
        return self.has_scheduler(name, schedulers, extra) or (is_wrapped and _has_opaque(extra))

    def check(self, schedulers: Callable[[], Iterable[Any]], extra: Mapping[str, Any], *, where: str) -> None:
        """Check the optimizers that got a scheduler since the last check.

        Args:
            schedulers: returns the attached schedulers.
            extra: the other attached objects, which may include schedulers.
            where: the call, for the message.

        Raises:
            InvalidArgument: if a scheduler is certainly missing; it names the optimizer.
        """
        for name in [each for each in self._unused if _is_wrapped(self._optimizers[each])]:
            if self._unused[name] and not self.has_scheduler(name, schedulers(), extra) and not _has_opaque(extra):
                raise InvalidArgument(
                    where,
                    expected=f"the scheduler of {name}, which has wrapped its step()",
                    found="nothing attached that could have its state",
                    fix="attach(..., scheduler=scheduler), or pass it under extra=, otherwise a resume would restart it; if "
                    "the scheduler is no longer in use, make a new optimizer",
                )
            del self._unused[name]

    def has_scheduler(self, name: str, schedulers: Iterable[Any], extra: Mapping[str, Any]) -> bool:
        """Whether one of the schedulers may work on this optimizer; one that is not torch's may work on several."""
        others = [other for other in self._optimizers.values() if other is not self._optimizers[name]]
        known = [*schedulers, *filter(_is_scheduler, map(bare, extra.values()))]
        return not all(_is_torchs(each) and _is_one_of(getattr(each, "optimizer", None), others) for each in known)


def hyperparameters(optimizers: Mapping[str, OptimizerPart], *, scheduled: Container[str]) -> dict[str, Any]:
    """Contract key -> plain value, for the current value of each hyperparameter in each group of every optimizer.

    The value is ``"live"`` for a hyperparameter that a scheduler changes. The keys of the main optimizer start with
    ``optimizer.``, those of another with ``attached.<its name>.``.

    Args:
        optimizers: component -> optimizer.
        scheduled: the optimizers that an attached object may schedule; in others, the values that a scheduler has left are
            recorded as plain values.
    """
    found: dict[str, Any] = {}
    for name, part in optimizers.items():
        prefix = "optimizer." if name == "optimizer" else f"attached.{name}."
        signs = SCHEDULED if name in scheduled else {}
        if name == "optimizer":
            found["optimizer.kind"] = kind_of(part.optimizer)
        found |= _settings(part, prefix, signs, set())
    return checked_contract(found)


def late_schedules(
    optimizer: torch.optim.Optimizer | None, names: Callable[[], Mapping[int, str]], known: Container[str]
) -> dict[str, Any]:
    """The base rates in the main optimizer's groups from schedulers made after the attach; they are settings, not state."""
    groups = [] if optimizer is None else [group for group in optimizer.param_groups if "initial_lr" in group]
    if not groups:
        return {}
    by_id = names()
    found: dict[str, Any] = {}
    for group in groups:
        label = min((by_id[id(parameter)] for parameter in group["params"]), default="")
        found[f"optimizer.groups[{label!r}].initial_lr"] = _setting(group["initial_lr"])
    return {key: value for key, value in found.items() if key not in known}


def _settings(part: OptimizerPart, prefix: str, signs: Mapping[str, frozenset[str]], seen: set[int]) -> dict[str, Any]:
    """The hyperparameters in the groups of an optimizer and of the optimizers that it wraps, each group once."""
    found: dict[str, Any] = {}
    for group, live in zip(groups_of(part.optimizer, part.names), part.optimizer.param_groups, strict=True):
        if id(live) in seen:
            continue
        seen.add(id(live))
        label = min(group.params, default="")
        moving = {key for sign, keys in signs.items() if sign in group.hyper for key in keys & set(group.hyper)}
        for key, value in group.hyper.items():
            found[f"{prefix}groups[{label!r}].{key}"] = "live" if key in moving else _setting(value)
    for name, inner in part.held().items():
        found |= _settings(inner, f"{prefix}held[{name!r}].", signs, seen)
    return found


def _setting(value: Any) -> Any:
    """A value in the form of a contract: for a tensor with several elements its dtype, shape and digest."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"{value.dtype}{list(value.shape)} {leaf_digest(value)}"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, list | tuple):
        return [_setting(each) for each in value]
    return {key: _setting(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def frozen(model: torch.nn.Module) -> list[str]:
    """The names of the frozen parameters.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> frozen(model)
        ['bias']
    """
    return sorted(name for name, parameter in named_tensors(model).params.items() if not parameter.requires_grad)


def bare(target: Any) -> Any:
    """The attached object; for a pair of its own methods, the object that they belong to."""
    return getattr(target[0], "__self__", target) if isinstance(target, tuple) and target else target


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a torch scheduler was made for it: each wraps ``step``, to check the order of the two ``step()`` calls."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _is_torchs(target: Any) -> bool:
    return type(target).__module__.startswith("torch.")


def _is_scheduler(target: Any) -> bool:
    """Whether an extra sets a learning rate. A ``step`` and a state do not prove it, since a ``GradScaler`` has both."""
    is_scheduler = isinstance(target, torch.optim.lr_scheduler.LRScheduler) or hasattr(target, "get_last_lr")
    return is_scheduler or isinstance(getattr(target, "optimizer", None), torch.optim.Optimizer)


def _has_opaque(extra: Mapping[str, Any]) -> bool:
    """Whether an extra may contain a hidden scheduler: an object of the user's, or a pair of functions."""
    plain = torch.nn.Module | torch.optim.Optimizer
    return any(not isinstance(each, plain) and not _is_torchs(each) for each in map(bare, extra.values()))


def _is_one_of(target: Any, those: list[torch.optim.Optimizer]) -> bool:
    return any(target is each for each in those)
