"""Processes and saves of a run, from its journal: against a plain model of a run that is killed, and for journals of any lines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.history.inventory import Inventory
from trainfold.core.page.charts import time_line
from trainfold.core.page.run_page import FlightFacts, RunPage
from trainfold.core.page.save_times import saves_of
from trainfold.core.page.sections import SECTIONS
from trainfold.core.page.sessions import Session, again_text, sessions_of, steps_under_way

STEP_SECS, EVERY, PAUSE_SECS = 2.0, 3, 100.0


def lived(lengths, ends_well):
    """The journal of a run whose processes do so many steps each, save each `EVERY` steps, and die; what is known of each process; the flight."""
    lines, known, now, saved, reached = [], [], 1000.0, 0, None
    for number, length in enumerate(lengths):
        data = {} if reached is None else {"reached": reached[0], "reached_at": reached[1]}
        lines.append(JournalLine(now, "started", saved, data=data))
        began, first = now, saved
        for step in range(first + 1, first + length + 1):
            now += STEP_SECS
            if step % EVERY == 0:
                lines.append(JournalLine(now, "called", step, data={"returned": now + 0.5, "outcome": "staged"}))
                lines.append(JournalLine(now + 1.5, "written", step, data={"began": now + 0.5}))
                saved = step
        reached = (first + length, now) if length else reached  # a process that does no step leaves the log as it is
        is_last = number == len(lengths) - 1
        if is_last and ends_well:
            lines.append(JournalLine(now, "closed"))
        ending = ("closed" if ends_well else "open") if is_last else "killed"
        again = None if not known else known[-1][2] - first
        known.append((began, first, first + length, ending, again))
        now += PAUSE_SECS
    return lines, known, FlightFacts(first=1, last=reached and reached[0], written_at=reached and reached[1])


@given(lengths=st.lists(st.integers(0, 10), min_size=1, max_size=6), ends_well=st.booleans())
def test_each_process_is_known_with_what_it_computed_again(lengths, ends_well):
    """W22: starts, kills and resumes, and the recomputed steps."""
    lines, known, flight = lived(lengths, ends_well)
    found = sessions_of(lines, flight)
    assert [(each.began_at, each.first, each.last, each.ending, each.recomputed) for each in found] == known
    assert all(list(each.moments) == sorted(each.moments) for each in found)
    saves = saves_of(lines)
    assert [save.step for save in saves] == [line.step for line in lines if line.kind == "called"]
    assert all((save.stall_secs, save.writing_secs, save.durable_secs) == (0.5, 1.0, 1.5) for save in saves)


def rolled_back(journeys, *, tells=True):
    """The journal and the flight of a run that a kill ends after each journey but the last: a process goes to a step, back to an earlier one, on, and so on.

    A journey is a list of (step that it goes to, step that a restore takes it back to, or None). Returns, too, how many steps were computed, and the step at each end.
    """
    lines, now, computed, reached, at_ends, first = [], 1000.0, 0, None, [], 0
    for journey in journeys:
        data = {} if reached is None else {"reached": reached[0], "reached_at": reached[1]}
        lines.append(JournalLine(now, "started", first, data=data))
        step = first
        for to, goes_back in journey:
            computed += max(0, to - step)
            step = max(step, to)
            reached = (step, now := now + 10.0)
            if not tells:
                lines.append(JournalLine(now, "called", step, data={"returned": now}))
            if goes_back is not None:
                back = min(goes_back, step)
                now += 1.0
                lines.append(JournalLine(now, "restored", back, data={"reached": step} if tells else {}))
                step = back
        at_ends.append(step)
        first, now = step - step % 5, now + PAUSE_SECS
    return lines, FlightFacts(first=1, last=reached[0], written_at=reached[1]), computed, at_ends


JOURNEY = st.lists(st.tuples(st.integers(1, 60), st.none() | st.integers(0, 50)), min_size=1, max_size=4)


@pytest.mark.parametrize("tells", [True, False])
@given(journeys=st.lists(JOURNEY, min_size=1, max_size=4))
def test_steps_that_a_process_goes_back_by_are_computed_again(journeys, tells):
    """W22: a restore of an older step in the middle of a process was shown as no step computed again, with the kill at the highest step."""
    lines, flight, computed, at_ends = rolled_back(journeys, tells=tells)
    found = sessions_of(lines, flight)
    assert [each.at_end for each in found] == at_ends
    assert sum(each.recomputed or 0 for each in found) + found[-1].at_end == computed
    assert all(each.last == max(step for _, step in each.moments) >= each.at_end for each in found)
    times = [at for each in found for at, _ in each.moments]
    assert times == sorted(times)


def test_a_process_that_went_back_is_drawn_and_listed_where_it_ended():
    lines, flight, _, _ = rolled_back([[(35, 20), (25, None)], [(60, None)]])
    sessions = sessions_of(lines, flight)
    marks = {series.name: series.parts for series in time_line(sessions, ()).marks}
    assert marks["killed, or ended by an exception"] == (((sessions[0].ended_at, 25.0),),)
    assert marks["back to a checkpoint"][0][0] == (sessions[0].ended_at, 25.0)
    assert marks["training"][0] == ((1000.0, 0.0), (1011.0, 35.0), (1011.0, 20.0), (1021.0, 25.0))
    page = RunPage(Inventory("runs/a", "r", ()), 2000.0, journal=tuple(lines), flight=flight)
    shown = re.sub("<[^>]*>", "\n", SECTIONS["starts"][2](page))
    assert "25 (reached 35)" in shown
    assert again_text(sessions) == "15 steps"
    before = [lines[0], JournalLine(1009.0, "evaluated", 33), lines[1]]
    assert steps_under_way(before, FlightFacts(last=25, written_at=1021.0)) == {25}, "where the loop stands"


def test_after_a_process_that_recorded_nothing_it_is_not_known_what_was_computed_again():
    """W22: the page said 0 of a process that began after the last step of the one before: another one, which recorded nothing, had been killed between."""
    lines = [JournalLine(0.0, "started", 0), JournalLine(9.0, "called", 10), *(JournalLine(at, "started", step, data={"reached": 15, "reached_at": 10.0}) for at, step in ((20.0, 10), (40.0, 20)))]  # fmt: skip
    found = sessions_of(lines, None)
    assert [each.recomputed_text for each in found] == ["", "5", "not known"]
    assert again_text(found) == "at least 5 steps"


def test_a_restore_of_a_later_step_takes_back_what_is_not_computed_again():
    """W22: after a restore of an older step and a kill, the newest checkpoint may be one from before the restore."""
    for jump in ([JournalLine(30.0, "started", 30, data={"reached": 25, "reached_at": 29.0})], [JournalLine(30.0, "restored", 30, data={"reached": 25})]):  # fmt: skip
        lines = [JournalLine(0.0, "started", 0), *(JournalLine(at, "restored", 20, data={"reached": 35}) for at in (10.0, 20.0)), *jump,
                 JournalLine(60.0, "called", 60)]  # fmt: skip
        assert again_text(sessions_of(lines, None)) == "25 steps", (
            "of the 85 that were computed: 35, 15, 5 and 30, where the second 15 are 5"
        )


def test_no_number_is_shown_where_nothing_is_known_of_what_was_computed_again():
    """W22: of a run in a bucket whose process was killed before its log was put: it was "at least 0"."""
    killed = Session(0.0, 0, 1.0, 4, "killed")
    unknown = Session(2.0, 4, 3.0, 9, "open", recomputed=0, is_least=True)
    assert unknown.recomputed_text == "not known"
    assert again_text([killed, unknown]) == "an unknown number of steps"
    assert again_text([killed, unknown, Session(4.0, 6, 5.0, 9, "open", recomputed=3)]) == "at least 3 steps"


def test_the_end_of_another_process_is_not_that_of_this_one():
    """A process whose directory was deleted, and made again by another one, ended in the journal of that one."""
    lines = [
        JournalLine(10.0, "started", 0, data={"pid": 7}),
        JournalLine(11.0, "closed", detail="RunReplaced", data={"pid": 6}),
    ]
    assert [each.ending for each in sessions_of(lines, None)] == ["open"]
    assert [each.ending for each in sessions_of([*lines, JournalLine(12.0, "closed", data={"pid": 7})], None)] == [
        "closed"
    ]


def test_a_log_that_was_copied_makes_no_process_longer():
    lines = [JournalLine(10.0, "started", 0), JournalLine(20.0, "closed")]
    (found,) = sessions_of(lines, FlightFacts(last=7, written_at=9000.0))
    assert (found.last, found.ended_at) == (7, 20.0)


def test_the_loop_stood_still_for_the_call_and_for_what_its_updates_waited_for():
    """R05, W22: as the end of the save says it. A journal of an older version, and a save without an end, have the call alone."""
    lines = []
    for step, kind, data in ((1, "written", {}), (2, "written", {"stalled": 2.5}), (3, "failed", {"stalled": 3.0}), (4, "failed", {}), (5, "x", {}),
                             (6, "written", {"stalled": "long"})):  # fmt: skip
        lines += [JournalLine(10.0 * step, "called", step, data={"returned": 10.0 * step + 0.5, "outcome": "staged"}),
                  JournalLine(10.0 * step + 4, kind, step, data=data)]  # fmt: skip
    assert [save.stall_secs for save in saves_of(lines)] == [0.5, 2.5, 3.0, 0.5, 0.5, 0.5]


def test_a_save_that_a_kill_ends_is_not_durable_and_one_that_fails_is_called_so():
    lines = [JournalLine(1.0, "started", 0), JournalLine(2.0, "called", 4, data={"returned": 2.1, "outcome": "staged"}),
             JournalLine(3.0, "started", 0), JournalLine(4.0, "called", 4, data={"returned": 4.1, "outcome": "staged"}),
             JournalLine(5.0, "failed", 4, detail="no space"), JournalLine(6.0, "called", 8, data={"outcome": "skipped"})]  # fmt: skip
    assert [(save.outcome, save.durable, save.detail) for save in saves_of(lines)] == [
        ("lost", None, ""), ("failed", None, "no space"), ("skipped", None, "")]  # fmt: skip


KINDS = st.sampled_from(["started", "called", "written", "failed", "closed", "evaluated", "restored", "warned", "x"])
DATA = st.dictionaries(st.sampled_from(["reached", "reached_at", "returned", "began", "stalled", "outcome"]), st.floats(0, 1e9) | st.text(max_size=3) | st.integers(-9, 99), max_size=3)  # fmt: skip
ANY_LINES = st.lists(st.builds(JournalLine, st.floats(0, 1e9), KINDS, st.none() | st.integers(0, 99), st.none(), st.text(max_size=3), DATA), max_size=12)  # fmt: skip


@given(lines=ANY_LINES, last=st.none() | st.integers(0, 99))
def test_a_journal_of_any_lines_gives_sessions_that_begin_before_they_end(lines, last):
    found = sessions_of(lines, FlightFacts(last=last))
    assert len(found) == sum(line.kind == "started" and line.step is not None for line in lines)
    for each in found:
        assert each.first <= each.last
        assert each.moments[0][0] <= each.ended_at
    assert all(save.stall_secs >= 0 for save in saves_of(lines))
