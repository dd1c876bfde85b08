"""`saves_of`: the saves of a run: when each was called, when the loop went on, and when it was durable."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.core.flight.journal_line import JournalLine


@final
@attrs.frozen
class SaveTimes:
    """The moments of a save, in seconds since 1970.

    Attributes:
        step: the step that was saved.
        called: when the loop called.
        returned: when the call had returned.
        began: when the writing began; None if that is not known, as of a save that a kill ended.
        durable: when it was durable.
        outcome: ``written``, ``staged``, ``skipped``, ``failed``, or ``lost`` if its process ended first.
        detail: why it failed.
        stalled: for how long the loop stood still in the call and in later updates; None if that is not known.
    """

    step: int
    called: float
    returned: float
    began: float | None = None
    durable: float | None = None
    outcome: str = "lost"
    detail: str = ""
    stalled: float | None = None

    @property
    def stall_secs(self) -> float:
        """How long the loop stood still; the call alone, of a save that a kill ended, and in older journals."""
        return max(0.0, self.returned - self.called, self.stalled or 0.0)

    @property
    def writing_secs(self) -> float | None:
        """How long it was written."""
        return None if self.began is None or self.durable is None else max(0.0, self.durable - self.began)

    @property
    def durable_secs(self) -> float | None:
        """From the call until it was durable."""
        return None if self.durable is None else max(0.0, self.durable - self.called)


def saves_of(journal: Sequence[JournalLine]) -> tuple[SaveTimes, ...]:
    """The saves of a run, in the order of their calls.

    Examples:
        >>> lines = [JournalLine(1.0, "called", 4, data={"returned": 1.25, "outcome": "staged"}),
        ...          JournalLine(3.0, "written", 4, data={"began": 1.5, "stalled": 0.75})]
        >>> [(save.stall_secs, save.writing_secs, save.durable_secs) for save in saves_of(lines)]
        [(0.75, 1.5, 2.0)]
    """
    found: list[SaveTimes] = []
    under_way: dict[int, int] = {}  # step -> place in `found`
    for line in journal:
        if line.kind == "started":
            under_way.clear()
        elif line.step is None:
            continue
        elif line.kind == "called":
            outcome = line.data.get("outcome")
            is_over = outcome == "skipped"
            returned = line.moment("returned")
            if not is_over:
                under_way[line.step] = len(found)
            found.append(
                SaveTimes(
                    line.step,
                    line.at,
                    line.at if returned is None else returned,
                    outcome="skipped" if is_over else "lost",
                )
            )
        elif line.kind in ("written", "failed") and line.step in under_way:
            at = under_way.pop(line.step)
            save = attrs.evolve(found[at], stalled=line.moment("stalled"))
            if line.kind == "failed":
                found[at] = attrs.evolve(save, outcome="failed", detail=line.detail)
            else:
                found[at] = attrs.evolve(save, began=line.moment("began"), durable=line.at, outcome="written")
    return tuple(found)
