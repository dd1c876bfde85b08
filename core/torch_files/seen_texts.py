"""`SeenTexts`: the objects of a pickle that are written with the same bytes as an earlier one, so that these are read once."""

from collections.abc import Collection
from typing import Any, Final, final

_WASTE: Final = 32  # bytes that are compared in vain, for each byte of the pickle; then there are no more comparisons
_PUSHED: Final = {0x68: 2, 0x6A: 5, 0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1, 0x29: 1}
"""Opcodes that push a value which is not new -> their bytes."""
_TAKEN: Final = {0x85: 1, 0x86: 2, 0x87: 3, 0x81: 2, 0x52: 2, 0x62: 1, 0x61: 1, 0x73: 2}
"""Opcodes that make a value of others, or add them to the one below -> how many others."""


@final
class SeenTexts:
    """Objects by the bytes that make them, from the NEWOBJ to the BUILD. The bytes need nothing but remembered values with the same numbers as before.

    Attributes:
        open: the object that is being made now, of which the end is looked for; None without.
        closed: values inside of such objects, by their `id`. Nothing is added to them any more, as it would be added to several.

    Args:
        data: the pickle.
        memo: its remembered values.
        classes: of which objects are kept.
    """

    __slots__ = ("_begun", "_data", "_left", "_memo", "_texts", "closed", "open")

    def __init__(self, data: bytes, memo: list[Any], classes: Collection[str]) -> None:
        self.open: Any = None
        self.closed: Final[dict[int, Any]] = {}
        self._data, self._memo = data, memo
        self._texts: Final[dict[str, dict[int, dict[bytes, tuple[Any, list[Any]]]]]] = {each: {} for each in classes}
        self._begun = 0, 0
        self._left = len(data) * _WASTE

    def at(self, at: int, name: str) -> tuple[Any, int] | None:
        """The object of a class whose bytes these are, and where the next opcode is; its parts are remembered. None if it was not seen."""
        if self._left < 0:
            return None
        for size, texts in self._texts[name].items():
            self._left -= size
            found = texts.get(self._data[at : at + size])
            if found is not None:
                self._memo += found[1]
                return found[0], at + size
        return None

    def begin(self, made: Any, at: int) -> None:
        """Note where the bytes of an object begin."""
        self.open, self._begun = made, (at, len(self._memo))

    def end(self, at: int) -> None:
        """Keep the object that ends here, if its bytes would make the same one elsewhere."""
        start, remembered = self._begun
        text, made = self._data[start:at], self.open
        self.open = None
        if is_alone(text):
            inner = self._memo[remembered:]
            self._texts[made.name].setdefault(len(text), {})[text] = made, inner
            self.closed.update((id(each), each) for each in (made, *inner))


def is_alone(text: bytes) -> bool:
    r"""Whether opcodes, after a class and an empty tuple, make one object, of nothing else that is on the stack, and add to nothing that was there before.

    Examples:
        >>> is_alone(b"\x81}(h\x01K\x05ub"), is_alone(b"\x81}(h\x01K\x05ub0"), is_alone(b"\x81h\x01K\x05ab")
        (True, False, False)
    """
    new, at = (
        [True],
        1,
    )  # for each value on the stack, whether it is a container that was made here; the first one is the object
    marks: list[int] = []
    if text[:1] != b"\x81":
        return False
    try:
        while at < len(text):
            op = text[at]
            at += _PUSHED.get(op, 1)
            if op in _PUSHED or op in b"]}":
                new.append(op in b"]}")
            elif op == 0x28:  # MARK
                marks.append(len(new))
            elif op != 0x94:  # MEMOIZE
                taken = len(new) - marks.pop() if op in b"tue" else _TAKEN[op]
                if not 0 <= taken < len(new):
                    return False
                del new[len(new) - taken :]
                if op in b"\x85\x86\x87t\x81R":
                    new.append(op in b"\x81R")
                elif not new[-1]:
                    return False
    except (IndexError, KeyError):
        return False
    return new == [True] and not marks and at == len(text)
