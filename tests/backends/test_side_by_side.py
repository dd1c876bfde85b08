"""Calls that prove slow run side by side; the results are those of a loop."""

import threading
import time
from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends import helpers
from trainfold.backends.side_by_side import side_by_side


@given(st.lists(st.integers(-3, 40), max_size=40), st.booleans())
def test_the_result_is_that_of_a_loop(values, is_slow):
    """Law: whatever the calls return or raise, and in however many threads they run, the outcome is that of one loop over them."""

    def call(value):
        if is_slow and value == 40:
            time.sleep(0.01)
        if value < 0:
            raise ValueError(value)
        return value

    def outcome(run):
        try:
            return run([lambda value=value: call(value) for value in values])
        except ValueError as error:
            return error.args

    assert outcome(side_by_side) == outcome(lambda calls: [each() for each in calls])


def test_slow_calls_run_at_once(monkeypatch):
    """18, 3.3: sixteen calls that wait for one another end, because they run side by side after eight slow ones."""
    monkeypatch.setattr(helpers, "_IDLE", SimpleQueue())  # a thread that an earlier test has ended would be one too few
    together = threading.Barrier(16)
    slow = [lambda: time.sleep(0.003)] * 8
    assert side_by_side([*slow, *[lambda: together.wait(30) is not None] * 16]) == [None] * 8 + [True] * 16


def test_quick_calls_start_no_thread():
    """A thousand reads of local files are not made slower by threads: all run in the caller's thread."""
    me = threading.get_ident()
    assert set(side_by_side([threading.get_ident] * 1000)) == {me}
