"""`WorkUnits`: which samples were handed out, in units that are trained once; `WorkUnit`: one of them."""

from collections.abc import Iterable, Sequence
from typing import Final, final

import attrs

MOST_AHEAD: Final = 4096  # units that may be handed out before the first of them is claimed


@final
@attrs.frozen(order=True)
class WorkUnit:
    """A range of samples that one worker trains on between two exchanges.

    Attributes:
        start: the position of the first sample, counted over all epochs.
        stop: the position after the last one.

    Examples:
        >>> len(WorkUnit(32, 48)), WorkUnit(32, 48).positions
        (16, range(32, 48))
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def positions(self) -> range:
        """The positions of its samples."""
        return range(self.start, self.stop)


@final
@attrs.frozen
class WorkUnits:
    """The position of a run in its data, owned by the server: what is left to hand out.

    Law: units that are taken and not given back are disjoint, and with those that are left cover every sample.

    Attributes:
        size: samples of a unit.
        total: samples of the run; None for a run without an end.
        next_index: the first position that was never handed out.
        returned: units that were handed out and have to be handed out again, in order.

    Examples:
        >>> units = WorkUnits(size=4, total=10)
        >>> units, first = units.take()
        >>> units, second = units.take()
        >>> first, second, units.give_back([first]).take()[1]
        (WorkUnit(start=0, stop=4), WorkUnit(start=4, stop=8), WorkUnit(start=0, stop=4))
    """

    size: int
    total: int | None = None
    next_index: int = 0
    returned: tuple[WorkUnit, ...] = ()

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left to hand out."""
        return not self.returned and self.total is not None and self.next_index >= self.total

    def take(self) -> tuple["WorkUnits", WorkUnit | None]:
        """Hand out a unit: one that was returned, or the next; None if nothing is left."""
        if self.returned:
            return attrs.evolve(self, returned=self.returned[1:]), self.returned[0]
        if self.is_exhausted:
            return self, None
        unit = self._next(self.next_index)
        return attrs.evolve(self, next_index=unit.stop), unit

    def give_back(self, units: Iterable[WorkUnit]) -> "WorkUnits":
        """Return units whose work is lost; the earliest is handed out first."""
        return attrs.evolve(self, returned=tuple(sorted((*self.returned, *units))))

    def claim(self, unit: WorkUnit) -> "WorkUnits | None":
        """Take this unit, which a worker has trained already, which is not known here: the server that handed it out was killed.

        Returns:
            What is left; None if it is not free, or is not a unit.
        """
        if unit in self.returned:
            return attrs.evolve(self, returned=tuple(each for each in self.returned if each != unit))
        ahead = unit.start - self.next_index
        if ahead % self.size or not 0 <= ahead < MOST_AHEAD * self.size:
            return None
        if (self.total is not None and unit.start >= self.total) or unit != self._next(unit.start):
            return None
        skipped = [self._next(start) for start in range(self.next_index, unit.start, self.size)]
        return attrs.evolve(self, next_index=unit.stop).give_back(skipped)

    def _next(self, start: int) -> WorkUnit:
        stop = start + self.size
        return WorkUnit(start, stop if self.total is None else min(stop, self.total))


def as_text(units: Sequence[WorkUnit]) -> str:
    """Units as a text that a checkpoint holds, whatever their number.

    Examples:
        >>> as_text([WorkUnit(0, 4), WorkUnit(8, 12)])
        '0-4 8-12'
    """
    return " ".join(f"{each.start}-{each.stop}" for each in units)


def from_text(text: str) -> tuple[WorkUnit, ...]:
    """The inverse of `as_text`."""
    pairs = (each.split("-") for each in text.split())
    return tuple(WorkUnit(int(start), int(stop)) for start, stop in pairs)
