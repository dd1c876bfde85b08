"""`reachable`: the objects of a kind that a function or a loader references, a few levels deep, found without running its code."""

import contextvars
import functools
import gc
import os
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.core.printable import with_article

T = TypeVar("T")
_MOST = 20_000  # objects in all
_MANY = 5_000  # a container with more items is data
_FEW = 100
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_LEAVES = (torch.Tensor, torch.dtype, torch.device, str, bytes, bytearray, int, float, complex, range, type(None))
_OPAQUE = frozenset({"code", "frame", "cython_function_or_method"})  # these lead to all globals of a module
_CLOSED = frozenset({"numpy", "asyncio", "threading", "logging", "re", "typing", "abc", "frozen_importlib", "thread"})
_PLUMBING = frozenset({"builtins", "functools", "itertools", "collections", "weakref", "contextvars"})
_LIBRARIES = _CLOSED | _PLUMBING | {"torch", "trainfold"}
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def reachable(
    start: object, kind: type[T] | tuple[type[T], ...], *, levels: int, fix: str
) -> tuple[list[T], list[object]]:
    """The objects of a kind that can be reached, nearest first, each once; and the user's objects just beyond the last level.

    A level is a function or an object. A function leads to what it closes over, its defaults, and the globals and attributes of
    modules that it names; an object leads to its attributes and its class. Methods, partials, generators, maps, containers and
    classes are passed through and count for no level. No code of these objects runs, so an attribute that is computed, or an item
    that a container makes when it is asked for, is not seen. Containers of more than 100 items are searched last, and
    those of more than 5,000 not at all. A
    function of an installed package leads to what it names only if ``start`` is of that package.

    Args:
        start: a function, a loader, or any object.
        kind: the class to find, or several; an object of it is not searched.
        levels: how many functions and objects to go through.
        fix: the next move if there are too many objects; a warning says it.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> reachable({"a": [layer, 3], "b": layer}, torch.nn.Module, levels=1, fix="name it") == ([layer], [])
        True
    """
    own = _packages_of(start)
    found: list[T] = []
    beyond: list[object] = []
    near: list[Any] = [start]
    data: list[Any] = []  # the items of large containers, which are searched last
    seen = {id(start): start}  # kept alive, so that no new object gets an id of this dict
    for first in (near, data):
        layer = first
        for level in range(levels + 1):
            following: list[Any] = []
            for thing in layer:  # grows in this loop
                if issubclass(type(thing), kind):
                    found.append(thing)
                elif level == levels:
                    beyond += [thing] if first is not data and _is_users(thing, own) else []
                elif not issubclass(type(thing), torch.nn.Module):
                    is_large = first is not data and _size(thing) > _FEW
                    for part in _parts(thing, own):
                        if issubclass(type(part), _LEAVES) or id(part) in seen:
                            continue
                        if len(seen) >= _MOST:
                            message = f"evaluate looked at {_MOST:,} objects behind {with_article(type(start).__name__)} and saw no deeper ones; {fix}"
                            warn_for_all(message)
                            return found, []
                        seen[id(part)] = part
                        (data if is_large else following if _is_level(part) else layer).append(part)
            layer = following
    return found, beyond


def _parts(thing: Any, own: frozenset[str]) -> Iterable[Any]:
    """What an object references, as the garbage collector sees it: in one step, so that other threads may change it meanwhile."""
    kind = type(thing)
    if kind is types.FunctionType:
        return _of_function(thing, own)
    if issubclass(kind, weakref.ReferenceType):
        return [thing()]
    if kind is contextvars.ContextVar:
        return [thing.get(None)]
    if issubclass(kind, types.ModuleType) or kind.__name__ in _OPAQUE or _home(kind) in _CLOSED:
        return ()
    if issubclass(kind, type) and _home(thing) in _LIBRARIES:
        return ()
    return gc.get_referents(thing) if _size(thing) <= _MANY else ()


def _size(thing: Any) -> int:
    """How many items a container has, without calling a method of its own."""
    return next((each.__len__(thing) for each in _CONTAINERS if issubclass(type(thing), each)), 0)


def _is_level(thing: Any) -> bool:
    kind = type(thing)
    return kind is types.FunctionType or (_home(kind) not in _PLUMBING and not issubclass(kind, type))


def _is_users(thing: Any, own: frozenset[str]) -> bool:
    kind = type(thing)
    if kind is types.FunctionType:
        return not _is_library(thing, own)
    if issubclass(kind, torch.nn.Module | type) or _home(kind) in _LIBRARIES | sys.stdlib_module_names:
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return _home(kind) in own or not any(folder in path for folder in _INSTALLED)


def _home(kind: type) -> str:
    """The package of a class."""
    module = kind.__module__
    return module.partition(".")[0].lstrip("_") if type(module) is str else "builtins"


def _of_function(function: types.FunctionType, own: frozenset[str]) -> list[Any]:
    closed = [part for cell in function.__closure__ or () for part in gc.get_referents(cell)]
    held = [*closed, *(function.__defaults__ or ()), function.__kwdefaults__, vars(function)]
    if _is_library(function, own):
        return held  # the names in it are the library's own
    names = list(dict.fromkeys(_names(function.__code__)))
    held += [function.__globals__[name] for name in names if name in function.__globals__]
    held += [sys.modules[name] for name in names if name in sys.modules]  # imported where it is used
    modules = [thing for thing in held if type(thing) is types.ModuleType]
    for module in modules:  # package.module.net: grows in this loop
        attributes = [vars(module)[name] for name in names if name in vars(module)]
        held += attributes
        modules += [each for each in attributes if type(each) is types.ModuleType and each not in modules]
    return held


def _packages_of(start: Any) -> frozenset[str]:
    """The packages of a function, or of an object's class, and of what it wraps: these are the user's own, wherever they are installed."""
    packages = set()
    for _ in range(8):
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
