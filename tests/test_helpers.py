"""Threads that share work: each task is done once, whether or not there are threads, and nobody waits for one that never begins."""

import _thread
import threading
import time

import pytest

from trainfold.backends.helpers import Helpers, Task


def never(*_):
    """As a thread that got no memory to say that it runs: it was started, and nothing comes of it."""
    return 0


def refuses(*_):
    raise RuntimeError("can't start new thread")


def without_memory(*_):
    raise MemoryError


def late(function, args):
    return REAL(lambda: (time.sleep(0.05), function(*args)), ())


REAL = _thread.start_new_thread


@pytest.mark.parametrize("start", [REAL, never, refuses, without_memory, late])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_each_task_is_done_once_whatever_becomes_of_the_threads(start, count, monkeypatch):
    """W19."""
    monkeypatch.setattr(_thread, "start_new_thread", start)
    done = []
    with Helpers(count) as helpers:
        tasks = [helpers.give(Task(lambda at=at: (done.append(at), at)[1])) for at in range(20)]
        assert [task.result() for task in tasks] == list(range(20))
    time.sleep(0.1 if start is late else 0.0)
    assert sorted(done) == list(range(20))


def test_what_nobody_has_begun_is_not_done_after_the_end():
    """A write that comes late would hit another file."""
    gate, begun, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        gate.wait(20)
        done.append("first")

    def block():
        with Helpers(1) as helpers:
            helpers.give(Task(first))
            helpers.give(Task(lambda: done.append("second")))
            assert begun.wait(20)
            threading.Timer(0.05, gate.set).start()
            raise KeyError("the block fails")

    with pytest.raises(KeyError, match="fails"):
        block()
    assert done == ["first"], "what was begun has ended, and the other is never begun"


def test_a_failure_is_raised_where_the_result_is_wanted():
    def fails():
        raise OSError(28, "No space left on device")

    with Helpers(2) as helpers:
        task = helpers.give(Task(fails))
        with pytest.raises(OSError, match="No space"):
            task.result()


def test_a_thread_that_dies_with_a_task_in_its_hands_is_no_hang():
    """Where even the call that tells of its end gets no memory."""
    task = Task(lambda: 7)
    helper = type("Helper", (), {"end": type("End", (), {"is_over": True})()})()
    assert task.withdraw()  # it has claimed it
    task._helper = helper
    with pytest.raises(MemoryError, match="died"):
        task.result()
