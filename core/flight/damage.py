"""`Damage`: how much of a flight log cannot be read; `LeftOut`: steps that are not known to be those of its run."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from typing import final

import attrs

from trainfold.core.markup.texts import steps_are


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


@final
@attrs.frozen
class LeftOut:
    """Steps of a log that do not count, because the log has no record of a later step that the run has saved.

    A process that records writes a step before its checkpoint. So another one has made that checkpoint: one that went on from the checkpoint before it, and
    records nothing, as after a resume without ``record=``. What the log has between the two is then what that resume has undone.

    Attributes:
        first: the first of these steps.
        last: the last one.
        saved: the step of the checkpoint.
    """

    first: int
    last: int
    saved: int

    def text_of(self, name: str) -> str:
        """Why they are left out, for the log of this name.

        Examples:
            >>> print(LeftOut(9, 10, 12).text_of("flight-00000.log"))
            flight-00000.log: steps 9 to 10 are not used: it has no record of step 12, which the run has saved, so that a resume which recorded nothing may have undone this
        """
        return f"{name}: {steps_are(self.first, self.last)} not used: it has no record of step {self.saved}, which the run has saved, so that a resume which recorded nothing may have undone this"


def steps_left_out(steps: Collection[int], saved: Mapping[int, int]) -> Iterator[LeftOut]:
    """The steps that a log has between a checkpoint of which it has no record, and the one before.

    Args:
        steps: of which the log has a record.
        saved: the steps of the run's checkpoints, each with that of the one before; 0 without one.

    Examples:
        >>> list(steps_left_out([7, 8, 9, 10], {8: 4, 12: 8}))
        [LeftOut(first=9, last=10, saved=12)]
    """
    ordered = sorted(steps)
    for step, before in sorted(saved.items()):
        low, high = bisect_right(ordered, before), bisect_left(ordered, step)
        if low < high and ordered[high : high + 1] != [step]:
            yield LeftOut(ordered[low], ordered[high - 1], step)
