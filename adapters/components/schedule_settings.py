"""Settings of a scheduler, as plain values for the resume contract; functions by their code and constants."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from trainfold.adapters.own_state.attributes import attributes as attributes_of
from trainfold.core.digest import digest_of
from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.json_values import Json, canonical_json, encode_scalar

# Attributes that change as a scheduler steps, or that follow from another setting of the same scheduler.
_MOVES: Final = frozenset(
    {"optimizer", "verbose", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse"}
    | {"_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "_schedule_phases"}
)
_OF_MODULES: Final = frozenset({*vars(torch.nn.Module()), "T_destination", "call_super_init", "dump_patches"})
_NO_CONFIG: Final = (type, types.ModuleType, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, Mapping, list, tuple)
_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_MOST_VALUES: Final = 64
_DEPTH: Final = 3


def scheduler_settings(scheduler: Any, path: str, *, knows_groups: bool) -> dict[str, Json]:
    """Return contract key -> plain value, for each setting of a newly made scheduler.

    A setting is a plain attribute, public or private, or a plain entry of ``state_dict()``, that does not change with a
    step. So no class needs special treatment. The key of a function ends with ``()``; its value is its code, its constants,
    and the plain values that it reads from outside. An object of a user's class, such as a config, contributes its plain
    attributes, each as ``cfg(Config).total``.

    Args:
        scheduler: the object.
        path: the prefix of the keys.
        knows_groups: whether its optimizer is attached, whose groups contain the base rates.

    The settings of an object that is not a torch scheduler are named ``<path>.own.<setting>``, because no replay can apply them.

    Examples:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> scheduler_settings(torch.optim.lr_scheduler.StepLR(sgd, 30, gamma=0.5), "s", knows_groups=True)
        {'s.gamma': 0.5, 's.step_size': 30}
    """
    state = scheduler.state_dict()
    values = {**(state if isinstance(state, Mapping) else {}), **_attributes(scheduler)}
    left_out = _MOVES | ({"base_lrs"} if knows_groups else set())
    found: dict[str, Json] = {}
    plainly = path if isinstance(scheduler, LRScheduler) else f"{path}.own"
    for name in sorted(name for name in values if isinstance(name, str) and name not in left_out):
        value = values[name]
        if name == "_schedulers":
            for number, inner in enumerate(value):
                found |= scheduler_settings(inner, f"{path}.schedulers[{number}]", knows_groups=knows_groups)
                found[f"{path}.schedulers[{number}].kind"] = type(inner).__qualname__
        elif functions := _functions_in(value):
            found[f"{path}.{name}()"] = [_function(each, _DEPTH) for each in functions]
        elif (plain := _plain(value)) is not _NONE:
            found[f"{plainly}.{name}"] = plain
        else:
            found |= _in_object(value, f"{path}.{name}")
    return found


def settings_of_object(target: Any, path: str) -> dict[str, Json]:
    """Return contract key -> plain value, for the settings of any other attached object: numbers, strings, functions.

    They come from its ``state_dict()`` and its attributes; for a module, from its attributes only, because its state is
    weights. There are at most 64 of them.

    Args:
        target: the object, when it is attached.
        path: the prefix of the keys.

    Examples:
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        >>> settings_of_object(scaler, "s")["s.growth_interval"]
        3
    """
    is_module = isinstance(target, torch.nn.Module)
    try:
        state = {} if is_module else target.state_dict()
    except Exception:  # noqa: BLE001 (a user's class: a capture that fails is reported at the first step)
        state = {}
    values = {**(state if isinstance(state, Mapping) else {}), **dict(own_attributes(target))}
    found: dict[str, Json] = {}
    for name in sorted(name for name in values if isinstance(name, str) and name not in _OF_MODULES):
        value = values[name]
        if isinstance(value, torch.nn.Module | torch.Tensor | np.ndarray) or name.lstrip("_") in values.keys() - {name}:
            continue
        if functions := _functions_in(value):
            found[f"{path}.{name}()"] = [_function(each, _DEPTH) for each in functions]
        elif isinstance(value, (*_PLAIN, list, tuple)) and (plain := _plain(value)) is not _NONE:
            found[f"{path}.{name}"] = plain
        if len(found) == _MOST_VALUES:
            break
    return found


def own_attributes(target: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an instance, without running its code."""
    for path, value in attributes_of(target):
        yield path.removeprefix("."), value


def _in_object(value: Any, path: str) -> dict[str, Json]:
    """Return the plain attributes of an object of a user's class, from which a scheduler may read its settings."""
    if isinstance(value, _NO_CONFIG) or type(value).__module__.split(".")[0] in ("torch", "numpy", "builtins"):
        return {}
    plain = [(name, _plain(each)) for name, each in sorted(own_attributes(value)) if name not in _MOVES]
    inside = f"{path}({type(value).__qualname__.rpartition('.')[2]})"
    return {f"{inside}.{name}": each for name, each in plain[:_MOST_VALUES] if each is not _NONE}


def _attributes(scheduler: Any) -> dict[str, Any]:
    """Return all attributes, except the one that a torch scheduler makes of its own methods."""
    return {name: value for name, value in own_attributes(scheduler) if name != "_scale_fn_ref"}


def _functions_in(value: Any) -> list[Callable[..., Any]]:
    if callable(value) and not isinstance(value, type | torch.nn.Module):
        return [value]
    if isinstance(value, list | tuple) and value and all(callable(each) for each in value):
        return list(value)
    return []


_NONE: Any = object()


def _plain(value: Any) -> Any:
    """Return the JSON form of a plain value, or a digest of a long one; `_NONE` for any other value."""
    try:
        found = _json(value)
    except (TypeError, UnsupportedLeaf):
        return _NONE
    size = len(found) if isinstance(found, list | dict) else 0
    return found if size <= _MOST_VALUES else f"{size} values, {digest_of(canonical_json(found))}"


def _json(value: Any) -> Json:
    if isinstance(value, torch.Tensor | np.generic) and (isinstance(value, np.generic) or value.numel() == 1):
        return _json(value.item())
    if isinstance(value, _PLAIN):
        return encode_scalar(value, "scheduler")
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    raise TypeError


def _function(function: Any, depth: int) -> Json:
    """Return a function as a plain value: its constants by name, and a digest of its code."""
    if isinstance(function, functools.partial):
        given = {str(number): each for number, each in enumerate(function.args)} | function.keywords
        return {"partial": _function(function.func, depth), **_values(given, depth)}
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if isinstance(code, types.CodeType):
        return {
            "code": digest_of(repr(_code(code)).encode("utf-8", "backslashreplace")),
            **_around(function, code, depth),
        }
    call = getattr(type(function), "__call__", None)  # noqa: B004 (not whether it is callable, but its code)
    if isinstance(call, types.FunctionType):
        return {"class": type(function).__qualname__, "call": _function(call, depth), **_values(vars(function), depth)}
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _code(code: types.CodeType) -> tuple[object, ...]:
    return code.co_code, tuple(map(_constant, code.co_consts)), code.co_names, code.co_varnames


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _code(value)
    # the order of a set differs between processes
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _around(function: Any, code: types.CodeType, depth: int) -> dict[str, Json]:
    """Return the values that a function reads from outside its code: defaults, closure cells and globals."""
    function = getattr(function, "__func__", function)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    closed = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
    named = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    positional = dict(
        zip(reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
    )
    return _values({**named, **closed, **positional, **(function.__kwdefaults__ or {})}, depth)


def _values(given: Mapping[str, Any], depth: int) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, value in sorted(given.items()):
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial) and depth:
            found[name] = _function(value, depth - 1)
        elif (plain := _plain(value)) is not _NONE:
            found[name] = plain
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (it raises if the cell is empty)
    except ValueError:
        return False
    return True
