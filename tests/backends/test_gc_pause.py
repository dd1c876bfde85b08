"""The pause of the garbage collector affects the whole process, so one thread at a time makes it, and it leaves no trace."""

import gc
import threading

import pytest
from kit.adapters.manager.manager_cases import Job

from trainfold.adapters.manager.manager import CheckpointManager
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


@pytest.fixture
def collected():
    """The generations that programs have collected so far: Python itself collects nothing in this test, whether it is switched on or not."""
    found, thresholds = [], gc.get_threshold()

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.set_threshold(0)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("is_on", [True, False])
def test_a_loop_that_collects_at_its_boundaries_is_the_only_one_that_collects(tmp_path, collected, is_on, mode):
    """R06: garbage is not collected around saves, which was measured to cost more (ADR-0062): a loop may choose, and nothing collects beside it."""
    (gc.enable if is_on else gc.disable)()
    for until in (4, 8):
        job = Job(until)
        with CheckpointManager(tmp_path, every=2, mode=mode) as manager:
            assert manager.restore(job.live).is_fresh is (until == 4)
            for step in range(until - 3, until + 1):
                job.run(manager, step)
                assert gc.isenabled() is is_on
        assert gc.isenabled() is is_on
        assert job.live.progress.step == until
        gc.collect()  # the loop's boundary
    assert collected == [2, 2]
