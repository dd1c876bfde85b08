"""`held_by`: lists what an object holds in attributes, containers and closures, without running its code."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch

from trainfold.core.printable import with_article
from trainfold.core.state.fqn import RECIPES

MANY: Final = 64  # a larger container is data: only its ends are read
END: Final = 8
SEQUENCES: Final = (list, tuple, deque)
_SETS: Final = (set, frozenset)
_OPAQUE: Final = (type, types.ModuleType, torch.Tensor, str, bytes, int, float, complex, type(None))


def held_by(value: Any, *, names: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield everything that an object holds, with the part of a path that leads to it.

    No code of the object runs: no property, no ``__getattr__``, no iterator of its class.

    Args:
        value: anything.
        names: whether to include the globals that a function names, and not only its closure.

    Examples:
        >>> list(held_by({"a": 1, "b": [2]}))
        [("['a']", 1), ("['b']", [2])]
        >>> from types import SimpleNamespace
        >>> list(held_by(SimpleNamespace(rng=3)))
        [('.rng', 3)]
    """
    if isinstance(value, _OPAQUE):
        return
    if isinstance(value, (dict, *SEQUENCES, *_SETS)):
        yield from _of_container(value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, names=names)
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield from _of_function(value.__func__, names=names)
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    yield from attributes(value)


def _of_container(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in _ends(list(dict.items(value))):
            yield f"[{_key(key)}]", child
    elif isinstance(value, SEQUENCES):
        length = len(value)
        for place, child in enumerate(_ends(list(value))):
            yield f"[{place if length <= MANY or place < END else length - 2 * END + place}]", child
    else:
        for child in _ends(list(value)):
            yield "[...]", child


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an instance, in ``__dict__`` and in ``__slots__``, without what `construct.on_meta` keeps in a module."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    if type(own) is dict and not isinstance(value, types.FunctionType | types.MethodType):
        for name, child in list(own.items()):
            if name != RECIPES:
                yield f".{name}", child
    for kind in type(value).__mro__:
        for name, member in list(vars(kind).items()) if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:  # not set
                    continue


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= MANY else [*items[:END], *items[-END:]]


def _key(key: object) -> str:
    return (
        repr(key)
        if isinstance(key, str | int | float | bool | type(None))
        else f"{with_article(type(key).__qualname__)}"
    )


def _of_function(function: Any, *, names: bool) -> Iterator[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not bound
            continue
    if names:
        for name in _named(code):
            if name in function.__globals__:
                yield f".{name}", function.__globals__[name]


def _named(code: types.CodeType) -> set[str]:
    """Return the names that a function uses, including those of nested functions."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_named, inner))
