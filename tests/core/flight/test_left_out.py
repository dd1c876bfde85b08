"""Which steps of a flight log are not the run, by the checkpoints of the run."""

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.flight.damage import Damage
from trainfold.core.flight.flight import flight_of
from trainfold.core.flight.step_record import StateDigest, StepRecord

NO_DAMAGE = Damage()


def flight(*steps, damage=NO_DAMAGE):
    return flight_of([*map(StepRecord, steps), *(StateDigest(step, "model", bytes(16)) for step in steps)], damage)


def test_what_a_process_did_before_a_resume_that_recorded_nothing_is_left_out():
    """It was killed after step 10, the next one went on from 8 and saved 12, and that one's follower recorded from 13 on."""
    found = flight(*range(1, 11), *range(13, 17)).run_alone({4: 0, 8: 4, 12: 8, 16: 12})
    assert sorted(found.steps) == sorted(found.states) == [*range(1, 9), *range(13, 17)]
    assert [(each.first, each.last, each.saved) for each in found.left_out] == [(9, 10, 12)]


def test_a_log_with_lines_that_cannot_be_read_is_left_as_it_is():
    """The record of the saved step may be one of these."""
    found = flight(9, 10, damage=Damage(1, 64)).run_alone({8: 0, 12: 8})
    assert (sorted(found.steps), found.left_out) == ([9, 10], ())


def test_a_log_that_begins_later_than_the_run_is_left_as_it_is():
    found = flight(9, 10, 11, 12).run_alone({4: 0, 8: 4, 12: 8})
    assert (sorted(found.steps), found.left_out) == ([9, 10, 11, 12], ())


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_a_resume_leaves_only_what_the_run_did(every, killed, stopped, is_recorded):
    """Law: each line that is left is of the process whose checkpoints are there, or of steps that none of them has undone."""
    saved = {step: step - every for step in range(every, max(killed, stopped) + 1, every)}
    begin = killed // every * every
    own = range(1, begin + 1 if stopped >= begin + every else killed + 1)
    lines = [*range(1, killed + 1)] if not is_recorded else [*range(1, max(begin, stopped) + 1)]
    found = flight(*lines).run_alone(saved)
    assert sorted(found.steps) == (lines if is_recorded else [*own])
