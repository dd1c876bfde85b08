"""Jobs: each runs once, after the job that it names, and to its end, however the program ends."""

import _thread
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from trainfold.backends import job as job_module
from trainfold.backends import wakeup
from trainfold.backends.job import _STARTED, Job
from trainfold.backends.runs.api import load
from trainfold.core.state.state import Progress, TrainState


def wait_until(is_true):
    deadline = time.monotonic() + 20
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_true()


def refuse(*_):
    raise RuntimeError("can't start new thread")


def test_a_job_runs_after_the_one_that_it_names():
    seen, last = [], None
    for number in range(20):
        last = Job(lambda number=number: seen.append(number), after=last)
        last.start()
    last.wait()
    assert seen == list(range(20))


def test_a_job_that_waits_keeps_none_of_those_before_it():
    first = Job(lambda: None)
    second, gone = Job(lambda: None, after=first), weakref.ref(first)
    first.start()
    del first
    second.start()
    second.wait()
    gc.collect()
    assert gone() is None


def test_a_job_is_carried_out_once_whoever_begins_it():
    count, go = [], threading.Event()
    job = Job(lambda: (go.wait(20), count.append(1)))
    threads = [threading.Thread(target=job.carry_out) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert count == [1]
    assert not job.withdraw()


def test_a_job_that_was_withdrawn_is_never_carried_out():
    count = []
    job = Job(lambda: count.append(1))
    assert job.withdraw()
    job.start()
    job.carry_out()
    assert not count
    assert not job.is_over
    assert job not in _STARTED, "the end of the process does not wait for it"


def test_what_a_job_raises_is_its_failure_and_ends_nothing():
    job = Job(lambda: 1 // 0)
    next_one = Job(lambda: 7, after=job)
    job.start()
    next_one.start()
    next_one.wait()
    assert isinstance(job.failure, ZeroDivisionError)
    assert next_one.result == 7


def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch):
    job, before = Job(threading.current_thread), Job(lambda: 1)
    before.start()
    before.wait()
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        job = Job(threading.current_thread, after=before)
        job.start()
        assert job.result is threading.main_thread()
        assert before.is_over
        with pytest.raises(KeyboardInterrupt):
            Job(lambda: (_ for _ in ()).throw(KeyboardInterrupt)).start()
    job = Job(threading.current_thread, name="test")
    job.start()
    job.wait()
    assert job.result.name == "test"


def test_a_job_that_is_over_holds_nothing_that_is_done():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    job = Job(lambda thing=thing: None)
    job.start()
    del thing
    job.wait()
    wait_until(lambda: gone() is None)
    assert not _STARTED


def test_the_caller_does_not_wait_for_the_thread(monkeypatch):
    """Torch's threads may keep it from running for milliseconds."""
    real, go = _thread.start_new_thread, threading.Event()
    monkeypatch.setattr(
        _thread, "start_new_thread", lambda function, args: real(lambda: (go.wait(20), function(*args)), ())
    )
    job = Job(lambda: 7)
    job.start()
    assert not job.is_over
    go.set()
    job.wait()
    assert job.result == 7


def test_a_job_whose_thread_never_begins_is_done_by_the_caller_that_waits(monkeypatch):
    """Such as a thread that gets no memory to begin with: it dies in silence."""
    monkeypatch.setattr(job_module, "LONGEST_SECS", 0.05)
    monkeypatch.setattr(wakeup, "_AT_LEAST_EVERY_SECS", 0.05)
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    job = Job(threading.current_thread)
    job.start()
    job.wait()
    assert job.result is threading.main_thread()


def test_a_forked_child_does_not_wait_for_the_jobs_of_its_parent():
    go = threading.Event()
    job = Job(lambda: go.wait(20))
    job.start()
    child = os.fork()
    if child == 0:
        os._exit(len(_STARTED))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go.set()
    job.wait()


PROGRAM = """
import atexit, multiprocessing, sys, threading, time, torch, trainfold
from trainfold.core.state.state import Progress, TrainState

def state(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((2 << 20,), float(step))})

def loop(run, ends):
    manager = trainfold.CheckpointManager(run, mode="async", every=1)
    for step in range(1, 4):
        manager.step(state(step))
        time.sleep(0.05)
    if ends:
        manager.finish(state(4))
        manager.close()
    else:
        manager.step(state(4))

if __name__ == "__main__":
    run, how = sys.argv[1:]
    if how == "thread":  # goes on after the main thread
        threading.Thread(target=loop, args=(run, True)).start()
    elif how == "thread without close":
        threading.Thread(target=loop, args=(run, False)).start()
    elif how in ("fork", "spawn"):
        process = multiprocessing.get_context(how).Process(target=loop, args=(run, False))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    elif how == "thread of a process":  # goes on after the main function of the process
        process = multiprocessing.get_context("fork").Process(target=threading.Thread(target=loop, args=(run, False)).start)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    elif how == "atexit":
        manager = trainfold.CheckpointManager(run, mode="async", every=1)
        manager.step(state(3))
        atexit.register(lambda: (manager.finish(state(4)), manager.close()))
"""


@pytest.mark.parametrize(
    "how",
    [
        "thread",
        "thread without close",
        "fork",
        pytest.param("spawn", marks=pytest.mark.long),
        "thread of a process",
        "atexit",
    ],
)
def test_the_last_state_is_saved_wherever_the_loop_runs_and_however_it_ends(warm_python, tmp_path, how):
    """A14, P11: in a thread that outlives the main one, in a process of multiprocessing, from atexit."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = warm_python.command(tmp_path / "program.py", tmp_path / "run", how, is_tidy=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = load(tmp_path / "run", like=TrainState(trainer=Progress(), extra={"w": torch.zeros(2 << 20)}))
    assert found.trainer.step == 4
    assert torch.equal(found.extra["w"], torch.full((2 << 20,), 4.0))


SLOW_TO_FREE = """
import os, sys, time
from functools import partial
from trainfold.backends.job import Job

class Thing:
    def __del__(self):
        time.sleep(0.2)  # here Python ends the thread, if the program ends meanwhile
        os.write(1, b"freed ")

def action(*things):
    return things if sys.argv[1] == "result" else None

job = Job(partial(action, Thing(), Thing()))
job.start()
latest = job._end
del job
while not latest.is_over:
    pass
"""

AFTERWARDS = """
import atexit, multiprocessing, os, sys, threading, time

def start_a_job():
    from trainfold.backends.job import Job
    time.sleep(0.03)
    Job(lambda: (time.sleep(0.1), os.write(1, b"done "))).start()

def many():
    for _ in range(3):
        start_a_job()

def in_a_thread():
    threading.Thread(target=many).start()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "atexit":
        atexit.register(many)
        import trainfold.backends.job
    elif how == "atexit, after the first":
        atexit.register(many)
        start_a_job()
    else:
        if how.endswith("before"):
            start_a_job()
        process = multiprocessing.get_context(how.split()[0]).Process(target=in_a_thread)
        process.start()
        process.join()
"""


def printed(folder, program, *arguments):
    (folder / "program.py").write_text(program)
    command = [sys.executable, folder / "program.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("kept_by", ["action", "result"])
def test_the_end_of_a_process_waits_until_a_job_has_freed_what_it_held(tmp_path, kept_by):
    """A14: a thread that frees tensors while Python ends aborts the process, after a save that succeeded."""
    assert printed(tmp_path, SLOW_TO_FREE, kept_by) == "freed freed "


@pytest.mark.parametrize(
    ("how", "count"),
    [("atexit", 3), ("atexit, after the first", 4), ("fork", 3), ("spawn", 3), ("fork before", 4)],
)
def test_a_job_that_starts_when_the_process_has_waited_runs_in_the_call(tmp_path, how, count):
    """A14: in a handler of `atexit`, and in a thread that outlives the main function of a process of `multiprocessing`."""
    assert printed(tmp_path, AFTERWARDS, how) == "done " * count


def _interrupt(*_):
    raise KeyboardInterrupt


def test_what_a_job_raises_holds_on_to_nothing():
    """Also while a caller keeps the exception, and without the garbage collector."""

    class Thing:
        pass

    gc.disable()
    try:
        thing = Thing()
        job = Job(partial(_fail, thing))
        gone = [weakref.ref(thing), weakref.ref(job)]
        job.start()
        job.wait()
        failure = job.failure
        del thing, job
        wait_until(lambda: [each() for each in gone] == [None, None])
        assert isinstance(failure, ValueError)
    finally:
        gc.enable()


def _fail(thing):
    try:
        _look_up({}, "nothing", thing)
    except KeyError as error:
        kept = error
        raise ValueError("wrapped") from kept


def _look_up(things, name, default):
    return things[name] or default


def test_jobs_that_can_start_no_thread_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    gone = []
    for _ in range(3):
        job = Job(lambda: 1 // 0)
        job.start()
        gone.append(weakref.ref(job))
    del job
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def _fail_in_a_circle():
    try:
        _look_up({}, "nothing", None)
    except KeyError as error:
        raise error from error


def test_a_failure_whose_causes_go_in_a_circle_ends_its_job():
    job = Job(_fail_in_a_circle)
    job.start()
    job.wait()
    assert isinstance(job.failure, KeyError)


def test_an_interrupt_before_the_thread_began_leaves_a_job_that_can_be_withdrawn(monkeypatch):
    job = Job(lambda: 7)
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.start()
    assert job.withdraw()


def test_a_generator_that_has_kept_an_error_goes_on_when_a_job_raises_it():
    def source():
        try:
            _look_up({}, "a bad item", None)
        except KeyError as error:
            kept = error
        yield kept
        yield 2

    items = source()
    error = next(items)

    def fail():
        raise error

    job = Job(fail)
    job.carry_out()
    assert job.failure is error
    assert next(items) == 2


@pytest.mark.parametrize("has_thread", [True, False])
def test_an_interrupt_around_the_start_of_a_job_leaves_it_done_or_withdrawn(monkeypatch, has_thread):
    """At each place where Python looks for signals, and the process does not wait for it at its end."""
    if not has_thread:
        monkeypatch.setattr(_thread, "start_new_thread", refuse)
    at, was_interrupted = 0, True
    while was_interrupted:
        at += 1
        job = Job(lambda: 7)
        seen, was_interrupted = 0, False

        def profile(frame, event, _):
            nonlocal seen, was_interrupted
            seen += event in ("call", "c_return") and frame.f_code.co_filename.endswith(
                ("job.py", "helpers.py", "wakeup.py")
            )
            if seen == at:  # noqa: B023
                was_interrupted = True
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            job.start()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if not job.withdraw():
            job.wait()
            assert job.result == 7 or job.failure is not None, f"interrupted at {at}"
        assert job not in _STARTED
    assert at > 3
