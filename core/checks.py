"""Checks of arguments, made before anything is touched: numbers, choices, names and mappings."""

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.json_values import shown

T = TypeVar("T")

_EXAMPLES = {
    "policy": "{'dtype': 'adapt'}",
    "contract": "{'tokenizer': 'v2'}",
    "about": "{'trainfold.step': '120'}",
    "reset": "{'rng': 'a new seed on purpose'}",
}


def count(  # noqa: PLR0913 - keywords
    where: str,
    value: object,
    *,
    fix: str,
    least: int = 1,
    below: int | None = None,
    expected: str | None = None,
    error: type[TrainfoldError] = InvalidArgument,
) -> int:
    """A whole number in range, as a plain int; a bool or a number of another type is refused.

    Args:
        where: the argument's name, for the message.
        value: what the caller passed.
        fix: the next move, for the message.
        least: the smallest number allowed.
        below: the first number that is too large; None for no limit.
        expected: the range in words, if the message needs others.
        error: the class to raise.

    Raises:
        InvalidArgument: or ``error``, for anything else.

    Examples:
        >>> count("every", 500, fix="count optimizer steps")
        500
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (below is None or value < below):
        return int(value)
    text = f"an int >= {least}" if below is None else f"an int in [{least}, {below})"
    raise error(where, expected=expected or text, found=shown(value), fix=fix)


def positive(where: str, value: object, *, fix: str, least: float | None = None, expected: str | None = None) -> float:
    """A finite number above 0, or from ``least`` on, as a float; it may be numpy's, or a tensor of one element.

    Args:
        where: the argument's name, for the message.
        value: what the caller passed.
        fix: the next move, for the message.
        least: the smallest number allowed; None for any above 0.
        expected: the range in words, if the message needs others.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> positive("every_secs", 600, fix="count seconds"), positive("min_delta", 0, least=0, fix="use 0.0")
        (600.0, 0.0)
    """
    found = real_given(value)
    if found is not None and math.isfinite(found) and (found > 0 if least is None else found >= least):
        return found
    text = "a finite number > 0" if least is None else f"a finite number >= {least}"
    raise InvalidArgument(where, expected=expected or text, found=shown(value), fix=fix)


def choice(where: str, value: object, known: Sequence[T], *, fix: str) -> T:
    """One of the values listed.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> choice("tail", "drop", ("raise", "drop", "step"), fix="say what to do")
        'drop'
    """
    for each in known:
        if type(value) is type(each) and value == each:
            return each
    raise InvalidArgument(where, expected=f"one of {known}", found=shown(value), fix=fix)


def names_given(components: object) -> tuple[str, ...] | None:
    """Component names, each once, in order; None for all, and a single string for one name.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> names_given(["model", "rng", "model"]), names_given("model"), names_given(None)
        (('model', 'rng'), ('model',), None)
    """
    if components is None:
        return None
    names = (components,) if isinstance(components, str) else components
    names = tuple(names) if isinstance(names, Iterable) else names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(
            "components",
            expected="names, or None",
            found=shown(components),
            fix="list them, as in ['model', 'trainer']",
        )
    return tuple(dict.fromkeys(names))


def document(where: str, value: object, *, fix: str) -> Mapping[str, Any]:
    """A mapping from text, such as the contents of a configuration.

    Raises:
        InvalidArgument: for anything else, such as the path of its file.

    Examples:
        >>> document("config", {"model_type": "llama"}, fix="pass what is in config.json")
        {'model_type': 'llama'}
    """
    if isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
        return value
    raise InvalidArgument(where, expected="a mapping from text, as json reads it", found=shown(value), fix=fix)


def nearest(names: Iterable[str], known: Iterable[str]) -> str:
    """The question "did you mean ...?" for names that are misspelt, to put before a fix; empty if no known name is close.

    Examples:
        >>> nearest(["modell", "x"], ["model", "optimizer"])
        "did you mean 'model'? "
    """
    known = list(known)
    near = [match for name in names for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
    return f"did you mean {' and '.join(map(repr, dict.fromkeys(near)))}? " if near else ""


def mapping_given(name: str, given: object, *, values: type = object) -> dict[str, Any]:
    """A mapping from text; empty for None.

    Args:
        name: the argument, for the message.
        given: what the caller passed.
        values: the type of its values.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> mapping_given("reset", None), mapping_given("policy", {"dtype": "adapt"}, values=str)
        ({}, {'dtype': 'adapt'})
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(value, values) for key, value in given.items()
    ):
        raise InvalidArgument(
            name,
            expected="a mapping from text" + (" to text" if values is str else ""),
            found=shown(given),
            fix=f"pass a dict, as in {name}={_EXAMPLES.get(name, {})}, or None",
        )
    return dict(given)


def real_given(value: object) -> float | None:
    """A real number, possibly numpy's or a tensor of one element, as a float; None for anything else.

    Examples:
        >>> import numpy as np, torch
        >>> real_given(torch.tensor(0.5)), real_given(np.float32(2)), real_given("1"), real_given(True)
        (0.5, 2.0, None, None)
    """
    if not isinstance(value, numbers.Real):
        import numpy as np
        import torch  # late: most numbers are plain, and commands that read a run import no torch

        if isinstance(value, torch.Tensor | np.ndarray) and value.shape.count(1) == len(value.shape):
            value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None
