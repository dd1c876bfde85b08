"""The lock of a run whose holder was killed: waited for, but not for ever."""

import contextlib
import os
import signal
import socket
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


@pytest.mark.parametrize("host", ["", "another-host", f"{socket.gethostname()}\nanother boot or namespace"])
def test_a_living_process_and_one_on_another_host_are_refused_at_once(start, tmp_path, host):
    """N03: of a container with the name of its host, or of another one, the number says nothing."""
    holder = start(30, host)
    if host:
        holder.kill()
        holder.wait()
    began = time.monotonic()
    where = r" \(in another container, or before a restart\)" if "\n" in host else ""
    with pytest.raises(RunLocked, match=rf"process {holder.pid} on \S+{where}; wait for it or stop it"):
        take(tmp_path)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("where", ["forked child", "release"])
def test_a_number_that_another_file_has_by_now_is_neither_closed_nor_written(tmp_path, where):
    """C03: something else closed the descriptor of a lock, and a loader's workers then closed the pipe of their results, and waited for ever."""
    held = run_lock.acquire(str(tmp_path))
    os.close(held.fd)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == held.fd
    os.write(other, b"bytes")
    if where == "release":
        run_lock.release(held)
        assert os.fstat(other).st_size == 5
    else:
        child = os.fork()
        if child == 0:
            os._exit(0 if os.write(other, b"more") == 4 and not run_lock._HELD else 1)
        assert os.waitpid(child, 0)[1] == 0
        run_lock.release(held)
    os.close(other)
