"""The kernel itself refuses a call of a save, by strace: what no wrapper of Python's functions could have missed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import trainfold
from crash.effort import IS_SOAK
from crash.recovery import staged
from crash.scenarios import digest_of_state, state_at

PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import trainfold
from crash.scenarios import state_at
trainfold.save(state_at(1), {warm!r})
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    said = None
    try:
        trainfold.save(state_at(2), json.loads(line))
    except Exception as error:
        said = type(error).__name__
    print(json.dumps(said), flush=True)
"""
KINDS = {"EIO": "SaveFailed", "ENOSPC": "NoSpace", "EROFS": "NotWritable"}
CALLS = ("fsync", "renameat", "linkat", "mkdir", "pwrite64")


@pytest.fixture(scope="module")
def saver(tmp_path_factory):
    """A process that saves step 2 into the run that it is told, and says what was raised."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    warm = tmp_path_factory.mktemp("warm")
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), warm=str(warm / "run"))
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert json.loads(process.stdout.readline()) == "ready"
    yield process
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


def traced(saver, run, call, *options):
    """What a save raised under strace, and the lines that it made of a call."""
    log = run.parent / "log"
    words = ["strace", "-f", "-p", str(saver.pid), "-o", str(log), "-e", f"trace={call}", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
        told = strace.stderr.readline()
        if "attached" not in told:
            strace.wait()
            pytest.skip(f"strace may not attach here: {told}")
        saver.stdin.write(f"{json.dumps(str(run))}\n")
        saver.stdin.flush()
        said = json.loads(saver.stdout.readline())
        strace.send_signal(signal.SIGINT)
        strace.communicate(timeout=30)
    return said, [line for line in log.read_text().splitlines() if f"{call}(" in line]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run with step 1."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    trainfold.save(state_at(1), run)
    return run


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_the_kernel_refuses_costs_one_save_and_harms_nothing(saver, prepared, tmp_path, call):
    """C15, C16: the error has the right kind; the earlier checkpoint loads; the next save is found."""
    clean = tmp_path / "clean" / "run"
    shutil.copytree(prepared, clean, symlinks=True)
    said, lines = traced(saver, clean, call)
    assert said is None
    # the first pwrite64 is of the lock: test_syscall_faults.py is about it
    times = range(2 if call == "pwrite64" else 1, len(lines) + 1)
    assert times
    for when in times:
        for code in KINDS if IS_SOAK else [list(KINDS)[when % len(KINDS)]]:
            run = tmp_path / f"{when}-{code}" / "run"
            shutil.copytree(prepared, run, symlinks=True)
            said, lines = traced(saver, run, call, "-e", f"inject={call}:error={code}:when={when}")
            assert "(INJECTED)" in "".join(lines)
            assert said in {None, KINDS[code]}, f"{call} {when} {code}: {said}"
            assert loaded(run) == digest_of_state(state_at(1 if said else 2)), f"{call} {when} {code}: {said}"
            trainfold.save(state_at(3), run)
            assert loaded(run) == digest_of_state(state_at(3)), f"{call} {when} {code}"
            assert not list(staged(run)), f"{call} {when} {code}"


def loaded(run):
    """The digest of what a resume takes; it may say that a save did not finish."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a save that did not finish")
        return digest_of_state(trainfold.load(run, like=state_at(0)))
