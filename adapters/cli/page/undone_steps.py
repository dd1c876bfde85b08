"""`Resumed`: which steps of a flight log a resume has undone, so that a page does not draw them as the run."""

from collections.abc import Sequence
from typing import final

import attrs

from trainfold.backends.flight.flight_values import FlightValues, Values
from trainfold.core.flight.damage import steps_left_out
from trainfold.core.flight.journal_line import JournalLines
from trainfold.core.history.inventory import Inventory
from trainfold.core.markup.texts import steps_are
from trainfold.core.page.sessions import undone_after


@final
@attrs.frozen
class Resumed:
    """What is known of the resumes of a run. A log is cut by the first step that is recorded after one.

    Attributes:
        inventory: the checkpoints.
        journal: of the run.
        is_copied: whether the logs have the times of a copy.
    """

    inventory: Inventory
    journal: JournalLines
    is_copied: bool

    def undone(self, log: FlightValues, name: str) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
        """The first and the last of the steps of a log that a resume has undone, and the same in words.

        Args:
            log: as it was read.
            name: of its file.
        """
        if log.last is None:
            return [], ()
        left = [] if log.damage else list(steps_left_out(log.steps, self.inventory.current_steps))
        spans, texts = [(each.first, each.last) for each in left], [each.text_of(name) for each in left]
        begun = undone_after(self.journal.lines, None if self.is_copied else log.written_at)
        if begun is not None and begun < log.last:
            spans.append((begun + 1, log.last))
            texts.append(
                f"{name}: {steps_are(begun + 1, log.last)} undone: the last process began from step {begun}, and has recorded none yet"
            )
        return spans, tuple(texts)


def without(values: Values, spans: Sequence[tuple[int, int]]) -> tuple[Sequence[int], Sequence[float]]:
    """The values without those of some steps.

    Args:
        values: of steps.
        spans: the first and the last of the steps that are left out.
    """
    if not spans:
        return values
    kept = [pair for pair in zip(*values, strict=True) if not any(first <= pair[0] <= last for first, last in spans)]
    return [step for step, _ in kept], [value for _, value in kept]
