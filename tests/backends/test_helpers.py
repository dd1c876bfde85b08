"""Threads that share work: each task runs once, with or without threads, and no caller waits for a task that never starts."""

import _thread
import os
import sys
import threading
import time
from queue import SimpleQueue

import pytest

from trainfold.backends import helpers
from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.stores import direct_io


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


@pytest.fixture(autouse=True)
def no_idle_threads(monkeypatch):
    """Each test begins without the threads that others have left."""
    monkeypatch.setattr(helpers, "_IDLE", SimpleQueue())


@pytest.fixture
def started(monkeypatch):
    """A list with an item for each thread that is started."""
    found = []

    def count(function, args):
        found.append(function)
        return REAL(function, args)

    monkeypatch.setattr(_thread, "start_new_thread", count)
    return found


def done_by_two():
    """Two tasks that only two threads can do, because each waits for the other."""
    with Helpers(2) as both:
        meet = threading.Barrier(2, timeout=20)
        tasks = [both.give(Task(lambda: (meet.wait(), threading.get_ident())[1])) for _ in range(2)]
        while not all(task._claim.locked() for task in tasks):
            time.sleep(0.001)  # `result` would do them here
        return {task.result() for task in tasks}


def test_threads_are_made_once_and_used_again(started):
    """W19: the blocks of a whole run of saves need no more threads than one of them."""
    first = done_by_two()
    assert len(first) == 2
    assert all(done_by_two() == first for _ in range(50))
    assert len(started) == 2


def test_files_are_written_by_the_same_threads(started, tmp_path):
    """W19: a save of many files starts two threads, and the next save none."""
    size = 3 * direct_io.BUFFER_BYTES
    for number in range(6):
        with (tmp_path / f"{number}").open("wb", buffering=0) as file:
            direct_io.write_stream(file.fileno(), [bytes([number]) * size], size_bytes=size)
        assert (tmp_path / f"{number}").read_bytes() == bytes([number]) * size
    assert len(started) == direct_io.WRITERS


def test_blocks_at_the_same_time_have_threads_of_their_own(started):
    with Helpers(1) as outer:
        begun, gate = threading.Event(), threading.Event()
        waits = outer.give(Task(lambda: (begun.set(), gate.wait(20))))
        assert begun.wait(20)
        with Helpers(1) as inner:
            does = threading.Event()
            inner.give(Task(does.set))
            assert does.wait(20), "it is not behind the task of the other block"
        gate.set()
        waits.result()
    assert len(started) == 2


def test_a_forked_child_makes_its_own(started):
    """The threads of its parent are not there, and what waits for one of them would wait for ever."""
    done_by_two()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if len(done_by_two()) == 2 and len(started) == 4 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_thread_that_a_failure_has_ended_is_not_used_again(started, monkeypatch):
    """Such as one that got no memory for the next task that it wanted to take."""
    with Helpers(1) as one:
        one._waiting.put(type("Deadly", (), {"carry_out": lambda self, helper: sys.exit()})())
        while not one._helpers[0].end.is_over:
            time.sleep(0.001)
    assert helpers._IDLE.empty()
    with Helpers(1) as other:
        assert other.give(Task(lambda: 7)).result() == 7
    assert len(started) == 2


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
    """If even the call that reports its end gets no memory."""
    task = Task(lambda: 7)
    helper = type("Helper", (), {"end": type("End", (), {"is_over": True})()})()
    assert task.withdraw()  # it has claimed it
    task._helper = helper
    with pytest.raises(MemoryError, match="died"):
        task.result()
