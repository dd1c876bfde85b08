"""`read_pickle`: reads a pickle as values. No class is looked up, nothing is called, and a name outside a closed list is refused."""

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol, TypeAlias, final

import attrs

from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, TrainfoldError
from trainfold.core.printable import printable
from trainfold.core.torch_files.seen_texts import SeenTexts

_LONG_BYTES: Final = 16  # of an integer
_KEY_LENGTH: Final = 4096  # of a text that is a key: two long ones that are equal take long to compare
_KEY_LIMIT: Final = 2**63  # of an integer that is a key: larger ones can be chosen so that all have one hash
_SHOWN: Final = 120  # characters of a name in a message
_BYTES_FOR_A_NODE: Final = 4  # of the file, at least, for each list, dict, tuple, set and object in it
_FIX: Final = "do not open it with a program that unpickles, which would run it; get the file from whom you trust"
_FORBIDDEN: Final = {
    ord("Q"): "BINPERSID", 0x8B: "LONG4",
    ord("o"): "OBJ", ord("P"): "PERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x96: "BYTEARRAY8", 0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER", ord("F"): "FLOAT", ord("I"): "INT", ord("L"): "LONG", ord("S"): "STRING", ord("V"): "UNICODE",
    ord("T"): "BINSTRING", ord("U"): "SHORT_BINSTRING", ord("g"): "GET", ord("p"): "PUT", ord("d"): "DICT", ord("l"): "LIST",
}  # fmt: skip


@final
@attrs.frozen
class Name:
    """A class or a function that a pickle names.

    Attributes:
        text: the module and the name.
    """

    text: str


@final
class Made:
    """What a pickle would make by calling something. It was not called.

    Attributes:
        name: of what would be called; ``"persistent"`` for an object outside the pickle.
        args: what it would be called with.
        state: what would be set on the result; None without.
        items: the key and value pairs that would be put into the result; None without.
        is_new: whether an object of the class would be made without calling its constructor.
    """

    __slots__ = ("args", "is_new", "items", "name", "state")

    def __init__(self, name: str, args: Any, state: Any = None, is_new: bool = False) -> None:  # noqa: FBT001, FBT002 - one call for each object
        self.name = name
        self.args = args
        self.state = state
        self.items: list[tuple[Any, Any]] | None = None
        self.is_new = is_new


Value: TypeAlias = Any
"""None, a bool, int, float, str, bytes, list, dict, tuple or set of these, a `Name` or a `Made`. A list may hold itself."""


class Rows(Protocol):
    """What knows a form in which values are often written, and reads those as a whole; see `text_rows`.

    Attributes:
        after: the opcode that is between the class or the function and them: EMPTY_TUPLE or MARK.
    """

    @property
    def after(self) -> int: ...  # noqa: D102 - see above

    def at(self, at: int) -> tuple[tuple[Any, ...], int, int] | None:
        """Read values, and remember what is remembered in them.

        Args:
            at: where their opcodes begin.

        Returns:
            The values in the place of the class on the stack, where the next opcode is, and how many lists, dicts, tuples and objects they are made of.
            None for another form, which is read opcode by opcode.
        """


def read_pickle(  # noqa: C901, PLR0912, PLR0913, PLR0915 - one loop, because each call of a function would cost more than the opcode
    data: bytes,
    names: Collection[str],
    where: str,
    *,
    persistent: bool = False,
    alike: Collection[str] = (),
    rows: Callable[[bytes, list[Any]], Mapping[str, Rows]] = lambda _, __: {},
) -> Value:
    r"""Read a pickle of protocol 2 to 5. Time and memory are linear in its length.

    Args:
        data: all of it.
        names: what it may name, such as ``"collections.OrderedDict"``.
        where: the file, for messages.
        persistent: whether it may refer to objects outside of itself, as a pickle of tensors does.
        alike: classes of which many objects are written with the same bytes. Those bytes are read once, and the objects are one.
        rows: for the pickle and the list of its remembered values, a class or a function -> what reads its values as a whole.

    Raises:
        CheckpointHostile: for a name that is not in the list, which the message has, and an opcode that no pickle of this kind needs.
        CheckpointDamaged: if it is cut off, or not a pickle.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"a": [1, (2.0, None)]}), (), "x.pkl")
        {'a': [1, (2.0, None)]}
        >>> read_pickle(b"cos\nsystem\n(X\x02\x00\x00\x00lstR.", (), "x.pkl")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointHostile: x.pkl: expected a pickle of 0 known names, found os.system; do not open it with a program that unpickles, which would run it; get the file from whom you trust
    """
    made: Any
    state: Any
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    known: dict[str, Name] = {}
    seen = SeenTexts(data, memo, alike)
    closed, forms = seen.closed, dict(rows(data, memo))
    put, pop, remember = stack.append, stack.pop, memo.append
    unpack_size, unpack_long, unpack_long_size = _SIZE.unpack_from, _LONG.unpack_from, _LONG_SIZE.unpack_from
    at, end, budget = 0, len(data), len(data) // _BYTES_FOR_A_NODE + 64
    try:
        while True:
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET, often several
                put(memo[data[at]])
                at += 1
                while data[at] == 0x68:
                    put(memo[data[at + 1]])
                    at += 2
            elif op == 0x6A:  # LONG_BINGET, often several
                put(memo[unpack_size(data, at)[0]])
                at += 4
                while data[at] == 0x6A:
                    put(memo[unpack_size(data, at + 1)[0]])
                    at += 5
            elif op == 0x4B:  # BININT1, often several
                put(data[at])
                at += 1
                while data[at] == 0x4B:
                    put(data[at + 1])
                    at += 2
            elif op == 0x29:  # EMPTY_TUPLE, and the NEWOBJ after it
                if data[at] != 0x81:
                    put(())
                    continue
                made = stack[-1]
                if type(made) is not Name:
                    raise _hostile(where, "a call of a known name", _kind(made))
                name = made.text
                if name in forms and forms[name].after == op and (taken := forms[name].at(at)) is not None:
                    stack[-1:], at, objects = taken
                    budget -= objects
                    if budget < 0:
                        raise _too_many(where)
                    continue
                if name in alike and (again := seen.at(at, name)) is not None:
                    stack[-1], at = again
                    continue
                stack[-1] = made = Made(name, (), None, True)  # noqa: FBT003 - a keyword takes longer
                if name in alike:
                    seen.begin(made, at)
                at += 1
                budget -= 1
                if data.startswith(_STATE_BEGINS, at):
                    state = {}
                    memo += (made, state)
                    put(state)
                    marks.append(len(stack))
                    at += 4
                    budget -= 1
                elif data[at] == 0x94:
                    remember(made)
                    at += 1
                if budget < 0:
                    raise _too_many(where)
            elif op in _MADE_OF:  # TUPLE1, TUPLE2, TUPLE3, TUPLE
                if op == 0x74:
                    mark = marks.pop()
                else:
                    mark = len(stack) - _MADE_OF[op]
                    if mark < 0:
                        _cut(where)
                made = tuple(stack[mark:])
                stack[mark:] = (made,)
                budget -= 1
                if budget < 0:
                    raise _too_many(where)
                if data[at] == 0x94:
                    remember(made)
                    at += 1
                    if data.startswith(_CALLED_WITH_IT, at):
                        name = stack[-2]
                        if type(name) is not Name:
                            raise _hostile(where, "a call of a known name", _kind(name))
                        args = (made,)
                        made = Made(name.text, args)
                        stack[-2:] = (made,)
                        memo += (args, made)
                        at += 4
                        budget -= 2
                        if budget < 0:
                            raise _too_many(where)
                elif data[at] == 0x72 and unpack_size(data, at + 1)[0] == len(memo):
                    remember(made)
                    at += 5
            elif op == 0x58:  # BINUNICODE
                size = unpack_size(data, at)[0]
                at += 4 + size
                made = str(data[at - size : at], "utf-8", "surrogatepass") if at <= end else _cut(where)
                put(made)
                if data[at] == 0x72 and unpack_size(data, at + 1)[0] == len(memo):
                    remember(made)
                    at += 5
            elif op == 0x75:  # SETITEMS
                mark = marks.pop()
                pairs = stack[mark:]
                del stack[mark:]
                if id(stack[-1]) in closed:
                    raise _closed(where, stack[-1])
                _set(stack[-1], pairs, where)
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = data[at]
                at += 1 + size
                made = str(data[at - size : at], "utf-8", "surrogatepass") if at <= end else _cut(where)
                put(made)
                if data[at] == 0x94:
                    remember(made)
                    at += 1
            elif op == 0x94:  # MEMOIZE
                remember(stack[-1])
            elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE  # noqa: PLR1714 - a set would be slower
                args, made = pop(), pop()
                if type(made) is not Name or type(args) is not tuple:
                    raise _hostile(where, "a call of a known name", _kind(made))
                made = Made(made.text, args, None, op == 0x81)
                put(made)
                budget -= 1
                if budget < 0:
                    raise _too_many(where)
                if data[at] == 0x94:
                    remember(made)
                    at += 1
                elif data[at] == 0x72 and unpack_size(data, at + 1)[0] == len(memo):
                    remember(made)
                    at += 5
            elif op == 0x28:  # MARK
                made = stack[-1] if stack else None
                if type(made) is Name and made.text in forms and forms[made.text].after == op and (taken := forms[made.text].at(at)) is not None:  # fmt: skip
                    stack[-1:], at, objects = taken
                    budget -= objects
                    if budget < 0:
                        raise _too_many(where)
                    continue
                marks.append(len(stack))
            elif op == 0x62:  # BUILD
                state = pop()
                made = stack[-1]
                if type(made) is not Made or made.state is not None:
                    raise _hostile(where, "a state for an object that was just made", _kind(made))
                made.state = state
                if made is seen.open:
                    seen.end(at)
            elif op == 0x7D:  # EMPTY_DICT
                budget -= 1
                if budget < 0:
                    raise _too_many(where)
                made = {}
                put(made)
                if data[at] == 0x94:
                    remember(made)
                    at += 1
            elif op == 0x4D:  # BININT2
                put(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # BININT
                put(unpack_long(data, at)[0])
                at += 4
            elif op == 0x71:  # BINPUT
                if data[at] < len(memo):
                    alike, forms = (), {}  # a number means another value from here on
                at = _remember(memo, stack[-1], data[at], at + 1, where)
            elif op == 0x72:  # LONG_BINPUT
                if unpack_size(data, at)[0] < len(memo):
                    alike, forms = (), {}
                at = _remember(memo, stack[-1], unpack_size(data, at)[0], at + 4, where)
            elif op == 0x4E:  # NONE
                put(None)
            elif op == 0x88:  # NEWTRUE
                stack += (True,)
            elif op == 0x89:  # NEWFALSE
                stack += (False,)
            elif op == 0x5D:  # EMPTY_LIST
                budget -= 1
                if budget < 0:
                    raise _too_many(where)
                put([])
            elif op == 0x61:  # APPEND
                last = pop()
                if id(stack[-1]) in closed:
                    raise _closed(where, stack[-1])
                _extend(stack[-1], [last], where)
            elif op == 0x65:  # APPENDS
                mark = marks.pop()
                found = stack[mark:]
                del stack[mark:]
                if id(stack[-1]) in closed:
                    raise _closed(where, stack[-1])
                _extend(stack[-1], found, where)
            elif op == 0x73:  # SETITEM
                last = pop()
                if id(stack[-2]) in closed:
                    raise _closed(where, stack[-2])
                _set(stack[-2], [pop(), last], where)
            elif op in (0x93, 0x63):  # STACK_GLOBAL, GLOBAL
                if op == 0x93:
                    last = pop()
                    module = pop()
                else:
                    module, at = _line(data, at, where)
                    last, at = _line(data, at, where)
                if type(module) is not str or type(last) is not str:
                    raise _hostile(where, "a name of two texts", _kind(module))  # shown, it could be without end
                name = f"{module}.{last}"
                if "." in last or name not in names:
                    raise _unknown(where, len(names), name)
                put(known.setdefault(name, Name(name)))
            elif op == 0x51 and persistent:  # BINPERSID
                budget -= 1
                if budget < 0:
                    raise _too_many(where)
                put(Made("persistent", pop()))
            elif op == 0x47:  # BINFLOAT
                put(_DOUBLE.unpack_from(data, at)[0])
                at += 8
            elif op == 0x8A:  # LONG1
                size = data[at]
                at += 1 + size
                if size > _LONG_BYTES or at > end:
                    raise _hostile(where, f"an integer of at most {_LONG_BYTES} bytes", f"{size} bytes")
                put(int.from_bytes(data[at - size : at], "little", signed=True))
            elif op in _BYTES_HEADS:  # BINBYTES, SHORT_BINBYTES, BINBYTES8, BINUNICODE8
                head = _BYTES_HEADS[op]
                size = int.from_bytes(data[at : at + head], "little")
                at += head + size
                if at > end:
                    _cut(where)
                text = data[at - size : at]
                put(text.decode("utf-8", "surrogatepass") if op == 0x8D else text)
            elif op == 0x8F:  # EMPTY_SET
                budget -= 4  # it has more memory of its own than the others
                if budget < 0:
                    raise _too_many(where)
                put(set())
            elif op == 0x90:  # ADDITEMS
                mark = marks.pop()
                found = stack[mark:]
                del stack[mark:]
                if type(stack[-1]) is not set or not all(map(_is_key, found)):
                    raise _hostile(where, "plain members of a set", _kind(stack[-1]))
                stack[-1].update(found)
            elif op == 0x30:  # POP
                if marks and marks[-1] == len(stack):
                    marks.pop()
                else:
                    pop()
            elif op == 0x31:  # POP_MARK
                del stack[marks.pop() :]
            elif op == 0x32:  # DUP
                put(stack[-1])
            elif op == 0x80:  # PROTO
                if not 2 <= data[at] <= 5:
                    raise _damaged(where, "a pickle of protocol 2 to 5", data[at])
                at += 1
            elif op == 0x95:  # FRAME
                at += 8
                if unpack_long_size(data, at - 8)[0] > end - at:
                    _cut(where)
            elif op == 0x92:  # NEWOBJ_EX
                raise _hostile(where, "objects without arguments by name", _kind(stack[-3]))
            elif op == 0x69:  # INST
                module, at = _line(data, at, where)
                raise _unknown(where, len(names), f"{module}.{_line(data, at, where)[0]}")
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks or at != end:
                    raise _damaged(where, "one value", f"{len(stack)} values, and {end - at} bytes after them")
                return stack[0]
            elif op in _FORBIDDEN:
                raise _hostile(where, "an opcode that tensors and their metadata need", _FORBIDDEN.get(op, hex(op)))
            else:
                raise _damaged(where, "an opcode", hex(op))
    except TrainfoldError:
        raise
    except (IndexError, struct.error, UnicodeError) as error:
        raise _damaged(where, "a whole pickle", f"{type(error).__name__} at byte {at} of {end}") from None


_STATE_BEGINS: Final = b"\x94}\x94("  # after a NEWOBJ
_CALLED_WITH_IT: Final = b"\x85\x94R\x94"  # after a tuple: it is the only argument of a call
_MADE_OF: Final = {
    0x85: 1,
    0x86: 2,
    0x87: 3,
    0x74: -1,
}  # opcode -> values of a tuple; -1 for those after a mark
_SIZE: Final = struct.Struct("<I")
_LONG: Final = struct.Struct("<i")
_LONG_SIZE: Final = struct.Struct("<Q")
_DOUBLE: Final = struct.Struct(">d")
_BYTES_HEADS: Final = {0x42: 4, 0x43: 1, 0x8E: 8, 0x8D: 8}  # opcode -> bytes of the length before its bytes


def _set(target: Any, pairs: list[Any], where: str) -> None:
    """Put keys and values, one after the other, into a dict or an object."""
    if len(pairs) % 2:
        raise _damaged(where, "a value for each key", f"{len(pairs)} keys and values")
    keys = pairs[::2]
    for key in keys:
        if not (type(key) is str and len(key) <= _KEY_LENGTH) and type(key) is not Made and not _is_key(key):
            raise _hostile(where, "keys that are short plain values", _kind(key))
    if type(target) is dict:
        target.update(zip(keys, pairs[1::2], strict=True))
    elif type(target) is Made:
        target.items = [] if target.items is None else target.items
        target.items.extend(zip(keys, pairs[1::2], strict=True))
    else:
        raise _hostile(where, "items for a dict", _kind(target))


def _is_key(key: Any) -> bool:
    """Whether a value can be a key of which a hostile file cannot make many that take long to compare. A tuple can: its parts may be shared."""
    kind = type(key)
    if kind is str or kind is bytes:
        return len(key) <= _KEY_LENGTH
    return -_KEY_LIMIT < key < _KEY_LIMIT if kind is int else kind in (float, bool, type(None))


def _extend(target: Any, found: list[Any], where: str) -> None:
    if type(target) is not list:
        raise _hostile(where, "members for a list", _kind(target))
    target.extend(found)


def _remember(memo: list[Any], value: Any, index: int, at: int, where: str) -> int:
    """Store a value under a number, and return where the next opcode is. Picklers count up, so that a gap is not theirs."""
    if index == len(memo):
        memo.append(value)
    elif index < len(memo):
        memo[index] = value
    else:
        raise _hostile(where, f"at most number {len(memo)} for a remembered value", index)
    return at


def _line(data: bytes, at: int, where: str) -> tuple[str, int]:
    end = data.find(b"\n", at, at + 4096)
    if end < 0:
        _cut(where)
    return data[at:end].decode("utf-8"), end + 1


def _kind(value: Any) -> str:
    """What a value is, in few words; values may hold themselves, so they are not shown."""
    if isinstance(value, Name):
        return value.text[:_SHOWN]
    return f"an object of {value.name[:_SHOWN]}" if isinstance(value, Made) else type(value).__name__


def _closed(where: str, value: Any) -> CheckpointHostile:
    return _hostile(where, "objects that nothing is added to when they are complete", _kind(value))


def _too_many(where: str) -> CheckpointHostile:
    return _hostile(where, f"at most one object for {_BYTES_FOR_A_NODE} bytes", "more")


def _cut(where: str) -> Any:
    raise _damaged(where, "a whole pickle", "one that is cut off")


def _unknown(where: str, count: int, text: str) -> CheckpointHostile:
    return _hostile(where, f"a pickle of {count} known names", printable(text[:_SHOWN]))


def _hostile(where: str, expected: str, found: object) -> CheckpointHostile:
    return CheckpointHostile(where, expected=expected, found=found, fix=_FIX)


def _damaged(where: str, expected: str, found: object) -> CheckpointDamaged:
    return CheckpointDamaged(where, expected=expected, found=found, fix="copy or write it again")
