"""Param groups by FQN: which parameter has which hyperparameters, as a function of its name alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.state.state import ParamGroup

NameRule: TypeAlias = str | re.Pattern[str] | Callable[[str], bool]
GroupRule: TypeAlias = tuple[NameRule, Mapping[str, Any]]


def assign(names: Iterable[str], rules: tuple[GroupRule, ...]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Sort names into groups; the first rule that matches wins, and the rest comes last without overrides.

    Args:
        names: FQNs, in the model's order.
        rules: (predicate or regular expression, overrides) pairs; an expression is searched for in the name.

    Returns:
        (overrides, names) of each group that has a name, rules in their order.

    Examples:
        >>> assign(["a.weight", "a.bias"], ((r"bias$", {"weight_decay": 0.0}),))
        [({'weight_decay': 0.0}, ('a.bias',)), ({}, ('a.weight',))]
    """
    tests = [rule if callable(rule) else _search(rule) for rule, _ in rules]
    members: list[list[str]] = [[] for _ in (*rules, None)]
    for name in names:
        index = next((i for i, matches in enumerate(tests) if matches(name)), len(rules))
        members[index].append(name)
    overrides = [*(dict(hyper) for _, hyper in rules), {}]
    return [(hyper, tuple(group)) for hyper, group in zip(overrides, members, strict=True) if group]


def _search(rule: str | re.Pattern[str]) -> Callable[[str], Any]:
    try:
        return re.compile(rule).search
    except (re.error, TypeError) as error:
        raise InvalidArgument(
            f"groups: {rule!r}",
            expected="a regular expression, or a function of the name",
            found=str(error),
            fix="escape what is meant literally, as in r'\\(', or give a function",
        ) from error


def check_hyper(hyper: Mapping[str, Any], where: str) -> None:
    """Check that hyperparameters are values that a checkpoint can hold.

    Raises:
        InvalidArgument: for the first that is not a scalar, a tuple of scalars or a tensor.
    """
    for name, value in hyper.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        if not all(part is None or isinstance(part, bool | int | float | str | torch.Tensor) for part in parts):
            raise InvalidArgument(
                f"{where}[{name!r}]",
                expected="a scalar, a tuple of scalars, or a tensor",
                found=repr(value),
                fix="hyperparameters are part of the state and are saved with it; functions are not",
            )


def check_cover(groups: tuple[ParamGroup, ...], names: Iterable[str]) -> None:
    """Check that groups hold each of the names exactly once.

    Raises:
        InvalidState: naming what is missing, unknown or there twice.
    """
    held = Counter(name for group in groups for name in group.params)
    wanted = dict.fromkeys(names)
    wrong = {
        "missing": [name for name in wanted if name not in held],
        "unknown": [name for name in held if name not in wanted],
        "twice": sorted(name for name, count in held.items() if count > 1),
    }
    if any(wrong.values()):
        raise InvalidState(
            "state.optimizer.groups",
            expected="each parameter of the model in one group",
            found="; ".join(f"{kind}: {found}" for kind, found in wrong.items() if found),
            fix="make the optimizer state with init(params) of this model",
        )
