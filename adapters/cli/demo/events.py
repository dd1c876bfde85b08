"""`Event` and the log of them: what a run that may die at any moment leaves behind about itself."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

import attrs

EventKind: TypeAlias = Literal["start", "step", "save", "saved", "done"]


@final
@attrs.frozen
class Event:
    """One thing that happened in a run.

    Attributes:
        kind: ``start`` (a process began, maybe from a checkpoint), ``step`` (done), ``save`` (begins), ``saved``
            (acknowledged), ``done`` (the run is over).
        step: optimizer steps done by then.
        pid: of the process.
        secs: since the process's log was opened.
        data: what else there is to say, as JSON can hold it.
    """

    kind: EventKind
    step: int
    pid: int
    secs: float
    data: dict[str, Any] = attrs.field(factory=dict)


def decode_event(line: bytes) -> Event | None:
    """One line of a log; None if it is torn.

    Examples:
        >>> decode_event(b'{"kind": "step", "step": 3, "pid": 1, "secs": 0.5, "data": {"lo') is None
        True
        >>> decode_event(b'{"kind": "step", "step": 3, "pid": 1, "secs": 0.5, "data": {}}').step
        3
    """
    try:
        found = json.loads(line)
        event = Event(**found)
    except (ValueError, TypeError):
        return None
    return event if event.kind in get_args(EventKind) else None


def read_events(path: Path) -> list[Event]:
    """All whole events of a log, in the order in which they happened; torn lines are passed over."""
    if not path.exists():
        return []
    return [event for event in map(decode_event, path.read_bytes().split(b"\n")) if event is not None]


@final
class EventLog:
    """Appends events to a file, one ``write`` each, and repeats them on a pipe for whoever watches.

    What the operating system has taken survives the death of the process (not that of the machine: it is not synced).

    Args:
        path: the file; it may have events, or half of one, of earlier processes.
        watcher: a file descriptor to repeat them on, or None.
        clock: seconds, from any start.
    """

    def __init__(self, path: Path, *, watcher: int | None, clock: Callable[[], float]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._watcher = watcher
        self._clock = clock
        self._start = clock()
        end = os.lseek(self._file, 0, os.SEEK_END)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            os.write(self._file, b"\n")  # else the first event here would be glued to the torn one before

    def write(self, kind: EventKind, step: int, **data: Any) -> None:
        """Append an event.

        Raises:
            BrokenPipeError: if nobody watches any more; what is written is written.
        """
        event = Event(kind, step, os.getpid(), round(self._clock() - self._start, 6), data)
        line = json.dumps(attrs.asdict(event)).encode() + b"\n"
        os.write(self._file, line)
        if self._watcher is not None:
            os.write(self._watcher, line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@final
@attrs.frozen
class Losses:
    """The loss of each step of a run that went back to a checkpoint now and then.

    Attributes:
        by_step: step -> its loss, as it was computed last.
        replayed: steps that were computed more than once.
        contradictions: of those, the steps whose losses were not all the same bits.
    """

    by_step: dict[int, float]
    replayed: int
    contradictions: tuple[int, ...]


def losses_of(events: Iterable[Event]) -> Losses:
    """Collect the losses of a log.

    Examples:
        >>> log = [Event("step", step, 1, 0.0, {"loss": loss}) for step, loss in ((1, 5.0), (2, 4.0), (2, 4.0), (3, 3.0))]
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


def _steps(events: Iterable[Event]) -> Iterator[tuple[int, float]]:
    for event in events:
        if event.kind == "step":
            yield event.step, float(event.data["loss"])
