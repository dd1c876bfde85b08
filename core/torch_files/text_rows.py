"""`PlaceRows` and `TensorRows`: rows of the large tables of a pickle. Each is matched as a whole, because to go through its opcodes takes several times as long."""

import re
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, TypeAlias, final

import attrs

from trainfold.core.torch_files.pickle_machine import Made, Name

_REF: Final = rb"(?:h.|j.{4})"
_SHORT_INT: Final = rb"(?:K.|M..|J.{4})"
_INT: Final = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
_TUPLE: Final = rb"\(?" + _SHORT_INT + rb"++[\x85-\x87t]"
_SIZES: Final = _TUPLE + rb"|\)"
_PUT: Final = rb"r(.{4})"
_LONG: Final = 256  # from this number on, remembered values have numbers of four bytes
_LIMIT: Final = 2**62
DIMENSIONS: Final = 1024
"""At most. One tuple of sizes may be referred to from many places, at each of which it is looked at."""

_LONGEST: Final = 2 + 5 * DIMENSIONS  # opcodes of sizes
_FORMS: Final = 16  # of rows, for each of which a pattern is compiled
_COUNTS: Final = {0x85: 1, 0x86: 2, 0x87: 3}  # opcode of a tuple -> its values
_FIELDS: Final = ("fqn", "offset", "index", "relative_path", "offset", "length")
_MADE_SIZE: Final = _REF + b"(?:" + _TUPLE + rb"\x94|\))\x85\x94R\x94"
_IN_FIELD: Final = {"fqn": _REF, "index": b"N|" + _INT, "relative_path": _REF, "length": _INT}


def _place(put: bytes) -> re.Pattern[bytes]:
    """An index, the class of a place, and the place, with the keys and values of their states."""
    begins, field = rb"\x81" + put + rb"\}" + put + rb"\(", b"(" + _REF + b")("
    value = b"N|" + _INT + b"|" + _REF + b")"
    first = field + _MADE_SIZE + b"|" + value if put else field + value
    return re.compile(
        begins + 3 * first + b"ub(" + _REF + rb")\)" + begins + 3 * (field + value) + b"(?:(" + _REF + b")N)?ub",
        re.DOTALL,
    )


_PLACES: Final = _place(b""), _place(rb"\x94")
_VALUES: Final = (2, 4, 6, 9, 11, 13)  # groups with values
_OBJECTS: Final = 7  # that a tensor is made of


def _tensor(word: bytes, kind: bytes, device: bytes, hooks: bytes) -> re.Pattern[bytes]:
    """The arguments of a tensor, and the call, with what refers to values that most tensors have in common."""
    storage = rb"\(" + word + kind + rb"(?:X(.)\x00\x00\x00([0-9]+)" + _PUT + b"|(" + _REF + b"))" + device + b"(" + _INT + b")t" + _PUT + b"Q"  # fmt: skip
    sizes = b"(" + _SIZES + b")(?:" + _PUT + b"|)"
    return re.compile(storage + b"(" + _INT + b")" + sizes + sizes + rb"[\x88\x89]" + hooks + rb"\)R" + _PUT + b"t" + _PUT + b"R" + _PUT, re.DOTALL)  # fmt: skip


_TENSOR: Final = _tensor(*(b"(?P<" + each + b">" + _REF + b")" for each in (b"word", b"type", b"device", b"hooks")))

Taken: TypeAlias = tuple[tuple[Any, ...], int, int]
"""The values that a class and what follows it leave on the stack, where the next opcode is, and how many objects these are."""

Sizes: TypeAlias = tuple[int, ...]
_MakePlace: TypeAlias = Callable[[str, int], tuple[Any, Any]]
_Made: TypeAlias = tuple[Callable[[str], Any], Sizes, Sizes] | None


@final
class InsideRow:
    """An object inside of a row, in the place of which it is remembered. A reader of the values that finds one reads the pickle again, opcode by opcode."""


_INSIDE: Final = InsideRow()


@final
@attrs.frozen
class _Form:
    """How rows are written.

    Attributes:
        pattern: of a row; its groups are the values.
        order: takes those in the order of the fields.
        is_put: whether objects are remembered.
        again: what is before the next row.
    """

    pattern: re.Pattern[bytes]
    order: Callable[[Any], tuple[bytes, ...]]
    is_put: bool
    again: bytes


@final
@attrs.frozen
class _Call:
    """How tensors are made.

    Attributes:
        pattern: of the arguments and the call.
        kind: of the storage.
        again: what is before the next one.
        made: size of the storage, first element, shape and strides -> what makes such tensors, and the shape and strides.
    """

    pattern: re.Pattern[bytes]
    kind: Name
    again: bytes
    made: dict[tuple[bytes, ...], _Made] = attrs.field(factory=dict)


@final
class PlaceRows:
    """Where chunks of tensors are, after the class of an index and an empty tuple: pairs of an index and a place, each an object with a state of plain fields.

    Args:
        data: the pickle.
        memo: its remembered values.
        classes: the names of the classes of an index, and of a place.
        make: returns what makes the key and the value of a name and a start, for the first index, the file and the size; None if they are not as they should be.
    """

    after: Final = 0x29

    def __init__(
        self,
        data: bytes,
        memo: list[Any],
        classes: tuple[frozenset[str], frozenset[str]],
        make: Callable[[Sizes | None, Any, int], _MakePlace | None],
    ) -> None:
        self._data, self._memo, self._classes, self._make = data, memo, classes, make
        self._last: _Form | None = None
        self._learnt = 0
        self._made: dict[tuple[bytes, ...], tuple[_MakePlace, tuple[Any, ...]] | None] = {}

    def at(self, at: int) -> Taken | None:
        """The rows from here on; None if there is none."""
        data, memo, values, objects, begin = self._data, self._memo, list[Any](), 0, at
        form = self._last
        while True:
            found = None if form is None else form.pattern.match(data, at)
            if found is None:
                form = self._form(at)
                found = None if form is None else form.pattern.match(data, at)
            if form is None or found is None:
                break
            groups = found.groups()
            name, index, _, path, first, length = form.order(groups)
            kind, start, text = (index, path, length), _integer(first), memo[int.from_bytes(name[1:], "little")]
            made = self._made[kind] if kind in self._made else self._of_kind(kind)
            if made is None or start is None or type(text) is not str:
                break
            make, inner = made
            values += make(text, start)
            objects += 4 + len(inner)
            if form.is_put:
                memo += (_INSIDE, _INSIDE, *inner, _INSIDE, _INSIDE)
            begin = found.end()
            if not data.startswith(form.again, begin):
                break
            at = begin + len(form.again)
        return (tuple(values), begin, objects) if values else None

    def _form(self, at: int) -> "_Form | None":
        """The form of the row that begins here; None if it is something else, or there were too many forms."""
        data, is_put = self._data, self._data[at + 1] == 0x94
        found = _PLACES[is_put].match(data, at)
        if found is None or self._learnt > _FORMS:
            return None
        self._learnt += 1
        one, two, three, kind, four, five, six, more = (
            None if each is None else self._value(each) for each in found.group(1, 3, 5, 7, 8, 10, 12, 14)
        )
        index, place = ([each if type(each) is str else "" for each in keys] for keys in ((one, two, three), (four, five, six)))  # fmt: skip
        is_row = type(kind) is Name and kind.text in self._classes[1] and more in (None, "transform_descriptors")
        if not is_row or sorted(index) != sorted(_FIELDS[:3]) or sorted(place) != sorted(_FIELDS[3:]):
            return None
        parts, last = list[bytes](), at
        for number, field in zip(_VALUES, (*index, *place), strict=True):
            value = _IN_FIELD.get(field) or (_INT if number > _VALUES[2] else b"N|" + (_MADE_SIZE + b"|" if is_put else b"") + _REF)  # fmt: skip
            start, stop = found.span(number)
            parts += re.escape(data[last:start]), b"(", value, b")"
            last = stop
        parts.append(re.escape(data[last : found.end()]))
        order = itemgetter(*map(index.index, _FIELDS[:3]), *(3 + place.index(each) for each in _FIELDS[3:]))
        again = next((each for each in (data[at - 3 : at], data[at - 6 : at]) if self._is_index(each)), b"-")
        self._last = found_form = _Form(re.compile(b"".join(parts), re.DOTALL), order, is_put, again)
        return found_form

    def _is_index(self, text: bytes) -> bool:
        """Whether this is what precedes an index: what refers to its class, and an empty tuple."""
        if re.fullmatch(_REF + rb"\)", text, re.DOTALL) is None:
            return False
        number = int.from_bytes(text[1:-1], "little")
        kind = self._memo[number] if number < len(self._memo) else None
        return type(kind) is Name and kind.text in self._classes[0]

    def _of_kind(self, kind: tuple[bytes, bytes, bytes]) -> tuple[_MakePlace, tuple[Any, ...]] | None:
        """What makes rows of a first index, file and size, and what is remembered inside of the index; None if they are not as they should be."""
        index, path, length = kind
        offset, size = self._sizes_of(index), _integer(length)
        make = None if offset is InsideRow or size is None else self._make(offset[0], self._value(path), size)
        found = self._made[kind] = None if make is None else (make, offset[1])
        return found

    def _sizes_of(self, text: bytes) -> Any:
        """A first index, and what is remembered inside of it; `InsideRow` itself for anything else."""
        if text == b"N":
            return None, ()
        at = 2 if text[0] == 0x68 else 5
        made = self._value(text[:at])
        if at == len(text):
            is_size = type(made) is Made and made.name == "torch.Size" and type(made.args) is tuple
            return (made.args[0], ()) if is_size and len(made.args) == 1 and _is_sizes(made.args[0]) else InsideRow
        sizes = _sizes(text[at : -len(b"\x94\x85\x94R\x94") if text[at] != 0x29 else at + 1])
        if sizes is None or type(made) is not Name or made.text != "torch.Size":
            return InsideRow
        args = (sizes,)
        return sizes, (*(args if text[at] != 0x29 else ()), args, Made(made.text, args))

    def _value(self, ref: bytes) -> Any:
        return self._memo[int.from_bytes(ref[1:], "little")]


@final
class TensorRows:
    """Tensors, after the function that makes one of its memory, and a mark.

    Args:
        data: the pickle.
        memo: its remembered values.
        function: its name.
        make: returns what makes tensors, by the names of their storages, for the type of these, how many elements they have, the first element, the shape and the strides; None if they are not as they should be.
    """

    after: Final = 0x28

    def __init__(
        self,
        data: bytes,
        memo: list[Any],
        function: str,
        make: Callable[[Name, int, int, Sizes, Sizes], Callable[[str], Any] | None],
    ) -> None:
        self._data, self._memo, self._function, self._make = data, memo, function, make
        self._last: _Call | None = None
        self._learnt = 0
        self._numbers = b""  # 0, 1, ..., in four bytes each

    def at(self, at: int) -> Taken | None:
        """The tensors from here on, with the keys between them; None if there is another call."""
        data, memo, values, last, key = self._data, self._memo, list[Any](), at, None
        count = len(memo)
        call = self._last
        while count >= _LONG:
            found = None if call is None else call.pattern.match(data, at)
            if found is None:
                call = self._call(at)
                found = None if call is None else call.pattern.match(data, at)
            inner = None if call is None or found is None else self._inner(call, found)
            if call is None or found is None or inner is None:
                break
            memo += inner
            if key is not None:
                values.append(key)
            values.append(inner[-1])
            last = at = found.end()
            count, key = len(memo), None
            begin = at + 5
            if data[at] != 0x58 or begin > len(data):
                break
            stop = begin + int.from_bytes(data[at + 1 : begin], "little")
            after = b"r" + self._number(count) + call.again
            if not data.startswith(after, stop):
                break
            key = str(data[begin:stop], "utf-8", "surrogatepass")
            memo.append(key)
            at = stop + len(after)
        if key is not None:
            memo.pop()  # of a row that is something else
        return (tuple(values), last, _OBJECTS * len(values)) if values else None

    def _inner(self, call: "_Call", found: re.Match[bytes]) -> tuple[Any, ...] | None:
        """What is remembered of a tensor: at last itself. None if it is not as it should be."""
        length, text, put0, key, elements, put1, first, shape, put2, strides, put3, put4, put5, put6 = found.groups()
        form = elements, first, shape, strides
        made = call.made[form] if form in call.made else self._made(call, form)
        if made is None or (put2 is None) != (shape == b")") or (put3 is None) != (strides == b")"):
            return None
        make, sizes, steps = made
        name = text.decode() if text is not None else self._memo[int.from_bytes(key[1:], "little")]
        if type(name) is not str or (text is not None and len(name) != length[0]):
            return None
        tensor = make(name)
        own = () if text is None else (name,)
        inner = (*own, _INSIDE, *(() if put2 is None else (sizes,)), *(() if put3 is None else (steps,)), _INSIDE, _INSIDE, tensor)  # fmt: skip
        puts = b"".join((put0 or b"", put1, put2 or b"", put3 or b"", put4, put5, put6))
        return inner if puts == self._number(len(self._memo), len(inner)) else None

    def _made(self, call: "_Call", form: tuple[bytes, bytes, bytes, bytes]) -> _Made:
        """What makes tensors of this size of a storage, first element, shape and strides."""
        count, start, shape, strides = _integer(form[0]), _integer(form[1]), _sizes(form[2]), _sizes(form[3])
        make = None
        if count is not None and start is not None and shape is not None and strides is not None:
            make = self._make(call.kind, count, start, shape, strides)
        found = call.made[form] = None if make is None or shape is None or strides is None else (make, shape, strides)
        return found

    def _number(self, first: int, count: int = 1) -> bytes:
        """Numbers of remembered values, one after the other, in four bytes each."""
        if 4 * (first + count) > len(self._numbers):
            stop = 2 * (first + count)
            self._numbers = struct.pack(f"<{stop}I", *range(stop))
        return self._numbers[4 * first : 4 * (first + count)]

    def _call(self, at: int) -> "_Call | None":
        """How the tensor is made that begins here; None if it is something else, or there were too many forms."""
        found = _TENSOR.match(self._data, at)
        if found is None or self._learnt > _FORMS:
            return None
        self._learnt += 1
        refs = found.group("word", "type", "device", "hooks")
        word, kind, device, hooks = (self._memo[int.from_bytes(each[1:], "little")] for each in refs)
        if word != "storage" or type(kind) is not Name or type(device) is not str or type(hooks) is not Name:
            return None
        again = next((each for each in (self._data[at - 3 : at], self._data[at - 6 : at]) if self._is_function(each)), None)  # fmt: skip
        if again is None:
            return None
        self._last = _Call(_tensor(*(b"(?:" + re.escape(each) + b")" for each in refs)), kind, again)
        return self._last

    def _is_function(self, text: bytes) -> bool:
        """Whether this is what precedes a tensor: what refers to the function, and a mark."""
        number = int.from_bytes(text[1:-1], "little")
        kind = self._memo[number] if number < len(self._memo) else None
        return re.fullmatch(_REF + rb"\(", text, re.DOTALL) is not None and type(kind) is Name and kind.text == self._function  # fmt: skip


def _is_sizes(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= DIMENSIONS
        and all(type(each) is int and 0 <= each < _LIMIT for each in value)
    )


def _integer(text: bytes) -> int | None:
    """A count; None for anything else."""
    kind = text[0]
    if kind == 0x4A or kind == 0x8A:  # noqa: PLR1714 - a set would be slower
        found = int.from_bytes(text[1 + (kind == 0x8A) :], "little", signed=True)
        return found if found >= 0 else None
    return int.from_bytes(text[1:], "little") if kind in b"KM" else None


def _sizes(text: bytes) -> Sizes | None:
    r"""The values of a tuple of counts; None for another text.

    Examples:
        >>> _sizes(b"K\x02M\x00\x01\x86"), _sizes(b"(K\x01t"), _sizes(b")"), _sizes(b"K\x02\x86")
        ((2, 256), (1,), (), None)
    """
    if text == b")":
        return ()
    if len(text) > _LONGEST:
        return None
    found, at, has_mark = [], int(text[0] == 0x28), text[0] == 0x28
    while at < len(text) - 1:
        stop = at + {0x4B: 2, 0x4D: 3, 0x4A: 5}[text[at]]
        value = _integer(text[at:stop])
        if value is None:
            return None
        found.append(value)
        at = stop
    is_whole = text[-1] == 0x74 if has_mark else _COUNTS.get(text[-1]) == len(found)
    return tuple(found) if is_whole else None
