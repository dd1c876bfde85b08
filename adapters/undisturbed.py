"""`undisturbed`: a block in which modules are in evaluation mode and after which nothing has moved (Q06).

Modules are found through the function that will call them: what it is, is bound to, has closed over, or names.
"""

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfold.adapters.rng import bound_device, preserved_rng

_DEPTH = 4
_MANY = 1_000
_FOREIGN = ("builtins", "numpy", "torch")


@contextmanager
def undisturbed(modules: Iterable[torch.nn.Module], data: object) -> Iterator[None]:
    """Run a block without gradients, with modules in evaluation mode; then put everything back, also when it raises.

    Put back are the mode of each submodule, whether gradients are recorded, the global random streams of Python, NumPy, torch
    and the modules' device, the generators of ``data``, and its position where it has ``state_dict`` and ``load_state_dict``.

    Args:
        modules: to be evaluated.
        data: what will be iterated: a loader, or anything else.
    """
    parts = [part for module in modules for part in module.modules()]
    modes = [(part, part.training) for part in parts]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserved_rng(bound_device(tensors)))
        for generator in _generators(data):
            stack.callback(generator.set_state, generator.get_state())
        if callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None)):
            stack.callback(data.load_state_dict, data.state_dict())  # type: ignore[attr-defined]
        stack.callback(_restore_modes, modes)
        for module in modules:
            module.eval()
        yield


def modules_of(function: object) -> list[torch.nn.Module]:
    """The modules that a function can reach in few steps, each once, in the order in which they are found.

    Examples:
        >>> model = torch.nn.Linear(1, 1)
        >>> modules_of(lambda batch: model(batch)) == modules_of(model) == [model]
        True
    """
    found: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    level = [function]
    for _ in range(_DEPTH):
        level = [thing for thing in level if id(thing) not in seen]
        seen.update(map(id, level))
        found.update((id(thing), thing) for thing in level if isinstance(thing, torch.nn.Module))
        level = [part for thing in level for part in _parts(thing)]
    found.update((id(thing), thing) for thing in level if isinstance(thing, torch.nn.Module))
    return list(found.values())


def _parts(thing: Any) -> list[Any]:
    """What a function or a plain object holds; nothing of a module, whose submodules follow it."""
    parts: list[Any] = []
    match thing:
        case torch.nn.Module() | type() | types.ModuleType() | torch.Tensor():
            pass
        case functools.partial():
            parts = [thing.func, *thing.args, *thing.keywords.values()]
        case types.MethodType():
            parts = [thing.__self__, thing.__func__]
        case types.FunctionType():
            parts = _held_by(thing)
        case dict():
            parts = list(thing.values())
        case list() | tuple() | set() | frozenset():
            parts = list(thing)
        case _ if type(thing).__module__.partition(".")[0] not in _FOREIGN:
            slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
            parts = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    return parts if len(parts) <= _MANY else []


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _held_by(function: types.FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    held += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    if hasattr(function, "__wrapped__"):
        held.append(function.__wrapped__)
    return held


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _restore_modes(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def _generators(data: Any) -> list[torch.Generator]:
    """The generators that a loader draws its order and its workers' seeds from."""
    batches = getattr(data, "batch_sampler", None)
    holders = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = {id(generator): generator for holder in holders if (generator := getattr(holder, "generator", None))}
    return [generator for generator in generators.values() if isinstance(generator, torch.Generator)]
