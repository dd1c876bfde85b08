"""The dtypes of the format by name: how each is stored, and its size. Imports no torch: commands that read a run need it.

Every dtype that a safetensors reader for torch opens is stored under its own safetensors name. The few that such
readers lack are stored as an equally sized view (``STORED``): the manifest keeps the real dtype.
"""

from typing import final

import attrs


@final
@attrs.frozen
class StoredAs:
    """The representation of a torch dtype in a safetensors file.

    Attributes:
        name: the safetensors dtype.
        itemsize: bytes of one element of the torch dtype.
        parts: elements of the stored dtype in one of the torch dtype; 2 adds a last dimension of 2.
    """

    name: str
    itemsize: int
    parts: int = 1


STORED: dict[str, StoredAs] = {
    "bool": StoredAs("BOOL", 1),
    "uint8": StoredAs("U8", 1),
    "int8": StoredAs("I8", 1),
    "uint16": StoredAs("U16", 2),
    "int16": StoredAs("I16", 2),
    "uint32": StoredAs("U32", 4),
    "int32": StoredAs("I32", 4),
    "uint64": StoredAs("U64", 8),
    "int64": StoredAs("I64", 8),
    "float8_e4m3fn": StoredAs("F8_E4M3", 1),
    "float8_e5m2": StoredAs("F8_E5M2", 1),
    "float8_e4m3fnuz": StoredAs("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": StoredAs("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": StoredAs("U8", 1),
    "float4_e2m1fn_x2": StoredAs("U8", 1),
    "float16": StoredAs("F16", 2),
    "bfloat16": StoredAs("BF16", 2),
    "float32": StoredAs("F32", 4),
    "float64": StoredAs("F64", 8),
    "complex64": StoredAs("C64", 8),
    "complex128": StoredAs("F64", 16, parts=2),
}


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a safetensors file lists a tensor.

    Examples:
        >>> stored_shape("complex128", (3,)), stored_shape("float32", ())
        ((3, 2), ())
    """
    return (*shape, 2) if STORED[dtype].parts == 2 else shape


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor has, as an exact int whatever the shape says.

    Examples:
        >>> size_bytes("bfloat16", (3, 5)), size_bytes("int64", ())
        (30, 8)
    """
    total = STORED[dtype].itemsize
    for size in shape:
        total *= size
    return total
