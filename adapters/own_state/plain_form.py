"""The plain form of state in arbitrary containers: dicts, lists, tensors and scalars, without pickle."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from trainfold.core.errors import InvalidState
from trainfold.core.json_values import SCALARS, shown

_TAG: Final = "__trainfold__"
_FACTORIES: Final[Mapping[str, Callable[[], Any]]] = {
    each.__name__: each for each in (dict, list, set, int, float, deque, OrderedDict)
}
_DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def to_plain(value: Any, names: Mapping[int, str]) -> Any:  # noqa: PLR0911 - one return for each container
    """Return the value in new dicts, lists and tuples; tensors are shared.

    A deque, a set, a dict with keys other than strings, a ``torch.dtype`` and a few more become a dict that names their
    type. A parameter of the model, or its ``id``, becomes its name, because neither has a meaning in another process. A
    value without a plain form is returned as it is, and a save refuses it by its path.

    Args:
        value: the state of an object.
        names: ``id(parameter)`` -> canonical name.

    Examples:
        >>> to_plain({"queue": deque([1], maxlen=2), "sizes": [torch.Size([3])]}, {})
        {'queue': {'__trainfold__': 'deque', 'items': [1], 'maxlen': 2}, 'sizes': [{'__trainfold__': 'size', 'items': [3]}]}
    """
    kind = type(value)
    if value is None or kind in SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return {_TAG: "parameter", "name": names[id(value)]} if id(value) in names else with_layout(value)
    if kind in (list, tuple):
        return kind(to_plain(each, names) for each in value)
    if kind in (dict, OrderedDict):
        items = _items(value, names)
        return items if kind is dict else {_TAG: "odict", "of": items}
    if kind is defaultdict:
        factory = value.default_factory
        known = factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory
        made = None if factory is None else factory.__name__
        return {_TAG: "defaultdict", "factory": made, "of": _items(value, names)} if known else value
    if kind is deque:
        return {_TAG: "deque", "items": [to_plain(each, names) for each in value], "maxlen": value.maxlen}
    if kind in (set, frozenset):
        items = [to_plain(each, names) for each in value]
        return {_TAG: kind.__name__, "items": sorted(items, key=repr)}  # the order of a set differs between processes
    if kind is torch.Size:
        return {_TAG: "size", "items": list(value)}
    if kind in (torch.dtype, torch.device):
        return {_TAG: kind.__name__, "name": str(value)}
    return value


def from_plain(value: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of a plain form: the inverse of `to_plain`. Containers are new; tensors are shared.

    Args:
        value: a plain form.
        parameters: canonical name -> parameter.

    Raises:
        InvalidState: for a form that `to_plain` never returns, or a parameter that does not exist.

    Examples:
        >>> from_plain({"queue": {"__trainfold__": "deque", "items": [1], "maxlen": 2}}, {})
        {'queue': deque([1], maxlen=2)}
    """
    if isinstance(value, list | tuple):
        return type(value)(from_plain(each, parameters) for each in value)
    if not isinstance(value, Mapping):
        return value
    if _TAG not in value:
        return {key: from_plain(each, parameters) for key, each in value.items()}
    try:
        return _tagged(value, parameters)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InvalidState(
            "a value that an object keeps",
            expected="the plain form of a container, with parameters that this run has",
            found=shown(dict(value)),
            fix="build the objects as they were when the state was saved, or use another checkpoint",
        ) from error


def with_layout(tensor: torch.Tensor, usual: torch.Tensor | None = None) -> Any:
    """Return a tensor, with its strides if a load would not restore them: kernels round differently in another layout.

    Args:
        tensor: any tensor.
        usual: the tensor whose layout a load gives it; None for a contiguous layout.

    Examples:
        >>> form = with_layout(torch.zeros(2, 3).t())
        >>> form["strides"], from_plain(form, {}).stride()
        ([1, 3], (1, 3))
    """
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and (usual is None or usual.is_contiguous())):
        return tensor
    is_usual = usual is not None and usual.shape == tensor.shape and usual.stride() == tensor.stride()
    if is_usual or not _is_dense(tensor.shape, tensor.stride()):  # a load drops gaps and overlaps
        return tensor
    return {_TAG: "strided", "tensor": tensor, "strides": list(tensor.stride())}


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are contiguous in memory, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _laid_out(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    if not _is_dense(tensor.shape, strides):
        raise ValueError(strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _items(value: Mapping[Any, Any], names: Mapping[int, str]) -> Any:
    """Return a dict if all keys are strings, and otherwise its pairs."""
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: to_plain(each, names) for key, each in value.items()}
    return {_TAG: "pairs", "items": [[_key(key, names), to_plain(each, names)] for key, each in value.items()]}


def _key(key: Any, names: Mapping[int, str]) -> Any:
    if type(key) is int and key in names:
        return {_TAG: "id", "name": names[key]}
    return to_plain(key, names)


def _tagged(value: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911 - one for each tag
    tag = value[_TAG]
    if tag == "parameter":
        return parameters[value["name"]]
    if tag == "id":
        return id(parameters[value["name"]])
    if tag in ("torch.dtype", "dtype"):
        return _DTYPES[value["name"]]
    if tag == "strided":
        return _laid_out(value["tensor"], value["strides"])
    if tag == "device":
        return torch.device(value["name"])
    if tag in ("odict", "defaultdict"):
        held = from_plain(value["of"], parameters)
        factory = value.get("factory")
        return OrderedDict(held) if tag == "odict" else defaultdict(factory and _FACTORIES[factory], held)
    items: Iterable[Any] = [from_plain(each, parameters) for each in value["items"]]
    if tag == "pairs":
        return dict(items)
    if tag == "deque":
        return deque(items, maxlen=value["maxlen"])
    kinds: Mapping[str, Callable[[Any], Any]] = {"set": set, "frozenset": frozenset, "size": torch.Size}
    return kinds[tag](items)
