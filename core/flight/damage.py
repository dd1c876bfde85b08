"""`Damage`: how much of a flight log cannot be read."""

from typing import final

import attrs


@final
@attrs.frozen
class Damage:
    """The lines of a flight log that cannot be read; false without any. A torn end is not damage: each kill may leave one.

    Attributes:
        lines: how many.
        first: the byte at which the first one begins.
        is_all: whether no line can be read: then the file is not a flight log.

    Examples:
        >>> print(Damage(2, 192).text_of("flight-00000.log"))
        flight-00000.log: 2 lines cannot be read, the first at byte 192: they are damaged, or of a later version; what they recorded is not known
    """

    lines: int = 0
    first: int = 0
    is_all: bool = False

    def __bool__(self) -> bool:
        return self.lines > 0

    def text_of(self, name: str) -> str:
        """The damage in words, for the file of this name."""
        if self.is_all:
            return f"{name} is not a flight log: none of it can be read"
        if self.lines == 1:
            return f"{name}: 1 line cannot be read, at byte {self.first}: it is damaged, or of a later version; what it recorded is not known"
        return f"{name}: {self.lines} lines cannot be read, the first at byte {self.first}: they are damaged, or of a later version; what they recorded is not known"
