"""`reachable`: the objects of a kind that a function or a loader holds, as far as Python lets one see."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_BUDGET = 20_000  # things looked at; a search that ends here has found what is near
_MANY = 5_000  # a container with more is data
_LEAVES = (torch.Tensor, torch.dtype, torch.device, torch.Generator, str, bytes, bytearray, int, float, complex, range)
_FOREIGN = ("builtins", "numpy", "asyncio", "threading", "logging", "re")


def reachable(start: object, kind: type[T]) -> list[T]:
    """The objects of a kind that can be reached, nearest first, each once; what is inside of one is not searched.

    Looked through are functions (what they closed over, their defaults, the globals and attributes of modules that they name),
    partials, methods, generators, containers, and the attributes of plain objects. What is created when it is asked for is not.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> reachable({"a": [layer, 3], "b": layer}, torch.nn.Module) == [layer]
        True
    """
    found: list[T] = []
    seen: set[int] = set()
    queue: deque[Any] = deque([start])
    while queue and len(seen) < _BUDGET:
        thing = queue.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, kind):
            found.append(thing)
        elif not isinstance(thing, (*_LEAVES, torch.nn.Module)):
            queue.extend(_parts(thing))
    return found


def _parts(thing: Any) -> Sequence[Any]:
    parts: Sequence[Any] = ()
    match thing:
        case None | types.ModuleType():
            pass
        case types.FunctionType() | types.MethodType() | functools.partial() | types.GeneratorType():
            parts = _held_by(thing)
        case weakref.ReferenceType():
            parts = [thing()]
        case dict() | types.MappingProxyType():
            parts = list(thing.values())
        case list() | tuple() | set() | frozenset() | deque():
            parts = list(thing)
        case type():
            parts = [value for value in vars(thing).values() if isinstance(value, torch.nn.Module)]
        case _ if type(thing).__module__.partition(".")[0] not in _FOREIGN:
            parts = _attributes(thing)
    return parts if len(parts) <= _MANY else ()


def _attributes(thing: Any) -> list[Any]:
    found = [type(thing), *getattr(thing, "__dict__", {}).values()]
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                found.append(getattr(thing, name, None))
    return found


def _held_by(thing: Any) -> list[Any]:
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.GeneratorType):
        return [] if thing.gi_frame is None else list(thing.gi_frame.f_locals.values())
    return _held_by_function(thing)


def _held_by_function(function: types.FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    names = list(_names(function.__code__))
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    for thing in named:
        if isinstance(thing, types.ModuleType):  # mymodel.net is a global of mymodel
            held += [vars(thing)[name] for name in names if name in vars(thing)]
    return held + named


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
