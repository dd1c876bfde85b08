"""The lock of a run whose holder was killed: waited for, but not for ever."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from trainfold.backends.stores import run_lock
from trainfold.core.errors import RunLocked

HOLDER = """
import fcntl, os, socket, subprocess, sys, time
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on {sys.argv[3] or socket.gethostname()}\\n")
file.flush()
subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[file.fileno()], stdout=subprocess.DEVNULL)  # has the lock too
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that locks a run, and another one that keeps its lock for some seconds after its death."""
    started = []

    def start(secs, host=""):
        holder = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", HOLDER, str(tmp_path), str(secs), host],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(holder)
        assert holder.stdout.readline() == b"held\n"
        return holder

    yield start
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)  # also what it has started
        each.communicate()


def take(folder):
    """Take the lock and release it; return the seconds until it was there."""
    began = time.monotonic()
    run_lock.release(run_lock.acquire(str(folder)))
    return time.monotonic() - began


@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_lock_of_a_killed_process_is_waited_for(start, tmp_path, is_reaped):
    """N03: a restart that comes before the killed process has given its locks back goes on."""
    holder = start(1)
    holder.send_signal(signal.SIGKILL)
    if is_reaped:
        holder.wait()
    assert take(tmp_path) < 5


def test_the_wait_for_a_killed_process_is_bounded(start, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_DEAD_SECS", 0.3)
    start(30).kill()
    began = time.monotonic()
    with pytest.raises(RunLocked, match="which has ended, and something that it started; stop what it started"):
        take(tmp_path)
    assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.parametrize("host", ["", "another-host"])
def test_a_living_process_and_one_on_another_host_are_refused_at_once(start, tmp_path, host):
    holder = start(30, host)
    if host:
        holder.kill()
        holder.wait()
    began = time.monotonic()
    with pytest.raises(RunLocked, match=f"process {holder.pid} on .*; wait for it or stop it"):
        take(tmp_path)
    assert time.monotonic() - began < 5
