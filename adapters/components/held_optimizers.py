"""Optimizer state outside its slots and groups: a ``state_dict`` of its class, nested optimizers, attributes."""

from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final

import attrs
import torch

from trainfold.adapters.components.component import kind_of
from trainfold.adapters.own_state.plain_form import to_plain
from trainfold.core.errors import InvalidState
from trainfold.core.json_values import SCALARS
from trainfold.core.printable import with_article

_TORCHS: Final = "torch.optim."
_TORCHS_OWN: Final = frozenset({"state", "param_groups", "defaults"})
_CONTAINERS: Final = (list, tuple, dict)
_PLAIN: Final = (
    *(bool, int, float, str, bytes, type(None), type, torch.Tensor, torch.nn.Module, torch.dtype, torch.device),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)
_DEPTH: Final = 4
_SMALL_NUMEL: Final = 64
_MANY: Final = 256


def held_optimizers(
    optimizer: torch.optim.Optimizer, around: Collection[torch.optim.Optimizer] = ()
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in the attributes of an optimizer, also inside containers and helper objects.

    Optimizers that the found ones hold are not included.

    Args:
        optimizer: for example, a Lookahead around an AdamW.
        around: the optimizers that hold this one, which it may refer to.

    Examples:
        >>> outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> outer.inner = torch.optim.Adam(outer.param_groups[0]["params"])
        >>> list(held_optimizers(outer))
        ['inner']
    """
    found: dict[str, torch.optim.Optimizer] = {}
    mine: set[int] | None = None
    for name, value in vars(optimizer).items():
        if name in _TORCHS_OWN or isinstance(value, _PLAIN) or (isinstance(value, _CONTAINERS) and not value):
            continue
        for path, each, is_inside in _within(value, name, 0, is_inside=False):
            if is_inside:  # a schedule may use a torch optimizer on its own number
                mine = _parameters(optimizer) if mine is None else mine
                if mine.isdisjoint(_parameters(each)):
                    continue
            found[path] = each
    if not found:
        return found
    outer = set(map(id, (optimizer, *around)))
    once = {id(each): name for name, each in reversed(found.items()) if id(each) not in outer}
    return {name: each for name, each in found.items() if once.get(id(each)) == name}


def _within(value: Any, path: str, depth: int, *, is_inside: bool) -> Iterator[tuple[str, torch.optim.Optimizer, bool]]:
    """Yield the optimizers in a value, each with its path and whether it is inside another object; does not enter them."""
    if isinstance(value, torch.optim.Optimizer):
        yield path, value, is_inside
    elif isinstance(value, _PLAIN) or depth > _DEPTH:
        return
    elif isinstance(value, _CONTAINERS):
        if len(value) <= _MANY:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in items:
                yield from _within(each, f"{path}[{key!r}]", depth + 1, is_inside=is_inside)
    elif hasattr(value, "__dict__"):
        for name, each in list(vars(value).items()):
            yield from _within(each, f"{path}.{name}", depth + 1, is_inside=True)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def nest_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and all optimizers that it holds, at any depth, each once, the outermost first."""
    found = [optimizer]
    for each in found:
        found += [inner for inner in held_optimizers(each).values() if all(inner is not known for known in found)]
    return found


def overrides_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class overrides ``state_dict()``, or a hook changes its result."""
    plain = torch.optim.Optimizer.state_dict
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return (
        type(optimizer).state_dict is not plain
        or "state_dict" in vars(optimizer)
        or any(vars(optimizer).get(each) for each in hooks)
    )


def own_state(optimizer: torch.optim.Optimizer) -> Any:
    """Return the result of ``state_dict()``.

    Raises:
        InvalidState: if it fails, naming the class.
    """
    try:
        return optimizer.state_dict()
    except Exception as error:
        kind = kind_of(optimizer)
        raise InvalidState(
            f"{kind}.state_dict()",
            expected="the state of the optimizer",
            found=f"{type(error).__qualname__}: {error}",
            fix=f"use {with_article(type(optimizer).__qualname__)} whose state_dict() works with this torch; without it no run can be resumed",
        ) from error


@final
@attrs.frozen
class AsAttached:
    """The settings of an optimizer when it was attached. What has appeared or changed since then is state (ADR-0010).

    Attributes:
        groups: the content of each group.
        attributes: the plain attributes, in their plain form.
        held: the settings of the optimizers that it holds.
    """

    groups: tuple[Mapping[str, Any], ...]
    attributes: Mapping[str, Any]
    held: Mapping[str, "AsAttached"]


def as_attached(optimizer: torch.optim.Optimizer, around: tuple[torch.optim.Optimizer, ...] = ()) -> AsAttached:
    """Record the settings of an optimizer.

    Raises:
        InvalidState: if it overrides ``state_dict()``, and the call fails.
    """
    if overrides_state_dict(optimizer):
        own_state(optimizer)
    inside = (*around, optimizer)
    return AsAttached(
        tuple(map(dict, optimizer.param_groups)),
        dict(_plain_attributes(optimizer)),
        {name: as_attached(each, inside) for name, each in held_optimizers(optimizer, around).items()},
    )


def is_given(attached: AsAttached | None, group: int, key: str, value: Any) -> bool:
    """Whether a value has been in a group since the optimizer was attached."""
    known = attached is not None and group < len(attached.groups)
    return known and attached is not None and attached.groups[group].get(key) is value


@final
class Attached:
    """The settings of each optimizer of a run when it was attached, by component."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.optim.Optimizer, AsAttached]] = {}

    def of(self, name: str, optimizer: torch.optim.Optimizer) -> AsAttached:
        """Return its settings at the first call; a component that was refused and is registered again counts from then on."""
        known = self._known.get(name)
        if known is None or known[0] is not optimizer:
            known = self._known[name] = (optimizer, as_attached(optimizer))
        return known[1]


def changed_attributes(optimizer: torch.optim.Optimizer, attached: AsAttached | None) -> dict[str, Any]:
    """Return the plain attributes that have changed since the optimizer was attached, such as a count of its steps."""
    if attached is None or type(optimizer).__module__.startswith(_TORCHS):
        return {}
    before = attached.attributes
    return {name: value for name, value in _plain_attributes(optimizer) if not _alike(value, before.get(name, _ABSENT))}


def _plain_attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield public attributes that are numbers, strings, or short containers of them; the class must save larger ones itself."""
    if type(optimizer).__module__.startswith(_TORCHS):
        return
    for name, value in vars(optimizer).items():
        if name[0] != "_" and name not in _TORCHS_OWN and _is_small(value, 0):
            form = to_plain(value, {})
            yield name, form.detach().clone() if isinstance(form, torch.Tensor) else form


def _is_small(value: Any, depth: int) -> bool:
    if value is None or type(value) in SCALARS:
        return True
    if type(value) is torch.Tensor:
        return depth == 0 and value.numel() <= _SMALL_NUMEL
    if type(value) in (list, tuple):
        return depth < 2 and len(value) <= _MANY and all(_is_small(each, depth + 1) for each in value)
    return (
        type(value) is dict
        and depth < 2
        and len(value) <= _MANY
        and all(type(key) is str and _is_small(each, depth + 1) for key, each in value.items())
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return repr(one) == repr(other)  # which distinguishes -0.0 from 0.0, and a NaN equals itself


_ABSENT: Final = object()
