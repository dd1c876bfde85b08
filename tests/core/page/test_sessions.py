"""Processes and saves of a run, from its journal: against a plain model of a run that is killed, and for journals of any lines."""

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.page.run_page import FlightFacts
from trainfold.core.page.sessions import saves_of, sessions_of

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
