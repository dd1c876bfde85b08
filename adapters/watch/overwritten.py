"""`use_of`: finds out from the bytecode how a call of a method uses an attribute of its object; no code runs."""

import dis
import types
from functools import lru_cache
from typing import Any, Final, final

import attrs

_ENDS: Final = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_FAILS: Final = frozenset({"RAISE_VARARGS", "RERAISE"})
_JUMPS: Final = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_READS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_WRITES: Final = frozenset({"STORE_ATTR", "DELETE_ATTR"})


@final
@attrs.frozen
class Use:
    """How a call uses an attribute.

    Attributes:
        reads_old: whether it may read the value that an earlier call left.
        writes: whether it may write a new value.
        always_writes: whether it writes one on every path through the code.
    """

    reads_old: bool = False
    writes: bool = False
    always_writes: bool = False

    @property
    def is_new(self) -> bool:
        """Whether each call makes the value from scratch, so that the earlier value does not matter."""
        return self.always_writes and not self.reads_old


def use_of(kind: type, method: str, name: str) -> Use:
    """How a method of a class uses an attribute, including the methods of the same object that it calls.

    Args:
        kind: the class.
        method: the name of the method, such as ``__iter__``.
        name: the name of the attribute.

    Examples:
        >>> class Shuffled:
        ...     def __iter__(self):
        ...         self.order = list(range(8))
        ...         return iter(self.order)
        >>> use_of(Shuffled, "__iter__", "order").is_new
        True
        >>> class Rotated:
        ...     def __iter__(self):
        ...         self.order = self.order[1:] + self.order[:1]
        ...         return iter(self.order)
        >>> use_of(Rotated, "__iter__", "order")
        Use(reads_old=True, writes=True, always_writes=True)
    """
    return _Walk(kind, name).method(method) or Use()


def is_remade(kind: type, name: str) -> bool:
    """Whether each epoch makes an attribute of a sampler or dataset from scratch, in ``set_epoch`` or in ``__iter__``.

    Examples:
        >>> class Shuffled:
        ...     def set_epoch(self, epoch):
        ...         self.order = [epoch]
        >>> is_remade(Shuffled, "order")
        True
    """
    at_epoch = use_of(kind, "set_epoch", name)
    return (at_epoch.writes and not at_epoch.reads_old) or (
        not at_epoch.reads_old and use_of(kind, "__iter__", name).is_new
    )


class _Walk:
    """Follows all paths through the code of a class."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._inside: list[types.CodeType] = []  # the functions on the current path

    def method(self, name: str) -> Use | None:
        code = next((each for each in _codes(self._kind, name) if each not in self._inside), None)
        return None if code is None else self._walk(code)

    def _walk(self, code: types.CodeType) -> Use:
        self._inside.append(code)
        lines, jumps, matter = _lines(code)
        reads = writes = leaves = False
        todo, done = [0], set[int]()
        while todo:
            place = todo.pop()
            if place in done or place >= len(lines):
                continue
            done.add(place)
            each = lines[place]
            if place in matter:
                use = self._use(each, lines[place - 1], code)
                reads, writes = reads or use.reads_old, writes or use.writes
                if use.always_writes:
                    continue
            if each.opname in _FAILS:
                continue
            if each.opname in _ENDS:
                leaves = True
                continue
            if place in jumps:
                todo.append(jumps[place])
            if each.opname not in _JUMPS:
                todo.append(place + 1)
        self._inside.pop()
        return Use(reads, writes, writes and not leaves)

    def _use(self, line: dis.Instruction, before: dis.Instruction, code: types.CodeType) -> Use:
        if line.opname in _WRITES and line.argval == self._name and _is_own(before, code):
            return Use(writes=True, always_writes=True)
        if line.opname in _READS:
            return Use(reads_old=True) if line.argval == self._name else (self.method(str(line.argval)) or Use())
        if isinstance(line.argval, types.CodeType):  # a comprehension or lambda: it may run later, or never
            inner = self._walk(line.argval)
            return Use(inner.reads_old, inner.writes)
        return Use()


@lru_cache(maxsize=4096)  # the code of samplers and datasets is the same at every look
def _lines(code: types.CodeType) -> tuple[tuple[dis.Instruction, ...], dict[int, int], frozenset[int]]:
    """The instructions of some code; where those that jump go, place -> place; and the places of those that use attributes or code."""
    lines = tuple(dis.get_instructions(code))
    at = {each.offset: place for place, each in enumerate(lines)}
    jump = {*dis.hasjrel, *dis.hasjabs}
    jumps = {place: at[each.argval] for place, each in enumerate(lines) if each.opcode in jump}
    uses = _READS | _WRITES
    matter = (at[each.offset] for each in lines if each.opname in uses or isinstance(each.argval, types.CodeType))
    return lines, jumps, frozenset(matter)


def _is_own(before: dis.Instruction, code: types.CodeType) -> bool:
    """Whether the object itself, a method's first argument, is on the stack: just loaded, or kept from a read as in ``+=``."""
    if before.opname == "SWAP":
        return True
    last = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
    return code.co_argcount > 0 and last == code.co_varnames[0]


def _codes(kind: type, name: str) -> list[types.CodeType]:
    """The code of a method, in method resolution order; also of properties and decorated functions."""
    found: list[types.CodeType] = []
    for each in kind.__mro__:
        member: Any = vars(each).get(name)
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        while hasattr(member, "__wrapped__"):
            member = member.__wrapped__
        if isinstance(member, types.FunctionType):
            found.append(member.__code__)
    return found
