"""The wire: a small value as bytes of JSON for another rank of the same program, and back, without pickle.

What JSON or attrs can hold, as `Collectives` says. Types come back exactly: a tuple is no list, and an attrs object is of its
class, rebuilt field by field as a copy is, without ``__init__``. No class is found that is not attrs' own kind.
"""

import base64
import json
import sys
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from typing import Any, Final

import attrs
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.scalars import Json
from trainfold.core.spec import dtype_name

_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_PACKED: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {  # type -> its tag, and how it becomes what has one
    tuple: ("tuple", list),
    dict: ("dict", lambda value: [[key, item] for key, item in value.items()]),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    set: ("set", list),
    frozenset: ("frozenset", list),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    Fraction: ("fraction", lambda value: [value.numerator, value.denominator]),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", dtype_name),
}
_UNPACKED: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "dict": dict,
    "bytes": base64.b64decode,
    "set": set,
    "frozenset": frozenset,
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: Fraction(*parts),
    "size": torch.Size,
    "dtype": lambda name: getattr(torch, name),
}


def to_wire(value: Any) -> bytes:
    """The bytes of a value.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, range, `fractions.Fraction`,
            `torch.Size`, `torch.dtype`, and attrs objects, nested at will.

    Raises:
        InvalidArgument: naming the type, for anything else.

    Examples:
        >>> to_wire({"lengths": (3, 4)})
        b'{"dict":[["lengths",{"tuple":[3,4]}]]}'
        >>> from_wire(to_wire({1: (float("inf"), b"x")}))
        {1: (inf, b'x')}
    """
    return json.dumps(_encode(value), separators=(",", ":")).encode("utf-8", "surrogatepass")


def from_wire(data: bytes) -> Any:
    """The value that another rank's `to_wire` was given: equal, of the same types, and a copy."""
    return _decode(json.loads(data.decode("utf-8", "surrogatepass")))


def _encode(value: Any) -> Json:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(each) for each in value]
    if kind in _PACKED:
        tag, packed = _PACKED[kind]
        return {tag: _encode(packed(value))}
    if attrs.has(kind):
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _class_of(name) is kind:
            return {"attrs": [name, *(_encode(getattr(value, field.name)) for field in attrs.fields(kind))]}
    raise InvalidArgument(
        "what one rank gives to others",
        expected="a small value: what JSON can hold, tuples, bytes, attrs objects of a module's own classes",
        found=f"{kind.__module__}.{kind.__qualname__}",
        mend="give its parts; tensors go through all_sum, errors as text",
    )


def _decode(node: Json) -> Any:
    if type(node) is list:
        return [_decode(each) for each in node]
    if type(node) is not dict:
        return node
    ((tag, content),) = node.items()
    if tag != "attrs":
        return _UNPACKED[tag](_decode(content))
    name, *values = content
    kind: Any = _class_of(name)
    rebuilt = object.__new__(kind)
    for field, value in zip(attrs.fields(kind), values, strict=True):
        object.__setattr__(rebuilt, field.name, _decode(value))
    return rebuilt


def _class_of(name: str) -> type | None:
    """The attrs class of that name; its module is imported only if it is of a package that is in use already."""
    module, _, path = name.partition(":")
    if module not in sys.modules and module.partition(".")[0] in sys.modules:
        import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and attrs.has(found) else None
