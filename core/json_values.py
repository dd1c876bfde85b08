r"""The JSON form of leaves other than tensors: exact for every int, float, str and bytes, and without pickle.

Plain JSON where JSON is exact, a tagged object where it is not::

    None, True, "text"        null, true, "text"
    7, -2**53                 7, -9007199254740992        beyond 2**53: {"int": "9007199254740993"}
    0.1, -0.0, 1e300          0.1, -0.0, 1e+300           a number with "." or "e" is a float
    NaN, infinity             {"float": "7ff8000000000000"}   the IEEE 754 bits, in hex, most significant byte first
    b"\x00"                  {"bytes": "AA=="}
    numpy.float32(1)          {"numpy": ["float32", "0000803f"]}   little-endian bytes
"""

import base64
import binascii
import json
import math
import reprlib
import struct
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from trainfold.core.errors import CheckpointHostile, UnsupportedLeaf

Json: TypeAlias = Any
EXACT_INT = 2**53
SCALARS = frozenset({bool, int, float, str})
_KINDS = frozenset({*SCALARS, bytes, Counter})
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def shown(value: object) -> str:
    """The start of a value's repr, however large or deep the value is; `repr` itself fails for hostile values.

    Examples:
        >>> shown([[[[[[]]]]]]), shown({"t": "0"})
        ('[[[[...]]]]', "{'t': '0'}")
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write out an int of thousands of digits
        return f"a very large {type(value).__name__}"


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)


def canonical_json(value: Json) -> bytes:
    """The bytes of a JSON value: no spaces, ASCII, keys in their order.

    Examples:
        >>> canonical_json({"a": [1, 0.5, None]})
        b'{"a":[1,0.5,null]}'
    """
    return _ENCODER.encode(value).encode()


def encode_scalar(leaf: Any, path: str) -> Json:
    """The JSON form of a scalar leaf.

    Raises:
        UnsupportedLeaf: for a type that has no exact form; subclasses (enums, for one) are refused, not flattened.

    Examples:
        >>> encode_scalar(2**60, "n"), encode_scalar(float("inf"), "x"), encode_scalar(b"a", "b")
        ({'int': '1152921504606846976'}, {'float': '7ff0000000000000'}, {'bytes': 'YQ=='})
    """
    kind = type(leaf)
    if leaf is None or kind in (bool, str):
        return leaf
    if kind is int:
        return leaf if abs(leaf) <= EXACT_INT else {"int": str(leaf) if abs(leaf) < 10**4000 else hex(leaf)}
    if kind is float:
        return leaf if math.isfinite(leaf) else {"float": struct.pack(">d", leaf).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(leaf).decode()}
    if kind is Counter:
        return {"counter": [[encode_scalar(key, path), encode_scalar(count, path)] for key, count in leaf.items()]}
    import numpy as np

    if isinstance(leaf, np.generic) and leaf.dtype.kind in "biufc":
        return {"numpy": [leaf.dtype.name, leaf.astype(leaf.dtype.newbyteorder("<")).tobytes().hex()]}
    raise _unsupported(kind, path)


def scalar_kind(leaf: Any, path: str) -> str:
    """The name of a scalar's type, as fingerprints have it.

    Raises:
        UnsupportedLeaf: for a type that has no exact form.

    Examples:
        >>> scalar_kind(None, "x"), scalar_kind(1, "x"), scalar_kind(Counter(), "x")
        ('none', 'int', 'counter')
    """
    kind = type(leaf)
    if leaf is None or kind in _KINDS:
        return "none" if leaf is None else kind.__name__.lower()
    import numpy as np

    if isinstance(leaf, np.generic):
        return f"numpy.{leaf.dtype}"
    raise _unsupported(kind, path)


def decode_scalar(node: Json, path: str) -> Any:
    """The inverse of `encode_scalar`.

    Raises:
        CheckpointHostile: for a form that `encode_scalar` never writes.

    Examples:
        >>> decode_scalar({"int": "1152921504606846976"}, "n") == 2**60
        True
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, dict) and len(node) == 1:
        ((tag, value),) = node.items()
        reader = _READERS.get(tag)
        if reader is not None:
            try:
                return reader(value, path)
            except (ValueError, TypeError, struct.error, binascii.Error, AttributeError, RecursionError) as error:
                raise _malformed(path, node) from error
    raise _malformed(path, node)


def _int(value: str, _path: str) -> int:
    return int(value, 16 if value.lstrip("-").startswith("0x") else 10)


def _float(value: str, _path: str) -> float:
    (found,) = struct.unpack(">d", bytes.fromhex(value))
    return float(found)


def _bytes(value: str, _path: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _counter(value: list[list[Json]], path: str) -> "Counter[Any]":
    return Counter({decode_scalar(key, path): decode_scalar(count, path) for key, count in value})


def _numpy(value: list[str], _path: str) -> Any:
    import numpy as np

    name, data = value
    if name not in _numpy_names():  # numpy.dtype itself reads much more than names
        raise ValueError(name)
    dtype = np.dtype(name)
    (found,) = np.frombuffer(bytes.fromhex(data), dtype=dtype.newbyteorder("<")).astype(dtype)
    return found


@cache
def _numpy_names() -> frozenset[str]:
    import numpy as np

    return frozenset(np.dtype(code).name for code in np.typecodes["All"] if np.dtype(code).kind in "biufc")


def _unsupported(kind: type[Any], path: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        path,
        expected="a tensor, a numpy array, None, bool, int, float, str or bytes",
        found=f"{kind.__module__}.{kind.__qualname__}",
        fix="turn it into one of these before it enters the state: nothing is pickled",
    )


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "int": _int,
    "float": _float,
    "bytes": _bytes,
    "counter": _counter,
    "numpy": _numpy,
}
SCALAR_TAGS = frozenset(_READERS)


def _malformed(path: str, node: Json) -> CheckpointHostile:
    return CheckpointHostile(
        path,
        expected="a scalar in the form of the format's specification",
        found=shown(node),
        fix="do not use this checkpoint; fall back to an older one",
    )
