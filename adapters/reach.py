"""`reachable`: the objects of a kind that a function or a loader holds, as far as Python lets one see without running any of it."""

import functools
import gc
import itertools
import sys
import sysconfig
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_BUDGET = 100_000  # things looked into
_MANY = 5_000  # a container with more is data
_LEAVES = (torch.Tensor, torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, range, type(None))
_FOREIGN = frozenset({"builtins", "numpy", "asyncio", "threading", "logging", "re", "typing", "abc", "functools"})
_LIBRARIES = _FOREIGN | {"torch", "trainfold"}
_FOLDERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))  # Python's, and trainfold's own
_INSTALLED = ("site-packages", "dist-packages")
_LAZY = (map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice)


def reachable(start: object, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """The objects of a kind that can be reached, nearest first, each once; what is inside of one is not searched.

    Looked into are functions (what they closed over, their defaults, the globals and attributes of modules that they name),
    methods and properties of classes, partials, generators, maps, containers, and attributes. What is made when it is asked for is
    not: no attribute is computed, and no container's own way to iterate is used.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> reachable({"a": [layer, 3], "b": layer}, torch.nn.Module) == [layer]
        True
    """
    found: list[T] = []
    seen: set[int] = {id(start)}
    queue: deque[Any] = deque([start])
    while queue:
        thing = queue.popleft()
        if issubclass(type(thing), kind):
            found.append(thing)
            continue
        if issubclass(type(thing), torch.nn.Module):
            continue
        for part in _parts(thing):
            if issubclass(type(part), _LEAVES) or id(part) in seen:
                continue
            if len(seen) >= _BUDGET:
                message = (
                    "evaluate looked at 100,000 objects for modules and generators; name the model: modules=[model]"
                )
                warnings.warn(message, stacklevel=2)
                return found
            seen.add(id(part))
            queue.append(part)
    return found


def _parts(thing: Any) -> Iterable[Any]:
    kind = type(thing)
    parts: Iterable[Any] = ()
    if issubclass(kind, dict):
        parts = dict.values(thing) if dict.__len__(thing) <= _MANY else ()
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        base = next(each for each in (list, tuple, set, frozenset, deque) if issubclass(kind, each))
        parts = base.__iter__(thing) if base.__len__(thing) <= _MANY else ()
    elif issubclass(kind, types.MappingProxyType):
        parts = list(thing.values())
    elif kind in _CALLABLES:
        parts = _CALLABLES[kind](thing)
    elif issubclass(kind, weakref.ReferenceType):
        parts = [thing()]
    elif issubclass(kind, _LAZY):
        parts = gc.get_referents(thing)
    elif issubclass(kind, type):
        parts = _of_class(thing)
    if _home(kind) not in _FOREIGN and not issubclass(kind, types.ModuleType | type):
        parts = itertools.chain(parts, _attributes(thing))
    return parts


def _attributes(thing: Any) -> Iterator[Any]:
    yield type(thing)
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # noqa: BLE001 it has none, or does not show it
        attributes = None
    if type(attributes) is dict and len(attributes) <= _MANY:
        yield from attributes.values()
    for kind in type(thing).__mro__:
        for member in vars(kind).values():
            if type(member) is types.MemberDescriptorType and _home(kind) not in _FOREIGN:
                try:
                    yield member.__get__(thing)
                except AttributeError:  # a slot without a value
                    continue


def _home(kind: type) -> str:
    """The package that a class is of."""
    module = kind.__module__
    return module.partition(".")[0] if type(module) is str else "builtins"


def _of_class(kind: type) -> list[Any]:
    """The functions and values of a class and its bases, as far as they are not of a library that has no models."""
    own = [each for each in kind.__mro__ if _home(each) not in _LIBRARIES]
    values = [value for each in own for value in vars(each).values()]
    unwrapped = [value.__func__ if type(value) in (staticmethod, classmethod) else value for value in values]
    return [value.fget if type(value) is property else value for value in unwrapped]


def _of_function(function: types.FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    if _is_library(function):
        return held  # what it names is the library's own
    names = list(dict.fromkeys(_names(function.__code__)))
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    named += [sys.modules[name] for name in names if name in sys.modules]  # imported where it is used
    held += named
    modules = [thing for thing in named if type(thing) is types.ModuleType]
    for module in modules:  # package.module.net: grows while it is gone through
        attributes = [vars(module)[name] for name in names if name in vars(module)]
        held += attributes
        modules += [each for each in attributes if type(each) is types.ModuleType and each not in modules]
    return held


def _is_library(function: types.FunctionType) -> bool:
    path = function.__code__.co_filename
    return path.startswith(_FOLDERS) or any(name in path for name in _INSTALLED)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_CALLABLES: dict[type, Any] = {
    types.FunctionType: _of_function,
    types.MethodType: lambda method: [method.__self__, method.__func__],
    functools.partial: lambda partial: [partial.func, *partial.args, *partial.keywords.values()],
    types.GeneratorType: lambda generator: [] if generator.gi_frame is None else generator.gi_frame.f_locals.values(),
}
