"""`read_values`: the pickle of a file of `torch.save` as plain values, in which a tensor is where its bytes are and how they are seen."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, TypeGuard, final

import attrs

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, TrainfoldError
from trainfold.core.format.dtypes import STORED
from trainfold.core.printable import printable
from trainfold.core.torch_files.other_tensors import OTHER_NAMES, OtherTensor, other_tensor
from trainfold.core.torch_files.pickle_machine import Made, Name, Rows, read_pickle
from trainfold.core.torch_files.text_rows import DIMENSIONS, InsideRow, TensorRows

_STORAGES: Final = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16", "BFloat16": "bfloat16",
    "Float": "float32", "Double": "float64", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_UNTYPED: Final = "torch.storage.UntypedStorage"
_REBUILT: Final = {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")}  # fmt: skip
_TENSOR: Final = "torch._utils._rebuild_tensor_v2"
_KIND_AT: Final = len("torch._utils._rebuild_")
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_DICTS: Final = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_BUILTINS: Final = {f"{module}.{kind}" for module in ("builtins", "__builtin__") for kind in ("set", "frozenset", "dict", "list", "complex", "bytes")}  # fmt: skip
NAMES_OF_VALUES: Final = frozenset({
    *(f"torch.{name}Storage" for name in _STORAGES), *(f"torch.{name}" for name in STORED), *_REBUILT, *_BUILTINS, _UNTYPED,
    *_DICTS, *OTHER_NAMES, _FROM_TYPE, "_codecs.encode",
    "torch.Size", "torch.device", "torch.serialization._get_layout",
    "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
})  # fmt: skip
_EXPANDED_BYTES: Final = (
    256 << 20
)  # of a tensor that has more elements than its memory: a few bytes could ask for any size
_SEEN_AS: Final = ("conj", "neg")
_DEPTH: Final = 100
_SHARED: Final = 16  # names for each value that there is, at most: a few dicts that hold one another have more names than there are atoms
_LETTERS: Final = 1 << 28
_LIMIT: Final = 2**62
_FIX: Final = "write it again with torch.save of the tensors alone"


@final
@attrs.frozen
class StoredTensor:
    """A tensor in a file of `torch.save`.

    Attributes:
        storage: the name of the member with its bytes. Tensors that share memory have one.
        dtype: torch's name of it.
        shape: of the tensor.
        strides: in elements.
        start: the element of the storage that is its first.
        storage_bytes: the size of the storage.
        is_conjugate: whether the elements are the conjugates of those of the storage.
        is_negative: whether they are the negatives.
    """

    storage: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    storage_bytes: int
    is_conjugate: bool = False
    is_negative: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other, row by row."""
        steps = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        return all(size == 1 or stride == step for size, stride, step in steps)

    @property
    def elements(self) -> tuple[int, int]:
        """The first element of the storage that belongs to it, and one past the last; no element of a tensor without any."""
        if not all(self.shape):
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.start, self.start + last + 1


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie row by row.

    Examples:
        >>> row_major((2, 3, 4))
        (12, 4, 1)
    """
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(1, size)
    return tuple(reversed(found))


def read_values(data: bytes, where: str) -> Any:
    """Read a pickle of `torch.save`. Nothing is run, and no tensor is read.

    Args:
        data: the member `data.pkl`.
        where: the file, for messages.

    Returns:
        None, numbers, text, bytes, lists, tuples, sets and dicts; a dtype, a device and a layout are their text. Tensors are `StoredTensor`,
        or `OtherTensor` if they are sparse, quantised or have more elements than memory (but for expanded ones of up to 256 MiB, which are read).

    Raises:
        CheckpointHostile: if it names a class or a function that is not one of those by which torch writes such values.
        CheckpointDamaged: if it is cut off, or a tensor is not inside its memory.
    """
    try:
        return _Values(where).of(read_pickle(data, NAMES_OF_VALUES, where, persistent=True, rows=_rows), 0)
    except TrainfoldError:  # it is damaged, or refers to the inside of a row
        return _Values(where).of(read_pickle(data, NAMES_OF_VALUES, where, persistent=True), 0)


def _rows(data: bytes, memo: list[Any]) -> dict[str, Rows]:
    """What reads tensors that are whole in their memory."""

    def tensors(kind: Name, count: int, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[str], StoredTensor] | None:  # fmt: skip
        dtype = _STORAGES.get(kind.text.removeprefix("torch.").removesuffix("Storage"))
        if dtype is None or len(shape) != len(strides):
            return None
        memory_bytes = count * STORED[dtype].itemsize
        first, stop = StoredTensor("", dtype, shape, strides, start, memory_bytes).elements
        if (stop > first and stop > count) or prod(shape) > count:
            return None
        return lambda storage: StoredTensor(storage, dtype, shape, strides, start, memory_bytes)

    return {_TENSOR: TensorRows(data, memo, _TENSOR, tensors)}


class _Values:
    """Makes values of what a pickle says; each part once, however often it is referred to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._made: dict[int, Any] = {}
        self._reach: dict[
            tuple[str, tuple[int, ...], tuple[int, ...]], int
        ] = {}  # dtype, shape and strides -> bytes from the first element to the end of the last
        self._open: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:
        if type(value) not in (dict, list, tuple, Made):
            if type(value) is InsideRow:
                raise CheckpointDamaged(self._where, expected="a value", found="the inside of another one", fix=_FIX)
            return value.text.removeprefix("torch.") if type(value) is Name else value
        key = id(value)
        if key in self._made:
            return self._made[key]
        if type(value) is Made and value.name in _REBUILT and depth <= _DEPTH:
            self._made[key] = found = self._tensor(value, depth + 1)
            return found
        if depth > _DEPTH or key in self._open:
            raise CheckpointHostile(self._where, expected=f"values of at most {_DEPTH} levels", found="deeper ones, or one that holds itself", fix=_FIX)  # fmt: skip
        self._open.add(key)
        found = self._new(value, depth + 1)
        self._open.discard(key)
        self._made[key] = found
        return found

    def _new(self, value: Any, depth: int) -> Any:  # noqa: PLR0911 - a table of kinds
        if type(value) is dict:
            return {self._key(key): self.of(each, depth) for key, each in value.items()}
        if type(value) is not Made:
            return type(value)(self.of(each, depth) for each in value)
        if type(value.args) is not tuple:
            raise self._refused(value)
        if value.name in _DICTS:
            return {self._key(key): self.of(each, depth) for key, each in self._pairs(value)}
        if value.items is not None:
            raise self._refused(value)
        if value.name == _FROM_TYPE and len(value.args) > 2 and type(value.args[0]) is Name:
            return self._tensor(Made(value.args[0].text, value.args[2]), depth)  # what was set on it is left out
        if (other := other_tensor(value.name)) is not None:
            return other
        if value.name == "torch.Size" and len(value.args) == 1:
            return self.of(value.args[0], depth)
        return self._builtin(value)

    def _pairs(self, value: Made) -> list[tuple[Any, Any]]:
        """The keys and values of a dict that is made by a call."""
        pairs = list(value.items or ())
        if value.name == "collections.OrderedDict" and value.args:  # as older versions of Python wrote it
            first = value.args[0]
            if type(first) is not list or not all(type(each) in (list, tuple) and len(each) == 2 for each in first):
                raise self._refused(value)
            return [*map(tuple, first), *pairs]
        return pairs

    def _builtin(self, value: Made) -> Any:
        kind, args = value.name.rpartition(".")[2], value.args
        if kind == "encode" and len(args) == 2 and type(args[0]) is str and args[1] == "latin1":
            return args[0].encode("latin1", "replace")
        if kind == "bytes" and not args:
            return b""
        if kind in ("set", "frozenset") and len(args) == 1 and type(args[0]) is list:
            return frozenset(map(self._key, args[0]))
        if kind == "complex" and len(args) == 2 and all(type(each) is float for each in args):
            return complex(*args)
        if kind in ("device", "_get_layout") and args and all(type(each) in (str, int) for each in args):
            return ":".join(map(str, args))
        raise self._refused(value)

    def _key(self, key: Any) -> Any:
        if (
            type(key) is Made
            or (type(key) in (str, bytes) and len(key) > 4096)
            or type(key) in (list, dict, tuple, set)
        ):
            raise CheckpointHostile(
                self._where, expected="keys that are short plain values", found=type(key).__name__, fix=_FIX
            )
        return key.text if type(key) is Name else key

    def _tensor(self, value: Made, depth: int) -> StoredTensor | OtherTensor:
        kind, args = value.name[_KIND_AT:], value.args
        if value.name not in _REBUILT or type(args) is not tuple or value.items is not None:
            raise self._refused(value)
        if kind.startswith("parameter"):
            inner = self.of(args[0], depth) if args else None
            if not isinstance(inner, StoredTensor | OtherTensor):
                raise self._refused(value)
            return inner
        if len(args) < 4 or type(args[0]) is not Made or args[0].name != "persistent":
            raise self._refused(value)
        key, dtype, size_bytes = self._storage(args[0])
        if kind == "tensor_v3":
            dtype = args[6].text.removeprefix("torch.") if len(args) > 6 and type(args[6]) is Name else ""
        start, shape, strides = args[1], self._sizes(args[2]), self._sizes(args[3])
        if (
            shape is None
            or strides is None
            or len(shape) != len(strides)
            or not _is_count(start)
            or dtype not in STORED
        ):
            raise self._refused(value)
        bits = args[6 + (kind == "tensor_v3") :]  # torch's views that stand for other numbers than their storage has
        seen_as = bits[0] if bits and bits[0] is not None else {}
        if type(seen_as) is not dict or not all(
            key in _SEEN_AS and type(each) is bool for key, each in seen_as.items()
        ):
            raise self._refused(value)
        found = StoredTensor(
            key, dtype, shape, strides, start, size_bytes, *(seen_as.get(each, False) for each in _SEEN_AS)
        )
        kind_of = found.dtype, found.shape, found.strides
        reach = self._reach.get(kind_of)
        itemsize = STORED[found.dtype].itemsize
        if reach is None:
            first, stop = found.elements
            self._reach[kind_of] = reach = (stop - first) * itemsize
        if reach and start * itemsize + reach > size_bytes:
            raise CheckpointDamaged(self._where, expected=f"a tensor inside its memory of {found.storage_bytes} bytes",
                                    found=f"one up to element {found.elements[1]}", fix=_FIX)  # fmt: skip
        return _larger_than_memory(found, itemsize) or found

    def _sizes(self, value: Any) -> tuple[int, ...] | None:
        """Sizes or strides; None if they are others."""
        if type(value) is Made and value.name == "torch.Size" and type(value.args) is tuple and len(value.args) == 1:
            value = value.args[0]
        if type(value) is not tuple or len(value) > DIMENSIONS:
            return None
        for each in value:
            if type(each) is not int or not 0 <= each < _LIMIT:
                return None
        return value

    def _storage(self, made: Made) -> tuple[str, str, int]:
        """The member, the dtype and the bytes of a storage; without a dtype its size is in bytes."""
        args = made.args
        if type(args) is tuple and len(args) == 5 and args[0] == "storage" and type(args[1]) is Name and type(args[2]) is str and _is_count(args[4]):  # fmt: skip
            if args[1].text == _UNTYPED:
                return args[2], "", args[4]
            dtype = _STORAGES.get(args[1].text.removeprefix("torch.").removesuffix("Storage"))
            if dtype is not None:
                return args[2], dtype, args[4] * STORED[dtype].itemsize
        raise self._refused(made)

    def _refused(self, value: Made) -> CheckpointDamaged:
        return CheckpointDamaged(
            self._where, expected=f"{value.name} as torch writes it", found="other arguments", fix=_FIX
        )


def _larger_than_memory(found: StoredTensor, itemsize: int) -> OtherTensor | None:
    """What a tensor is that is not read because it has more elements than its memory; None for one that is read."""
    count = prod(found.shape) * itemsize
    if count <= found.storage_bytes:
        return None
    own = prod(size for size, stride in zip(found.shape, found.strides, strict=True) if stride) * itemsize
    if own > found.storage_bytes:
        return OtherTensor(
            f"a view whose parts overlap: {count:,} bytes in {found.storage_bytes:,}", "save tensor.contiguous()"
        )
    if count > _EXPANDED_BYTES:
        return OtherTensor(f"an expanded tensor of {count:,} bytes, of which {found.storage_bytes:,} are stored",
                           "save it before it is expanded")  # fmt: skip
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LIMIT


def flattened(value: Mapping[Any, Any], where: str, *, prefix: str = "") -> dict[str, Any]:
    """The values inside nested dicts by their keys, with dots between them. Lists and tuples are values.

    Raises:
        CheckpointDamaged: if two values get one name.
        CheckpointHostile: if there are too many of them.

    Examples:
        >>> flattened({"model": {"a.weight": 1, "b": {0: 2}}, "step": 3}, "x.pt")
        {'model.a.weight': 1, 'model.b.0': 2, 'step': 3}
    """
    known: dict[int, tuple[int, int]] = {}
    names = _names(value, known)
    if names > _SHARED * (values := sum(each for _, each in known.values())):
        raise _too_many(where, f"{names:,} for {values:,}")
    found: dict[str, Any] = {}
    letters, open_ones = 0, [(prefix, iter(value.items()))]
    while open_ones:
        start, rest = open_ones[-1]
        for key, each in rest:
            name = f"{start}{key}"
            if isinstance(each, dict) and each:
                open_ones.append((f"{name}.", iter(each.items())))
                break
            if name in found:
                raise CheckpointDamaged(where, expected="another name for each value", found=f"{printable(name)} twice", fix=_FIX)  # fmt: skip
            found[name] = each
            letters += len(name)
            if letters > _LETTERS:
                raise _too_many(where, f"more than {_LETTERS:,} characters")
        else:
            open_ones.pop()
    return found


def _names(value: Mapping[Any, Any], known: dict[int, tuple[int, int]]) -> int:
    """How many names the values in nested dicts get; ``known`` has that and the length of each dict, which is looked at once."""
    if id(value) not in known:
        inner = [_names(each, known) if isinstance(each, dict) and each else 1 for each in value.values()]
        known[id(value)] = sum(inner), len(inner)
    return known[id(value)][0]


def _too_many(where: str, found: str) -> CheckpointHostile:
    return CheckpointHostile(
        where,
        expected=f"at most {_SHARED} names for each value",
        found=f"{found}: dicts that are in several others",
        fix=_FIX,
    )
