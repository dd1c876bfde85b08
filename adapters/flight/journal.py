"""`Journal`: writes what happens to a run, and when, beside its checkpoints: starts, saves, events, warnings, the end."""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, Final, final

from trainfold.backends.flight.flights import FlightWriter
from trainfold.backends.flight.journals import JournalWriter
from trainfold.backends.job import Job
from trainfold.backends.lock_holder import seen_as
from trainfold.backends.user_warning import WARNED
from trainfold.core.errors import error_text
from trainfold.core.flight.journal_line import UNSTARTED, JournalLine, drift_data
from trainfold.core.resume.drift import Drift
from trainfold.core.save.events import Event
from trainfold.core.save.retention import Retention
from trainfold.core.save.retention_rules import rules_to_json

_LOG: Final = logging.getLogger("trainfold")
_GOES_ON: Final = ("called", "evaluated", "restored")  # lines after the end that show that the loop goes on
_EXIT_PRIORITY: Final = 50  # after the jobs of the process: what they write comes before its end


@final
class Journal(logging.Filter):
    """A listener to one run, on rank 0. Until the run is restored, or starts fresh, lines are kept back, so that a manager that is only made writes nothing.

    A refused resume is written at once, if there is a run. Warnings are those of trainfold, in the whole process: through `logging`, and through `warnings`. It is a filter of the logger that passes
    everything, because with a handler Python would no longer print warnings where a program has not set up `logging`.

    Law: a process that ends in order, or by an exception, leaves a line of its end, whether its program ends the loop with the manager or not; one that is killed
    leaves none, unless its loop was over.

    Args:
        file: where the lines go.
        flight: the flight log of the same rank.
    """

    def __init__(self, file: JournalWriter, flight: FlightWriter) -> None:
        super().__init__()
        self._file = file
        self._flight = flight
        self._kept_back: list[JournalLine] | None = []
        self._rules: dict[str, Any] = {}
        self._is_over = False  # the last line says that it has ended, and nothing has gone on since
        self._at_exit: Finalize | None = None
        self._step: int | None = None  # the last one that the loop has done here
        self._under_way: tuple[int, Job[Any], Callable[[], float | None]] | None = None
        _LOG.addFilter(self)
        WARNED.append(self.warned)

    def keeps(
        self, policy: Retention, left_behind: Retention | None, *, place: str, far_tier: tuple[str, Retention] | None
    ) -> None:
        """Remember the rules of the run's retention for the line of the start; with where the run is, and where a far tier is, and its rules."""
        self._rules = {"place": place, "keep": rules_to_json(policy.rules)}
        self._rules |= {} if left_behind is None else {"left_behind": rules_to_json(left_behind.rules)}
        self._rules |= {} if far_tier is None else {"far": far_tier[0], "keep_far": rules_to_json(far_tier[1].rules)}

    def started(self, step: int) -> None:
        """Write that a process trains from this step on; before its first step, so that the flight log still shows how far the one before came."""
        kept_back, self._kept_back = self._kept_back or [], None
        line = JournalLine(time.time(), "started", step, data={**seen_as(), **self._rules})
        self._file.start(line, self._flight.reached)
        if kept_back:
            self._file.append(kept_back)
        self._watch_exit()

    def _watch_exit(self) -> None:
        """Write the end when the process ends in order, also one of `multiprocessing`, which calls no function of `atexit`; a forked one has another journal."""
        if self._at_exit is None:
            self._at_exit = Finalize(None, self._exits, exitpriority=_EXIT_PRIORITY)

    def _exits(self) -> None:
        self._at_exit = None
        is_asked = hasattr(sys, "ps1")  # then each exception of a person's line is the last one
        kind, error, _ = sys.exc_info()
        if kind is None and not is_asked:
            kind, error = getattr(sys, "last_type", None), getattr(sys, "last_value", None)
        self._flight.close()
        if self._under_way is not None and self._under_way[1].is_over:  # the program has not asked how it ended
            step, job, stalled_secs = self._under_way
            if job.failure is None:
                self.written(step, job.began_at, job.ended_at, stalled_secs=stalled_secs())
            else:
                self._write("failed", step, detail=error_text(job.failure), data=_stalled(stalled_secs()))
        self._end(kind, error)
        self._file.close()

    def put(self) -> None:
        """Make what is written so far outlive this process, if the run is in a store that cannot append."""
        self._file.put()

    def event(self, event: Event) -> None:
        """Write an event of the manager. The beginning of a save, `called` writes."""
        if event.kind == "failed":
            self._under_way = None
        if event.kind == "refused" and self._kept_back is not None:
            line = JournalLine(time.time(), event.kind, event.step, detail=event.detail, data=UNSTARTED)
            if self._file.is_in_run():  # this process may never start, and nothing else says why
                self._file.append([line])
                self._file.put()
            else:
                self._kept_back.append(line)
        elif event.kind != "saved":
            reached = self._gone_back(event)
            self._write(event.kind, event.step, event.checkpoint, event.detail, data={**_stalled(event.stalled_secs), **reached})  # fmt: skip

    def _gone_back(self, event: Event) -> dict[str, int]:
        """How far the loop had come when it went back to a checkpoint; empty of the first restore of a process, and of other events."""
        if event.kind != "restored" or event.step is None:
            return {}
        reached, self._step = self._step, event.step
        return {} if reached is None else {"reached": reached}

    def called(self, step: int, secs: float, outcome: str) -> None:
        """Write that the loop has called a save, which has returned now, after so many seconds; and that it is durable, if it is."""
        now = time.time()
        self._write("called", step, at=now - secs, data={"returned": now, "outcome": outcome})
        if outcome == "written":
            self.written(step, now - secs, now)

    def under_way(self, step: int, job: Job[Any], stalled_secs: Callable[[], float | None]) -> None:
        """Remember a save in the background. If the process ends first, how it ended is written then, and for how long the loop stood still."""
        self._under_way = step, job, stalled_secs

    def written(self, step: int, began: float, ended: float, *, stalled_secs: float | None = None) -> None:
        """Write when a save was written, and durable; and for how long the loop stood still, if that was longer than the call."""
        self._under_way = None
        self._write("written", step, at=ended, data={"began": began, **_stalled(stalled_secs)})

    def evaluated(self, step: int, name: str, value: float) -> None:
        """Write a result that the loop has recorded."""
        self._write("evaluated", step, data={"metric": name, "score": value if math.isfinite(value) else str(value)})

    def met(self, step: int | None, drifts: Sequence[Drift]) -> None:
        """Write what differed at a resume, and was accepted."""
        data = drift_data([(each.verdict, each.kind, each.where, str(each.saved), str(each.wanted)) for each in drifts])
        self._write("met", step, data=data)

    def warned(self, text: str) -> None:
        """Write a warning."""
        self._write("warned", detail=text)

    def filter(self, record: logging.LogRecord) -> bool:
        """Write a warning that is logged, and let it pass; see `logging.Filter`."""
        is_event = isinstance(record.args, tuple) and len(record.args) == 1 and isinstance(record.args[0], Event)
        if record.levelno >= logging.WARNING and not is_event:  # an event has a line of its own
            with suppress(Exception):  # arguments that do not fit the message: logging reports that
                self.warned(record.getMessage())
        return True

    def finished(self) -> None:
        """Write that the loop is over; the process may go on, and so may the loop."""
        if self._kept_back is None:
            self._end(*sys.exc_info()[:2])
            self._file.put()

    def did(self, step: int) -> None:
        """Note a step that the loop has done."""
        self._step = step
        self._goes_on(step)

    def _goes_on(self, step: int) -> None:
        """If the loop was over, it goes on, and its end is still to come."""
        if self._is_over:
            self._is_over = False
            self._watch_exit()
            self._write("reopened", step, data={"pid": os.getpid()})

    def ended(self, failures: Sequence[Exception] = ()) -> None:
        """Write that the manager is closed, and because of which exception, if one is on its way, or with which of its own it ends.

        Args:
            failures: of what was under way; the first is raised then.
        """
        _LOG.removeFilter(self)
        if self.warned in WARNED:
            WARNED.remove(self.warned)
        if self._kept_back is None:
            kind, error, _ = sys.exc_info()
            self._end(*((type(failures[0]), failures[0]) if kind is None and failures else (kind, error)))
            self._file.close()
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Write the end, unless it is written; an exception that comes after it is written too."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            kind = None
        if not self._is_over or kind is not None:
            self._write("closed", detail="" if kind is None else kind.__name__, data={"pid": os.getpid()})
        self._is_over = True

    def _write(  # noqa: PLR0913 - fields of a line
        self, kind: str, step: int | None = None, checkpoint: str | None = None, detail: str = "", *, at: float | None = None, data: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        if kind in _GOES_ON and step is not None:
            self._goes_on(step)
        line = JournalLine(time.time() if at is None else at, kind, step, checkpoint, detail, data or {})
        if self._kept_back is None:
            self._file.append([line])
        else:
            self._kept_back.append(line)


def _stalled(secs: float | None) -> dict[str, float]:
    return {} if secs is None else {"stalled": secs}
