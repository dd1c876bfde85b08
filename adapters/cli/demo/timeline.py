"""`Window`: the steps of a run around one of its saves, from the run's record."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs

from trainfold.core.rehearsal.entry import RecordedLine

_STEPS_BEFORE: Final = 3
_STEPS_AFTER: Final = 3


@final
@attrs.frozen
class TimedSpan:
    """A step or a save, timed in seconds from the start of the window's save.

    Attributes:
        step: the step that was computed, or that was saved.
        start: when it began; negative before the save.
        stop: when it ended.
    """

    step: int
    start: float
    stop: float


@final
@attrs.frozen
class Window:
    """One save, and the steps before, during and after it.

    Attributes:
        save: the save; it starts at 0.
        steps: the steps, in order.
    """

    save: TimedSpan
    steps: tuple[TimedSpan, ...]


def window_of(events: Sequence[RecordedLine]) -> Window | None:
    """The window around the save of median length, among those that have enough steps on both sides; None if there is none.

    Examples:
        >>> log = [RecordedLine("start", 0, 1, 0.0)]
        >>> log += [RecordedLine("step", step, 1, float(step)) for step in (1, 2, 3)]
        >>> log += [RecordedLine("save", 3, 1, 3.0), RecordedLine("saved", 3, 1, 3.5)]
        >>> log += [RecordedLine("step", step, 1, step + 0.5) for step in (4, 5, 6)]
        >>> window = window_of(log)
        >>> window.save, len(window.steps), window.steps[0], window.steps[3]
        (TimedSpan(step=3, start=0.0, stop=0.5), 6, TimedSpan(step=1, start=-3.0, stop=-2.0), TimedSpan(step=4, start=0.5, stop=1.5))
    """
    windows = sorted(_windows(events), key=lambda window: window.save.stop)
    return windows[len(windows) // 2] if windows else None


def durable_secs(event: RecordedLine) -> float:
    """When the save of a ``saved`` entry was durable: a background save is recorded later than that."""
    return event.secs - float(event.data.get("secs_ago", 0.0))


def _windows(events: Sequence[RecordedLine]) -> Iterator[Window]:
    """The window of each whole save. Each process counts its seconds from its own start."""
    for _, each in itertools.groupby(events, key=lambda event: event.pid):
        process = list(each)
        steps = [
            (after.step, before.secs, after.secs)
            for before, after in itertools.pairwise(process)
            if after.kind == "step"
        ]
        stops = {event.step: durable_secs(event) for event in process if event.kind == "saved"}
        for event in process:
            if event.kind == "save" and event.step in stops:
                begin, end = event.secs, stops[event.step]
                before = [step for step in steps if step[2] <= begin][-_STEPS_BEFORE:]
                during = [step for step in steps if begin < step[2] and step[1] < end]
                after = [step for step in steps if step[1] >= end][:_STEPS_AFTER]
                if len(before) == _STEPS_BEFORE and len(after) == _STEPS_AFTER:
                    spans = (
                        TimedSpan(number, start - begin, stop - begin)
                        for number, start, stop in before + during + after
                    )
                    yield Window(TimedSpan(event.step, 0.0, end - begin), tuple(spans))
