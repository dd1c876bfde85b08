"""`text_of`: what a metric is, as text that is the same in every process: ranks and checkpoints compare it."""

import functools
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import attrs

_PLAIN = (str, bytes, int, float, complex, bool, Fraction, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def text_of(value: Any) -> str:
    """A metric, or one of its fields, as text: kinds, fields and their values, and neither addresses nor the order of a set.

    Examples:
        >>> from trainfold.core.metrics.topk import TopK
        >>> text_of(TopK(5))
        'trainfold.core.metrics.topk.TopK(k=5, ignore_index=-100)'
        >>> text_of({"b": frozenset({2, 1}), "a": max})
        "{'a': builtins.max, 'b': frozenset(1, 2)}"
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        text = "{" + ", ".join(sorted(f"{text_of(key)}: {text_of(item)}" for key, item in value.items())) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(map(text_of, value)) if isinstance(value, list | tuple) else sorted(map(text_of, value))
        text = f"{type(value).__name__}({', '.join(items)})"
    elif isinstance(value, functools.partial):
        text = f"partial({text_of(value.func)}, {text_of(value.args)}, {text_of(value.keywords)})"
    elif hasattr(value, "__qualname__"):
        text = f"{value.__module__}.{value.__qualname__}"
    elif attrs.has(type(value)):
        fields = (f"{field.name}={text_of(getattr(value, field.name))}" for field in attrs.fields(type(value)))
        text = f"{text_of(type(value))}({', '.join(fields)})"
    else:
        shown = "" if "__repr__" not in _methods(type(value)) else f": {_ADDRESS.sub('', repr(value))}"
        text = text_of(type(value)) + shown
    return text


def _methods(kind: type) -> set[str]:
    return {name for each in kind.__mro__ if each is not object for name in vars(each)}
