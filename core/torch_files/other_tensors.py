"""`OtherTensor`: a tensor in a file of `torch.save` that is not a view of elements, such as a sparse one. It is known, named, and not read."""

from collections.abc import Mapping
from typing import Any, Final, final

import attrs

from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.printable import printable

_SHOWN: Final = 4
_OF_FUNCTIONS: Final = {
    "torch._utils._rebuild_sparse_tensor": ("a sparse tensor", "save tensor.to_dense()"),
    "torch._utils._rebuild_qtensor": ("a quantised tensor", "save tensor.dequantize(), or its int_repr() and scales"),
    "torch._utils._rebuild_nested_tensor": ("a nested tensor", "save the tensors of tensor.unbind()"),
    "torch._utils._rebuild_meta_tensor_no_storage": (
        "a tensor on meta, which has no values",
        "save it when it has some",
    ),
}
OTHER_NAMES: Final = frozenset({
    *_OF_FUNCTIONS, "torch.QInt8Storage", "torch.QUInt8Storage", "torch.QInt32Storage", "torch.per_tensor_affine", "torch.per_channel_affine",
    "torch.per_channel_affine_float_qparams",
})  # fmt: skip
"""What a pickle names to make them."""


@final
@attrs.frozen
class OtherTensor:
    """A tensor that is not read.

    Attributes:
        kind: what it is, in words.
        cure: what to save in its place.
    """

    kind: str
    cure: str


def other_tensor(function: str) -> OtherTensor | None:
    """What a function makes that a pickle would call; None if it makes something else.

    Args:
        function: with its module.
    """
    return OtherTensor(*_OF_FUNCTIONS[function]) if function in _OF_FUNCTIONS else None


def check_readable(values: Mapping[str, Any], where: str) -> None:
    """Refuse tensors that are not read.

    Args:
        values: name -> value.
        where: the file, for messages.

    Raises:
        UnsupportedLeaf: with their names.

    Examples:
        >>> check_readable({"w": OtherTensor("a sparse tensor", "save tensor.to_dense()")}, "x.pt")
        Traceback (most recent call last):
        trainfold.core.errors.UnsupportedLeaf: x.pt: w: expected elements in memory, as most tensors have them, found a sparse tensor; save tensor.to_dense(), or take other tensors of the file: prefix= or below= in Python, --key in commands
    """
    found = {name: each for name, each in values.items() if type(each) is OtherTensor}
    if found:
        names = [printable(name) for name in found]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        kinds, cures = (dict.fromkeys(getattr(each, what) for each in found.values()) for what in ("kind", "cure"))
        raise UnsupportedLeaf(
            f"{where}: {', '.join(names[:_SHOWN])}{more}", expected="elements in memory, as most tensors have them", found="; ".join(kinds),
            fix=f"{'; '.join(cures)}, or take other tensors of the file: prefix= or below= in Python, --key in commands")  # fmt: skip
