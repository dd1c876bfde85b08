"""`reachable`: the objects of a kind that a function or a loader holds, as far as Python lets one see without running any of it."""

import contextvars
import functools
import gc
import itertools
import os
import sys
import sysconfig
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from trainfold.adapters.evaluation.generators import LAZY

T = TypeVar("T")
_BUDGET = 100_000  # things looked into
_MANY = 5_000  # a container with more is data
_FEW = 100
_TRIES = 8
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_ITERATORS = (*LAZY, reversed, type(iter([])), type(iter(())))
_LEAVES = (torch.Tensor, torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, range, type(None))
_FOREIGN = frozenset({"builtins", "numpy", "asyncio", "threading", "logging", "re", "typing", "abc"})
_LIBRARIES = _FOREIGN | {"functools", "torch", "trainfold"}
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def reachable(start: object, kind: type[T] | tuple[type[T], ...], *, fix: str) -> list[T]:
    """The objects of a kind that can be reached, nearest first, each once; what is inside of one is not searched, large containers last.

    Looked into are functions (what they closed over, their defaults, the globals and attributes of modules that they name),
    methods and properties of classes, partials, generators, maps, containers, and attributes. What is made when it is asked for is
    not: no attribute is computed, and no container's own way to iterate is used. Of functions of installed packages, what they name is
    looked at only in the package that ``start`` is of.

    Args:
        start: a function, a loader, anything.
        kind: the class of what is wanted, or several.
        fix: what to do where there is too much to look at: a warning says it.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> reachable({"a": [layer, 3], "b": layer}, torch.nn.Module, fix="name it") == [layer]
        True
    """
    own = _packages_of(start)
    found: list[T] = []
    seen = {id(start): start}  # kept, so that nothing else comes to lie where one of them was
    queue: deque[Any] = deque([start])
    data: deque[Any] = deque()  # what large containers hold comes last
    while queue or data:
        thing = queue.popleft() if queue else data.popleft()
        if issubclass(type(thing), kind):
            found.append(thing)
            continue
        if issubclass(type(thing), torch.nn.Module):
            continue
        is_large = _size(thing) > _FEW
        for part in _parts(thing, own):
            if issubclass(type(part), _LEAVES) or id(part) in seen:
                continue
            if len(seen) >= _BUDGET:
                message = f"evaluate looked at {_BUDGET:,} objects behind a {type(start).__name__} and stopped: deeper ones are not seen; {fix}"
                warnings.warn(message, stacklevel=2)
                return found
            seen[id(part)] = part
            (data if is_large else queue).append(part)
    return found


def _parts(thing: Any, own: frozenset[str]) -> Iterable[Any]:
    kind = type(thing)
    parts: Iterable[Any] = ()
    if issubclass(kind, dict):
        parts = _copied(thing, dict.values)
    elif issubclass(kind, _CONTAINERS):
        parts = _copied(thing, next(each.__iter__ for each in _CONTAINERS if issubclass(kind, each)))
    elif issubclass(kind, types.MappingProxyType):
        parts = list(thing.values())
    elif kind is types.FunctionType:
        parts = _of_function(thing, own)
    elif kind in _CALLABLES:
        parts = _CALLABLES[kind](thing)
    elif issubclass(kind, weakref.ReferenceType):
        parts = [thing()]
    elif issubclass(kind, _ITERATORS):
        parts = gc.get_referents(thing)
    elif issubclass(kind, type):
        parts = _of_class(thing)
    if _home(kind) not in _FOREIGN and not issubclass(kind, types.ModuleType | type):
        parts = itertools.chain(parts, _attributes(thing))
    return parts


def _size(thing: Any) -> int:
    """How many things a container has, without asking a method of its own."""
    return next((each.__len__(thing) for each in (dict, *_CONTAINERS) if issubclass(type(thing), each)), 0)


def _copied(thing: Any, iterate: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """What is in a container now; another thread may be changing it."""
    for _ in range(_TRIES):
        try:
            return list(iterate(thing)) if _size(thing) <= _MANY else []
        except RuntimeError:  # it changed
            continue
    return []


def _attributes(thing: Any) -> Iterator[Any]:
    yield type(thing)
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception:  # noqa: BLE001 it has none, or does not show it
        attributes = None
    if type(attributes) is dict:
        yield from _copied(attributes, dict.values)
    for kind in type(thing).__mro__:
        for member in list(vars(kind).values()):
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
    values = [value for each in own for value in list(vars(each).values())]
    unwrapped = [value.__func__ if type(value) in (staticmethod, classmethod) else value for value in values]
    return [value.fget if type(value) is property else value for value in unwrapped]


def _of_function(function: types.FunctionType, own: frozenset[str]) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    if _is_library(function, own):
        return held  # what it names is the library's own
    names = list(dict.fromkeys(_names(function.__code__)))
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    named += [sys.modules[name] for name in names if name in sys.modules]  # imported where it is used
    held += named
    modules = [thing for thing in held if type(thing) is types.ModuleType]
    for module in modules:  # package.module.net: grows while it is gone through
        attributes = [vars(module)[name] for name in names if name in vars(module)]
        held += attributes
        modules += [each for each in attributes if type(each) is types.ModuleType and each not in modules]
    return held


def _packages_of(start: Any) -> frozenset[str]:
    """The packages of a function, or of an object's class, and of what it wraps: wherever they lie, they are the user's own."""
    packages = set()
    for _ in range(_TRIES):
        is_function = type(start) is types.FunctionType
        packages.add(_package(start) if is_function else _home(start if isinstance(start, type) else type(start)))
        if type(start) is types.MethodType:
            start = start.__func__
        elif type(start) is functools.partial:
            start = start.func
        elif (is_function or _home(type(start)) == "functools") and hasattr(start, "__wrapped__"):
            start = start.__wrapped__
        else:
            break
    return frozenset(packages) - _LIBRARIES


def _package(function: types.FunctionType) -> str:
    name = function.__globals__.get("__name__")
    return name.partition(".")[0] if type(name) is str else ""


def _is_library(function: types.FunctionType, own: frozenset[str]) -> bool:
    path, package = function.__code__.co_filename, _package(function)
    if package in own or path.startswith("<"):  # "<doctest ...>" is the user's
        return False
    return package in _LIBRARIES or path.startswith(_STDLIB) or any(folder in path for folder in _INSTALLED)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_CALLABLES: dict[type, Any] = {
    types.BuiltinMethodType: lambda method: [method.__self__],
    contextvars.ContextVar: lambda variable: [variable.get(None)],
    types.MethodType: lambda method: [method.__self__, method.__func__],
    functools.partial: lambda partial: [partial.func, *partial.args, *partial.keywords.values()],
    types.GeneratorType: lambda generator: (
        [] if generator.gi_frame is None else list(generator.gi_frame.f_locals.values())
    ),
}
