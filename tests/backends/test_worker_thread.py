"""The thread that carries out jobs: in order, each once, and to the end, however the program ends."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from trainfold.backends.runs.api import load
from trainfold.backends.wakeup import Wakeup
from trainfold.backends.worker_thread import Job, WorkerThread
from trainfold.core.state.state import Progress, TrainState


def test_jobs_are_carried_out_in_their_order_in_one_thread():
    worker, seen = WorkerThread("test"), []
    jobs = [Job(lambda number=number: seen.append((number, threading.current_thread().name))) for number in range(50)]
    for job in jobs:
        worker.begin(job)
    worker.close()
    assert seen == [(number, "test") for number in range(50)]
    assert all(job.is_over for job in jobs)


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
    worker, go, count = WorkerThread("test"), threading.Event(), []
    worker.begin(Job(lambda: go.wait(20)))
    job = Job(lambda: count.append(1))
    worker.begin(job)
    assert job.withdraw()
    go.set()
    worker.close()
    assert not count
    assert not job.is_over


def test_what_a_job_raises_is_its_failure_and_ends_nothing():
    worker, job, next_one = WorkerThread("test"), Job(lambda: 1 // 0), Job(lambda: 7)
    worker.begin(job)
    worker.begin(next_one)
    next_one.wait()
    assert isinstance(job.failure, ZeroDivisionError)
    assert next_one.result == 7
    worker.close()


def test_a_worker_that_was_closed_begins_anew():
    worker = WorkerThread("test")
    worker.close()
    for number in range(3):
        job = Job(lambda number=number: number)
        worker.begin(job)
        worker.close()
        worker.close()
        assert job.result == number


def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    worker, job = WorkerThread("test"), Job(threading.current_thread)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        worker.begin(job)
        assert job.result is threading.main_thread()
        with pytest.raises(KeyboardInterrupt):
            worker.begin(Job(lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    job = Job(threading.current_thread)
    worker.begin(job)
    worker.close()
    assert job.result.name == "test"


def test_the_thread_ends_with_its_worker_and_holds_nothing_that_is_done():
    class Thing:
        pass

    worker, thing = WorkerThread("test"), Thing()
    gone = weakref.ref(thing)
    job = Job(lambda thing=thing: None)
    worker.begin(job)
    job.wait()
    thread = worker._line.thread
    del thing, job
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None
    del worker
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("left", [False, True])
def test_a_thread_that_leaves_because_the_program_ends_loses_no_job(monkeypatch, left):
    """Both ways of a race: the job is there before the thread looks for the last time, or after it."""
    worker, first = WorkerThread("test"), Job(lambda: 1)
    worker.begin(first)
    first.wait()
    line = worker._line
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    if left:
        line.thread.join(20)
    else:
        while not line.has_left:
            pass
    monkeypatch.undo()
    job = Job(lambda: 2)
    worker.begin(job)
    job.wait()
    assert job.result == 2
    worker.close()


PROGRAM = """
import atexit, multiprocessing, sys, threading, time, torch, trainfold
from trainfold.core.state.state import Progress, TrainState

def state(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((2 << 20,), float(step))})

def loop(run, ends):
    manager = trainfold.CheckpointManager(run, mode="async", every=1)
    for step in range(1, 4):
        manager.step(state(step))
        time.sleep(0.3)
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
    elif how == "process":
        process = multiprocessing.get_context("spawn").Process(target=loop, args=(run, False))
        process.start()
        process.join()
        sys.exit(process.exitcode)
    elif how == "atexit":
        manager = trainfold.CheckpointManager(run, mode="async", every=1)
        manager.step(state(3))
        atexit.register(lambda: (manager.finish(state(4)), manager.close()))
"""


@pytest.mark.parametrize("how", ["thread", "thread without close", "process", "atexit"])
def test_the_last_state_is_saved_wherever_the_loop_runs_and_however_it_ends(tmp_path, how):
    """A14, P11: in a thread that outlives the main one, in a process of multiprocessing, from atexit."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = load(tmp_path / "run", like=TrainState(trainer=Progress(), extra={"w": torch.zeros(2 << 20)}))
    assert found.trainer.step == 4
    assert torch.equal(found.extra["w"], torch.full((2 << 20,), 4.0))


def test_a_close_that_is_interrupted_is_no_end(monkeypatch):
    """Ctrl-C in it: what was begun goes on, more can be begun, and the next close waits for all of it."""
    worker, go = WorkerThread("test"), threading.Event()
    slow = Job(lambda: go.wait(20))
    worker.begin(slow)
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(Wakeup, "wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.close()
    job = Job(lambda: threading.current_thread().name)
    beginning = threading.Thread(target=worker.begin, args=(job,))
    beginning.start()
    assert not slow.is_over
    go.set()
    beginning.join(20)
    job.wait()
    assert job.result == "test"
    worker.close()
    assert slow.is_over


def _interrupt(_):
    raise KeyboardInterrupt


def test_what_a_job_raises_holds_on_to_nothing():
    """Also while somebody keeps it, and without the collector of cycles."""

    class Thing:
        pass

    gc.disable()
    try:
        worker, thing = WorkerThread("test"), Thing()
        job = Job(partial(_fail, thing))
        gone = [weakref.ref(thing), weakref.ref(job)]
        worker.begin(job)
        job.wait()
        failure = job.failure
        worker.close()
        del thing, job
        assert [each() for each in gone] == [None, None]
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


def test_workers_that_can_start_no_thread_leave_nothing_behind(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gone = []
    for _ in range(3):
        worker, job = WorkerThread("test"), Job(lambda: 1 // 0)
        worker.begin(job)
        gone += [weakref.ref(worker), weakref.ref(job)]
        worker.close()
    del worker, job
    gc.collect()
    assert [each() for each in gone] == [None] * 6


def _fail_in_a_circle():
    try:
        _look_up({}, "nothing", None)
    except KeyError as error:
        raise error from error


def test_a_failure_whose_causes_go_in_a_circle_ends_its_job():
    worker, job = WorkerThread("test"), Job(_fail_in_a_circle)
    worker.begin(job)
    job.wait()
    worker.close()
    assert isinstance(job.failure, KeyError)


def test_a_close_after_an_interrupt_before_the_thread_began_waits_for_nobody(monkeypatch):
    worker, job = WorkerThread("test"), Job(lambda: 7)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.begin(job)
    worker.close()
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


def test_an_interrupt_around_a_job_that_the_caller_carries_out_leaves_nobody_waiting(monkeypatch):
    """Where no thread can be started; at each place where Python looks for signals."""

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    at, was_interrupted = 0, True
    while was_interrupted:
        at += 1
        job, worker = Job(lambda: 7), WorkerThread("test")
        seen, was_interrupted = 0, False

        def profile(frame, event, _):
            nonlocal seen, was_interrupted
            seen += event in ("call", "c_return") and frame.f_code.co_filename.endswith(
                ("worker_thread.py", "wakeup.py")
            )
            if seen == at:  # noqa: B023
                was_interrupted = True
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            worker.begin(job)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert job.is_over or job.withdraw(), f"interrupted at {at}"
        assert not job.is_over or job.result == 7 or job.failure is not None, f"interrupted at {at}"
    assert at > 5
