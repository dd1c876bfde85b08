"""The pause of the garbage collector affects the whole process, so one thread at a time makes it, and it leaves no trace."""

import gc
import threading

import pytest

from trainfold.backends.gc_pause import without_collecting


@pytest.fixture(autouse=True)
def _enabled():
    gc.enable()
    yield
    gc.enable()


def test_what_the_loop_says_while_another_thread_builds_a_value_stands():
    """D02: a background save must not turn on what the loop has turned off, nor leave off what it had on."""
    entered, may_go_on, seen = threading.Event(), threading.Event(), []

    @without_collecting
    def build():
        seen.append(gc.isenabled())
        entered.set()
        assert may_go_on.wait(20)

    thread = threading.Thread(target=build)
    thread.start()
    assert entered.wait(20)
    assert gc.isenabled()
    gc.disable()
    may_go_on.set()
    thread.join(20)
    assert (gc.isenabled(), seen) == (False, [True])


def test_two_threads_that_build_values_leave_the_collector_on():
    """The later of two pauses would find it off, and leave it so."""
    second_is_in = threading.Event()

    @without_collecting
    def second():
        second_is_in.set()
        assert first_is_out.wait(20)

    @without_collecting
    def first():
        thread.start()
        assert second_is_in.wait(20)

    first_is_out, thread = threading.Event(), threading.Thread(target=second)
    first()
    first_is_out.set()
    thread.join(20)
    assert gc.isenabled()


def test_a_pause_inside_of_a_pause_and_one_that_raises_end_with_the_outer_one():
    @without_collecting
    def inner():
        raise ValueError("inner")

    @without_collecting
    def outer():
        with pytest.raises(ValueError, match="inner"):
            inner()
        return gc.isenabled()

    assert (outer(), gc.isenabled()) == (False, True)
    gc.disable()
    assert (outer(), gc.isenabled()) == (False, False)
