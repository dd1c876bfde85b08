"""The wire: a small value as JSON bytes for another rank of the same program, and back, without pickle.

It carries what JSON or attrs can hold, and batches of tensors and arrays; bytes follow the JSON as they are. Types are exact: a tuple comes back as a tuple, and an object of
attrs or a dataclass as its class, rebuilt field by field like a copy, without ``__init__``. No other class is looked up by its name.
"""

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import attrs
import numpy as np
import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import Json
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes

_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_PACKED: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {  # type -> its tag, and how it is packed
    tuple: ("tuple", list),
    dict: ("dict", lambda value: [[key, item] for key, item in value.items()]),
    set: ("set", list),
    frozenset: ("frozenset", list),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    Fraction: ("fraction", lambda value: [value.numerator, value.denominator]),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", dtype_name),
    np.ndarray: ("array", lambda value: [value.dtype.str, list(value.shape), value.tobytes()]),
    torch.Tensor: ("tensor", lambda value: [dtype_name(value.dtype), list(value.shape), bytes(tensor_bytes(value))]),
}
_UNPACKED: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: Fraction(*parts),
    "size": torch.Size,
    "dtype": lambda name: getattr(torch, name),
    "array": lambda parts: np.frombuffer(bytearray(parts[2]), np.dtype(parts[0])).reshape(parts[1]),
    "tensor": lambda parts: _tensor(*parts),
}


def to_wire(value: Any) -> bytes:
    r"""Encode a value as bytes.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, range, `fractions.Fraction`,
            `torch.Size`, `torch.dtype`, tensors on the CPU, arrays without objects, named tuples, and objects of attrs and
            dataclasses, nested to any depth.

    Raises:
        InvalidArgument: naming the type, for anything else.

    Examples:
        >>> to_wire({"lengths": (3, 4), "text": b"abc"})
        b'{"dict":[["lengths",{"tuple":[3,4]}],["text",{"bytes":3}]]}\nabc'
        >>> from_wire(to_wire({1: (float("inf"), b"x")}))
        {1: (inf, b'x')}
    """
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, blobs), separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"\n".join([text, b"".join(blobs)]) if blobs else text


def from_wire(data: bytes) -> Any:
    """Decode the bytes of `to_wire`: a copy of the value, equal and of the same types."""
    end = data.find(b"\n")  # there is none in the JSON
    text, blobs = (data, b"") if end < 0 else (data[:end], memoryview(data)[end + 1 :])
    return _decode(json.loads(text.decode("utf-8", "surrogatepass")), io.BytesIO(blobs))


def all_from_wire(data: Sequence[bytes]) -> list[Any]:
    """As `from_wire` of each. What is equal is decoded once if it cannot be changed: votes of 16,384 ranks took 70 ms.

    Examples:
        >>> all_from_wire([to_wire(1), to_wire((2, None)), to_wire(1)])
        [1, (2, None), 1]
    """
    found, known = [], {}
    for each in data:
        if each not in known:
            value = from_wire(each)
            if not _is_fixed(value):
                found.append(value)
                continue
            known[each] = value
        found.append(known[each])
    return found


def _is_fixed(value: Any) -> bool:
    """Whether nothing in a value can be changed, as far as is seen at once."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_fixed, value)))


def _encode(value: Any, blobs: list[bytes]) -> Json:
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(each, blobs) for each in value]
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if kind in _PACKED and _is_here(value):
        tag, packed = _PACKED[kind]
        return {tag: _encode(packed(value), blobs)}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _fields(kind) is not None and _class_of(name) is kind:
        return {"object": [name, {field: _encode(getattr(value, field), blobs) for field in _fields(kind) or ()}]}
    raise InvalidArgument(
        "what one rank gives to others",
        expected="a small value: what JSON can hold, tuples, bytes, CPU tensors, objects of attrs or dataclasses of a module",
        found=f"{kind.__module__}.{kind.__qualname__}",
        fix="give its parts, and errors as text",
    )


def _decode(node: Json, blobs: io.BytesIO) -> Any:
    """The value of a node. Bytes come in the order in which they were encoded."""
    if type(node) is list:  # most of what it holds is plain, and needs no call of its own
        return [each if type(each) in _PLAIN else _decode(each, blobs) for each in node]
    if type(node) is not dict:
        return node
    ((tag, content),) = node.items()
    if tag == "bytes":
        return blobs.read(content)
    if tag == "dict":
        return {
            key if type(key) in _PLAIN else _decode(key, blobs): each if type(each) in _PLAIN else _decode(each, blobs)
            for key, each in content
        }
    return _object(content, blobs) if tag == "object" else _UNPACKED[tag](_decode(content, blobs))


def _object(content: Any, blobs: io.BytesIO) -> Any:
    """The object with the name of a class and its fields."""
    name, values = content
    kind: Any = _class_of(name)
    fields = {
        field: each if type(each := values[field]) in _PLAIN else _decode(each, blobs) for field in _fields(kind) or ()
    }
    if issubclass(kind, tuple):
        return kind(**fields)
    rebuilt = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(rebuilt, field, value)
    return rebuilt


@lru_cache(maxsize=256)
def _fields(kind: Hashable) -> tuple[str, ...] | None:
    """The fields of a class of attrs, a dataclass or a named tuple; None for any other."""
    if isinstance(kind, type) and attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    return None


def _class_of(name: str) -> type | None:
    """The class of that name if it has fields. Its module is imported only if its package is loaded already."""
    module, _, path = name.partition(":")
    if module not in sys.modules and module.partition(".")[0] in sys.modules:
        import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and _fields(found) is not None else None


def _is_here(value: Any) -> bool:
    """Whether a tensor or an array is in CPU memory and fully described by dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized
    return not (isinstance(value, np.ndarray) and value.dtype.hasobject)


def _tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    """The tensor, except for its strides and whether it requires a gradient."""
    empty = torch.empty(shape, dtype=getattr(torch, dtype))
    if data:
        empty.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return empty
