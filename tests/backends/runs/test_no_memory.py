"""Without memory, a save succeeds or raises within a time limit, and the run's lock is free afterwards (W19)."""

import _thread
import resource
import subprocess
import sys
from queue import SimpleQueue

import pytest
import torch

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends import helpers, job, wakeup
from trainfold.backends.runs.api import load
from trainfold.backends.stores.local import LocalStore
from trainfold.core.state.state import Progress, TrainState

SIZE = 3 << 18  # 3 MiB: beyond what is written without threads


def state_at(step):
    return TrainState(trainer=Progress(step=step), extra={"w": torch.full((SIZE,), float(step))})


def dies_before_it_begins(function, args):
    """As a new thread that gets no memory to begin with: it was started, and never heard of."""
    return 0


def refuses(function, args):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [dies_before_it_begins, refuses])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_thread_that_never_begins_makes_no_save_hang(start, mode, tmp_path, monkeypatch):
    """W19: the call does the work, and the lock is released."""
    monkeypatch.setattr(job, "LONGEST_SECS", 0.05)
    monkeypatch.setattr(wakeup, "_AT_LEAST_EVERY_SECS", 0.05)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(helpers, "_IDLE", SimpleQueue())  # no test has left a thread to use again
    with CheckpointManager(tmp_path / "run", mode=mode) as manager:
        for step in (1, 2):
            manager.save(state_at(step))
        manager.drain()
    monkeypatch.undo()
    with LocalStore(tmp_path / "run").lock():
        assert load(tmp_path / "run", like=state_at(0)).extra["w"][0] == 2.0


CHILD = """
import faulthandler, os, resource, sys, threading
faulthandler.dump_traceback_later(50, exit=True)  # a hang is a failure with a stack
import torch, trainfold
from trainfold import TrainState, Progress
run, mode, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = TrainState(trainer=Progress(step=1), extra={f"w{i}": torch.ones(1 << 20) for i in range(4)})
manager = trainfold.CheckpointManager(run, mode=mode)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + room, resource.RLIM_INFINITY))
try:
    manager.save(state)
    manager.drain()
    print("saved")
except trainfold.SaveFailed as error:
    print("failed", type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
try:
    manager.close()
except trainfold.SaveFailed:
    pass
with trainfold.LocalStore(run).lock():
    print("free")
"""


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_AS") or not sys.platform.startswith("linux"), reason="needs RLIMIT_AS and /proc"
)
@pytest.mark.parametrize(("mode", "room"), [("sync", 0), ("async", 9 << 20)])
def test_a_save_in_a_process_without_memory_ends_and_lets_go_of_the_lock(warm_python, mode, room, tmp_path):
    """W19: with no room at all, and with room for the buffers and for no thread's stack."""
    command = warm_python.command("-c", CHILD, tmp_path / "run", mode, room)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "free", done.stderr
