"""`sessions_of`: the processes that trained a run: where each began, how far it came, how it ended, and what had to be computed again."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.flight.journal_line import UNSTARTED, JournalLine
from trainfold.core.markup.texts import count_text, number_text
from trainfold.core.page.run_page import FlightFacts
from trainfold.core.page.save_times import saves_of

Ending: TypeAlias = Literal["closed", "raised", "killed", "open", "runs"]
_COARSE_SECS: Final = 0.01  # by which the time of a file may be behind the clock; that of an object has whole seconds
_DATED: Final = ("started", "called", "evaluated", "restored")  # lines whose step is that of the run at their time
IN_WORDS: Final[dict[Ending, str]] = {
    "closed": "ended",
    "raised": "ended with an exception",
    "killed": "killed, or died without a word",
    "open": "no end is recorded: it runs, or it was killed",
    "runs": "it runs",
}


@final
@attrs.frozen
class Session:
    """A process that trained the run.

    Attributes:
        began_at: in seconds since 1970.
        first: the step that it continued from; 0 for a fresh start.
        ended_at: when it closed its manager, or the last sign of it.
        last: the highest step that is known of it.
        ending: how it ended, as far as that is known.
        error: the name of the exception that ended it.
        recomputed: how many steps had to be computed again, of the process before it and where it went back itself; None if that is not known.
        is_least: whether these may be more: the last steps of a process that was killed were not in the bucket, or a process before this one has recorded nothing.
        moments: (time, step) that are known of it, in order.
        at_end: the step that it was at when it ended: a lower one than the highest, if it went back.
    """

    began_at: float
    first: int
    ended_at: float
    last: int
    ending: Ending
    error: str = ""
    recomputed: int | None = None
    is_least: bool = False
    moments: tuple[tuple[float, int], ...] = ()
    at_end: int = attrs.field(default=attrs.Factory(lambda self: self.last, takes_self=True), kw_only=True)

    @property
    def recomputed_text(self) -> str:
        """How many steps were computed again, in words; empty if there was nothing before.

        Examples:
            >>> Session(0.0, 4, 1.0, 9, "open", recomputed=3, is_least=True).recomputed_text
            'at least 3'
        """
        if self.is_least and not self.recomputed:
            return "not known"
        return "" if self.recomputed is None else f"{'at least ' * self.is_least}{number_text(self.recomputed)}"


def sessions_of(
    journal: Sequence[JournalLine], flight: FlightFacts | None, *, runs: bool | None = None
) -> tuple[Session, ...]:
    """The processes of a run, the first one first.

    Law: a session counts as killed if, and only if, its journal has no end, or one after which the loop went on, and another session follows, or its process is gone.

    Args:
        journal: its lines, in their order.
        flight: of the last session, how far it came.
        runs: whether the process of the last session runs; None if that is not known.

    Examples:
        >>> lines = [JournalLine(10.0, "started", 0), JournalLine(20.0, "called", 4, data={"returned": 20.5}),
        ...          JournalLine(40.0, "started", 4, data={"reached": 7, "reached_at": 30.0}), JournalLine(60.0, "closed")]
        >>> for session in sessions_of(lines, FlightFacts(last=9, written_at=59.0)):
        ...     print(session.first, session.last, session.ending, session.recomputed)
        0 7 killed None
        4 9 closed 3
    """
    starts = [at for at, line in enumerate(journal) if line.kind == "started" and line.step is not None]
    found: list[Session] = []
    for number, at in enumerate(starts):
        is_last = number == len(starts) - 1
        own = [line for line in journal[at : None if is_last else starts[number + 1]] if line.data != UNSTARTED]
        after = None if is_last else journal[starts[number + 1]]
        found.append(_session(own, after, flight if is_last else None, found[-1] if found else None, runs))
    return tuple(found)


def again_text(sessions: Sequence[Session]) -> str:
    """How many steps all of them computed again, in words.

    Examples:
        >>> again_text([Session(0.0, 0, 1.0, 9, "killed"), Session(2.0, 4, 3.0, 9, "open", recomputed=1)])
        '1 step'
    """
    again, is_least = sum(each.recomputed or 0 for each in sessions), any(each.is_least for each in sessions)
    if is_least and not again:
        return "an unknown number of steps"
    return f"{'at least ' * is_least}{count_text(again, 'step')}"


def _session(
    own: Sequence[JournalLine],
    after: JournalLine | None,
    flight: FlightFacts | None,
    before: Session | None,
    runs: bool | None,  # noqa: FBT001
) -> Session:
    start, first, closed = own[0], own[0].step or 0, _end_of(own)
    moments, again, back = _moments(own)
    latest = next((line.at for line in (closed, after) if line is not None), None)
    at_end = _with_reached(moments, back, _reached(after, flight, own[-1].at), start, latest)
    ending: Ending = "killed" if after is not None or runs is False else "runs" if runs else "open"
    if closed is not None:
        ending = "raised" if closed.detail else "closed"
    ends_at = own[-1].at if closed is None else closed.at
    if again and after is not None:  # the next one may go on from a later step than this one had come to again
        again = max(0, again - max(0, (after.step or 0) - at_end))
    missed = None if before is None else max(0, before.at_end - first)
    is_between = before is not None and first > before.last  # another process has recorded nothing
    return Session(
        start.at,
        first,
        max(moments[-1][0], ends_at),
        max(step for _, step in moments),
        ending,
        "" if closed is None else closed.detail,
        missed if not again else (missed or 0) + again,
        is_between or (before is not None and before.ending == "killed" and start.data.get("is_least") is True),
        tuple(moments),
        at_end=at_end,
    )


def _end_of(own: Sequence[JournalLine]) -> JournalLine | None:
    """The line with which a process ended; None if it has none, or the loop went on after it."""
    pid = own[0].data.get("pid")  # a process whose directory was replaced may end in the journal of the new run
    ends = [line for line in own if line.kind in ("closed", "reopened") and line.data.get("pid", pid) == pid]
    return ends[-1] if ends and ends[-1].kind == "closed" else None


def _with_reached(
    moments: list[tuple[float, int]],
    back: int,
    reached: tuple[int | None, float],
    start: JournalLine,
    latest: float | None,
) -> int:
    """Add how far a session came to its moments, and put these in order; return the step that it was at when it ended.

    Args:
        moments: those that its lines say.
        back: the place of the one when it last went back.
        reached: the step that it came to, and when; see `_reached`.
        start: its first line.
        latest: when it was over, or None; a copy of a log may be younger than its run.
    """
    step, at = reached
    at_end = max(each for _, each in moments[back:])
    if step is not None and step >= moments[back][1] and not _is_before(at, start):  # else the log of a process before
        if back and step > at_end and at < moments[back][0]:
            moments.insert(back, (at, step))  # a log is cut by the first step after the loop went back
        else:
            moments.append((max(at if latest is None else min(at, latest), moments[-1][0]), step))
            at_end = max(at_end, step)
    moments.sort(key=lambda each: each[0])
    return at_end


def _moments(own: Sequence[JournalLine]) -> tuple[list[tuple[float, int]], int, int]:
    """What the lines of a process say: (time, step); how many steps it went back by, less those that it left out later; and the place of the moment when it last did so."""
    found, again, back = [(own[0].at, own[0].step or 0)], 0, 0
    for line in own[1:]:
        if line.kind not in _DATED or line.step is None:
            continue
        if line.kind == "restored":
            told = line.moment("reached")
            is_told = told is not None and 0 <= told < 2**53
            reached = int(told) if told is not None and is_told else max(step for _, step in found[back:])
            found += [(line.at, reached)] if is_told else []
            again = max(0, again + reached - line.step)
            back = len(found) if reached > line.step else back
        found.append((line.at, line.step))
    return found, again, back


def _reached(after: JournalLine | None, flight: FlightFacts | None, last_at: float) -> tuple[int | None, float]:
    """How far a session came: as the flight log shows it, or as the next session found that."""
    if after is not None:
        step, at = after.moment("reached"), after.moment("reached_at")
        return (None, 0.0) if step is None or not 0 <= step < 2**53 else (int(step), last_at if at is None else at)
    if flight is None or flight.last is None:
        return None, 0.0
    return flight.last, last_at if flight.written_at is None else flight.written_at


def _is_before(written_at: float, start: JournalLine) -> bool:
    """Whether a log was written before a process began."""
    return written_at < start.at - (1.0 if written_at.is_integer() else _COARSE_SECS)


def undone_after(journal: Sequence[JournalLine], written_at: float | None) -> int | None:
    """The step from which on a flight log has what the last process has undone, as it was written before that process; None if it was not, or that is not known.

    Args:
        journal: its lines, in their order.
        written_at: when the last line of the log was written.

    Examples:
        >>> undone_after([JournalLine(10.0, "started", 0), JournalLine(40.0, "started", 4)], 30.5)
        4
    """
    start = next((line for line in reversed(journal) if line.kind == "started" and line.step is not None), None)
    return None if start is None or written_at is None or not _is_before(written_at, start) else start.step


def steps_under_way(
    journal: Sequence[JournalLine], flight: FlightFacts | None, *, runs: bool | None = None
) -> frozenset[int]:
    """The steps whose save may be under way now, if the last process still runs: it has no end, and the save has none.

    A save in the loop is in the journal only when it has returned: the loop stands at its step.

    Examples:
        >>> lines = [JournalLine(1.0, "started", 0), JournalLine(2.0, "called", 4, data={"returned": 2.1, "outcome": "staged"})]
        >>> sorted(steps_under_way(lines, FlightFacts(last=6))), sorted(steps_under_way([*lines, JournalLine(3.0, "closed")], None))
        ([4, 6], [])
    """
    sessions = sessions_of(journal, flight, runs=runs)
    if not sessions or sessions[-1].ending not in ("open", "runs"):
        return frozenset()
    begin = max(at for at, line in enumerate(journal) if line.kind == "started" and line.step is not None)
    newest = {save.step: save.outcome for save in saves_of(journal[begin:]) if save.outcome != "skipped"}
    return frozenset({step for step, outcome in newest.items() if outcome == "lost"} | {sessions[-1].at_end} - newest.keys())  # fmt: skip
