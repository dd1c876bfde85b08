"""Param groups by FQN: which parameter has which hyperparameters, by its name or its tensor."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.state.state import ParamGroup

NameRule: TypeAlias = str | re.Pattern[str] | Callable[[str], object] | Callable[[str, torch.Tensor], object]
GroupRule: TypeAlias = tuple[NameRule, Mapping[str, Any]]
Matcher: TypeAlias = Callable[[str, torch.Tensor], object]
"""A rule that has been checked: true for the name and the tensor of a parameter that the group takes."""


def assign(
    params: Mapping[str, torch.Tensor], groups: tuple[tuple[Matcher, Mapping[str, Any]], ...]
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Sort parameters into groups. The first rule that matches wins; parameters without one come last, without overrides.

    Args:
        params: FQN -> tensor, in the model's order.
        groups: (matcher, overrides) pairs.

    Returns:
        (overrides, names) of each group that has a parameter, in the order of the rules.

    Examples:
        >>> assign({"a.weight": torch.ones(1), "a.bias": torch.ones(1)}, ((matcher(r"bias$"), {"weight_decay": 0.0}),))
        [({'weight_decay': 0.0}, ('a.bias',)), ({}, ('a.weight',))]
    """
    members: list[list[str]] = [[] for _ in (*groups, None)]
    for name, value in params.items():
        index = next((i for i, (matches, _) in enumerate(groups) if matches(name, value)), len(groups))
        members[index].append(name)
    overrides = [*(dict(hyper) for _, hyper in groups), {}]
    return [(hyper, tuple(group)) for hyper, group in zip(overrides, members, strict=True) if group]


def matcher(rule: NameRule) -> Matcher:
    """Return a rule as a function of the name and the tensor.

    A function that can be called with one argument gets the name. One that needs two gets the tensor too. A builtin whose
    signature Python does not know gets the name.

    Args:
        rule: a regular expression, searched for in the name; or a function.

    Raises:
        InvalidArgument: for an expression that does not compile, or anything that takes neither one nor two arguments.

    Examples:
        >>> bool(matcher("bias$")("a.bias", torch.ones(2))), matcher(lambda name, p: p.dim() < 2)("a.weight", torch.ones(2, 2))
        (True, False)
    """
    if not callable(rule):
        try:
            return functools.partial(_found, re.compile(rule))
        except (re.error, TypeError) as error:
            raise _not_a_rule(rule, str(error)) from error
    function: Any = rule  # its arity, which no type checker sees, is decided here
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin, such as the method of a set
        return functools.partial(_named, function)
    if _takes(signature, "name"):
        return functools.partial(_named, function)
    if _takes(signature, "name", "tensor"):
        matches: Matcher = function
        return matches
    raise _not_a_rule(rule, f"a function of {signature}")


def _found(pattern: re.Pattern[str], name: str, _: torch.Tensor) -> object:
    return pattern.search(name)


def _named(rule: Callable[[str], object], name: str, _: torch.Tensor) -> object:
    return rule(name)


def _takes(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _not_a_rule(rule: object, found: str) -> InvalidArgument:
    return InvalidArgument(
        f"groups: {shown(rule)}",
        expected="a regular expression, or a function of the name, or of the name and the tensor",
        found=f"{shown(rule)}: {found}" if found else shown(rule),
        fix="escape literal characters, as in r'\\(', or pass a function, as in lambda name, p: p.dim() < 2",
    )


def check_hyper(hyper: Mapping[str, Any], where: str) -> None:
    """Check that hyperparameters are values that a checkpoint can hold.

    Raises:
        InvalidArgument: for the first value that is not a scalar, a tuple of scalars or a tensor.
    """
    for name, value in hyper.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        if not all(part is None or isinstance(part, bool | int | float | str | torch.Tensor) for part in parts):
            raise InvalidArgument(
                f"{where}[{name!r}]",
                expected="a scalar, a tuple of scalars, or a tensor",
                found=repr(value),
                fix="pass a plain value: hyperparameters are saved with the state, and functions cannot be",
            )


def check_partition(groups: tuple[ParamGroup, ...], names: Iterable[str]) -> None:
    """Check that the groups contain each name exactly once.

    Raises:
        InvalidState: naming the parameters that are missing, unknown or listed twice.
    """
    listed = Counter(name for group in groups for name in group.params)
    wanted = dict.fromkeys(names)
    wrong = {
        "missing": [name for name in wanted if name not in listed],
        "unknown": [name for name in listed if name not in wanted],
        "twice": sorted(name for name, count in listed.items() if count > 1),
    }
    if any(wrong.values()):
        raise InvalidState(
            "state.optimizer.groups",
            expected="each parameter of the model in one group",
            found="; ".join(f"{kind}: {found}" for kind, found in wrong.items() if found),
            fix="make the optimizer state with init(params) of this model",
        )
