"""`pickle_of`: the pickle of values as `read_pickle` returns them, so that a program that unpickles makes those objects."""

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
_ALIKE: Final = frozenset(
    {"torch.distributed.checkpoint.metadata.TensorStorageMetadata"}
)  # each place has one of its own


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
    writer = _Writer()
    writer.put(value)
    return b"\x80\x02" + bytes(writer.found) + b"."


@final
class _Writer:
    def __init__(self) -> None:
        self.found = bytearray()
        self._memo: dict[object, bytes] = {}  # what refers to a text, a name or an object that was written
        self._texts: dict[int, bytes] = {}  # of objects that are written again as they are
        self._frames: dict[
            tuple[str, ...], list[bytes]
        ] = {}  # a class and the fields of its state -> what is before each value

    def put(self, value: Value) -> None:  # noqa: C901, PLR0912 - a table of kinds
        found, kind = self.found, type(value)
        if kind is str:
            again = self._memo.get(value)
            if again is None:
                self._first(value, _sized(b"X", value.encode("utf-8", "surrogatepass")))
            else:
                found += again
        elif kind is int:
            found += _integer(value)
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

    def _made(self, value: Made) -> None:
        if value.name == "persistent":
            self.put(value.args)
            self.found += b"Q"
            return
        shared = id(value) if value.name in _SHARED else None
        if shared is not None and shared in self._memo:
            self.found += self._memo[shared]
            return
        if value.name in _ALIKE and (text := self._texts.get(id(value))) is not None:
            self.found += text
            return
        state = value.state
        if value.is_new and shared is None and value.args == () and type(state) is dict and value.name not in _ALIKE:
            self._fields((value.name, *state), list(state.values()))
            return
        start, known = len(self.found), len(self._memo)
        self._name(value.name)
        self.put(value.args)
        self.found += b"\x81" if value.is_new else b"R"
        if value.state is not None:
            self.put(value.state)
            self.found += b"b"
        if shared is not None:
            self.found += self._remembered(shared)
        elif value.name in _ALIKE and len(self._memo) == known:
            self._texts[id(value)] = bytes(self.found[start:])

    def _fields(self, kind: tuple[str, ...], values: list[Any]) -> None:
        """An object of a class, and a state of these fields."""
        frame = self._frames.get(kind)
        if frame is None and all(text in self._memo for text in ((kind[0],), *kind[1:])):
            name, *keys = (self._memo[text] for text in ((kind[0],), *kind[1:]))
            self._frames[kind] = frame = [name + b")\x81}(", *keys]
        if frame is None:  # its texts come for the first time
            self._name(kind[0])
            self.found += b")\x81}("
            for key, each in zip(kind[1:], values, strict=True):
                self.put(key)
                self.put(each)
        else:
            self.found += frame[0]
            for again, each in zip(frame[1:], values, strict=True):
                self.found += again
                self.put(each)
        self.found += b"ub"

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


def _integer(value: int) -> bytes:
    if 0 <= value < _SHORT:
        return bytes((0x4B, value))
    if -(2**31) <= value < 2**31:
        return _LONG.pack(0x4A, value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _sized(opcode: bytes, data: bytes) -> bytes:
    return opcode + _SIZE.pack(len(data)) + data
