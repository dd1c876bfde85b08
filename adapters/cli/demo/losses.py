"""`Losses`: the loss of each step, from the record of a run that may have resumed several times."""

from collections.abc import Iterable, Iterator
from typing import final

import attrs

from trainfold.core.rehearsal.entry import RecordedLine


@final
@attrs.frozen
class Losses:
    """The loss of each step of a run that may have resumed several times.

    Attributes:
        by_step: step -> the loss that was computed last.
        replayed: the number of steps that were computed more than once.
        contradictions: the replayed steps whose losses differ in a bit.
    """

    by_step: dict[int, float]
    replayed: int
    contradictions: tuple[int, ...]


def losses_of(events: Iterable[RecordedLine]) -> Losses:
    """Collect the losses of a record.

    Examples:
        >>> log = [RecordedLine("step", step, 1, 0.0, {"loss": loss}) for step, loss in ((1, 5.0), (2, 4.0), (2, 4.0), (3, 3.0))]
        >>> losses_of(log)
        Losses(by_step={1: 5.0, 2: 4.0, 3: 3.0}, replayed=1, contradictions=())
    """
    seen: dict[int, list[float]] = {}
    for step, loss in _steps(events):
        seen.setdefault(step, []).append(loss)
    return Losses(
        by_step={step: values[-1] for step, values in sorted(seen.items())},
        replayed=sum(len(values) > 1 for values in seen.values()),
        contradictions=tuple(step for step, values in sorted(seen.items()) if len({v.hex() for v in values}) > 1),
    )


def _steps(events: Iterable[RecordedLine]) -> Iterator[tuple[int, float]]:
    for event in events:
        if event.kind == "step":
            yield event.step, float(event.data["loss"])
