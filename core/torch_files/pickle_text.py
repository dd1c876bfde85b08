"""`pickle_of` and `PickleText`: the pickle of values as `read_pickle` returns them, so that a program that unpickles makes those objects."""

import struct
from typing import Any, Final, final

from trainfold.core.errors import UnsupportedLeaf
from trainfold.core.torch_files.pickle_machine import Made, Name, Value

_SHORT: Final = 256
_SIZE: Final = struct.Struct("<I")
_LONG_PUT: Final = struct.Struct("<BI")
_LONG: Final = struct.Struct("<Bi")
_SHARED: Final = frozenset(
    {"torch.Size", "torch.distributed.checkpoint.metadata.TensorProperties"}
)  # never changed, so that one may be in many places


def pickle_of(value: Value) -> bytes:
    r"""Return a pickle of protocol 2. Names and texts that come again are referred to.

    Args:
        value: None, numbers, text, bytes, lists, dicts and tuples of these, a `Name`, and a `Made` without items.

    Raises:
        UnsupportedLeaf: for another value.

    Examples:
        >>> pickle_of({"a": (1, None)})
        b'\x80\x02}(X\x01\x00\x00\x00aq\x00K\x01N\x86u.'
        >>> pickle_of(Made("torch.Size", ((2,),)))
        b'\x80\x02ctorch\nSize\nq\x00K\x02\x85\x85Rq\x01.'
    """
    text = PickleText()
    text.put(value)
    return text.whole()


@final
class PickleText:
    r"""A pickle that is being written, value by value. Between the calls a caller may add opcodes of its own.

    Attributes:
        found: the opcodes so far, without those at both ends.

    Examples:
        >>> text = PickleText()
        >>> text.put("a")
        >>> text.again("a")
        b'h\x00'
    """

    def __init__(self) -> None:
        self.found = bytearray()
        self._memo: dict[object, bytes] = {}  # what refers to a text, a name or an object that was written
        self._kept: list[Made] = []  # shared objects: the memo knows them by their `id`

    def whole(self) -> bytes:
        """The pickle, if one value was put."""
        return b"\x80\x02" + bytes(self.found) + b"."

    @property
    def remembered(self) -> int:
        """How many values can be referred to."""
        return len(self._memo)

    def again(self, value: Value) -> bytes | None:
        """What refers to a text, a `Name` or a shared object that was put; None if it was not."""
        key = (value.text,) if type(value) is Name else id(value) if type(value) is Made else value
        return self._memo.get(key)

    def put(self, value: Value) -> None:  # noqa: C901, PLR0912 - a table of kinds
        """Add a value.

        Raises:
            UnsupportedLeaf: as in `pickle_of`.
        """
        found, kind = self.found, type(value)
        if kind is str:
            again = self._memo.get(value)
            if again is not None:
                found += again
                return
            data, number = value.encode("utf-8", "surrogatepass"), len(self._memo)
            found += _LONG_PUT.pack(0x58, len(data))
            found += data
            if number < _SHORT:
                found += self._remembered(value)
            else:  # most texts, so without a call
                self._memo[value] = _LONG_PUT.pack(0x6A, number)
                found += _LONG_PUT.pack(0x72, number)
        elif kind is int:
            found += integer_text(value)
        elif kind is Made and value.items is None:
            self._made(value)
        elif kind is tuple:
            self._tuple(value)
        elif kind is bool:
            found += b"\x88" if value else b"\x89"
        elif kind is float:
            found += b"G" + struct.pack(">d", value)
        elif value is None:
            found += b"N"
        elif kind is bytes:
            found += _sized(b"B", value)
        elif kind is list:
            found += b"]("
            for each in value:
                self.put(each)
            found += b"e"
        elif kind is dict:
            found += b"}("
            for key, each in value.items():
                self.put(key)
                self.put(each)
            found += b"u"
        elif kind is Name:
            self._name(value.text)
        else:
            raise UnsupportedLeaf(kind.__qualname__, expected="numbers, text, lists, tuples and dicts", found=kind.__qualname__,
                                  fix="leave it out")  # fmt: skip

    def put_once(self, value: str) -> None:
        """Add a text that does not come again."""
        data = value.encode("utf-8", "surrogatepass")
        self.found += _LONG_PUT.pack(0x58, len(data))
        self.found += data

    def _made(self, value: Made) -> None:
        if value.name == "persistent":
            self.put(value.args)
            self.found += b"Q"
            return
        shared = id(value) if value.name in _SHARED else None
        if shared is not None and shared in self._memo:
            self.found += self._memo[shared]
            return
        self._name(value.name)
        self.put(value.args)
        self.found += b"\x81" if value.is_new else b"R"
        if value.state is not None:
            self.put(value.state)
            self.found += b"b"
        if shared is not None:
            self.found += self._remembered(shared)
            self._kept.append(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) > 3:
            self.found += b"("
        for each in value:
            self.put(each)
        self.found += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"

    def _name(self, text: str) -> None:
        again = self._memo.get((text,))
        if again is None:
            module, _, name = text.rpartition(".")
            self._first((text,), f"c{module}\n{name}\n".encode())
        else:
            self.found += again

    def _first(self, key: object, data: bytes) -> None:
        """Write a text or a name, and remember it; it is referred to when it comes again."""
        self.found += data
        self.found += self._remembered(key)

    def _remembered(self, key: object) -> bytes:
        """What gives the next number to what was written."""
        number = len(self._memo)
        if number < _SHORT:
            put, again = bytes((0x71, number)), bytes((0x68, number))
        else:
            put, again = _LONG_PUT.pack(0x72, number), _LONG_PUT.pack(0x6A, number)
        self._memo[key] = again
        return put


def integer_text(value: int) -> bytes:
    r"""What puts an integer.

    Examples:
        >>> integer_text(7), integer_text(-2)
        (b'K\x07', b'J\xfe\xff\xff\xff')
    """
    if 0 <= value < _SHORT:
        return bytes((0x4B, value))
    if -(2**31) <= value < 2**31:
        return _LONG.pack(0x4A, value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _sized(opcode: bytes, data: bytes) -> bytes:
    return opcode + _SIZE.pack(len(data)) + data
