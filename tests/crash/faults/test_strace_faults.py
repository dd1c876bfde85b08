"""Through strace, the kernel itself refuses a call of a save, so no call can bypass the test as it could bypass Python wrappers."""

import json
import shutil
import signal
import subprocess
import warnings
from pathlib import Path

import pytest

import trainfold
from crash.effort import IS_SOAK
from crash.saves.recovery import staged
from crash.saves.scenarios import digest_of_state, state_at

pytestmark = pytest.mark.slow(0.3)

PROGRAM = """
import json, os, sys
sys.path.insert(0, {tests!r})
import trainfold
from crash.saves.scenarios import state_at
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import Origin

def save(run, mode, run_id, *steps):
    origin = Origin({{run_id: ParentCheckpoint(0, 1)}})  # as if loaded, without a load's calls
    with trainfold.CheckpointManager(run, mode=mode, keep_last=1) as manager:
        for step in steps:
            manager.save(state_at(step).evolve(origin=origin))

for mode in ("sync", "async"):
    save({warm!r} + mode, mode, "none", 1, 2)
print(os.getpid(), flush=True)
for line in sys.stdin:
    said = None
    try:
        save(*json.loads(line), 2)
    except Exception as error:
        said = type(error).__name__
    print(json.dumps(said), flush=True)
"""
KINDS = {"EIO": "SaveFailed", "ENOSPC": "NoSpace", "EROFS": "NotWritable"}
NEEDED = ("fsync", "renameat", "linkat", "mkdir", "pwrite64")  # before the commit, none of them may fail silently
SPARED = ("unlinkat", "symlinkat", "rmdir", "ftruncate")  # leftover files, the deletion of old checkpoints, a hint
READING = ("openat", "getdents64", "pread64")


@pytest.fixture(scope="module")
def saver(warm_python, tmp_path_factory):
    """A process that saves step 2 into a given run and prints the error that was raised, and its id."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    warm = tmp_path_factory.mktemp("warm")
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]), warm=str(warm / "run"))
    process = subprocess.Popen(
        warm_python.command("-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


def traced(saver, run, mode, call, *options):
    """The error that a save raised under strace, and the lines of strace for a call and for the call that commits."""
    log, (process, pid) = run.parent / "log", saver
    words = ["strace", "-f", "-p", pid, "-o", str(log), "-e", f"trace={call},linkat", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
        line = strace.stderr.readline()
        if "attached" not in line:
            strace.wait()
            pytest.skip(f"strace may not attach here: {line}")
        run_id = json.loads((run / "run.json").read_text())["run_id"]
        process.stdin.write(f"{json.dumps([str(run), mode, run_id])}\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        strace.send_signal(signal.SIGINT)
        strace.communicate(timeout=30)
    return said, [line for line in log.read_text().splitlines() if f" {call}(" in line or " linkat(" in line]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run with step 1."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    trainfold.save(state_at(1), run)
    return run


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("call", NEEDED + SPARED + READING)
def test_a_call_that_the_kernel_refuses_costs_one_save_and_harms_nothing(saver, prepared, tmp_path, call, mode):
    """C15, C16: the error has the right kind, the earlier checkpoint loads, the next save is found, and no needed call fails silently.

    strace cannot make a call do half of its work; test_syscall_faults.py and test_full_disk.py test short writes.
    """
    clean = tmp_path / "clean" / "run"
    shutil.copytree(prepared, clean, symlinks=True)
    said, lines = traced(saver, clean, mode, call)
    assert said is None
    count = sum(f" {call}(" in line for line in lines)
    assert count
    is_refused = False
    for when in range(1, count + 1, 1 if IS_SOAK else 9 if call in READING else 1 + (mode == "async")):
        for code in KINDS if IS_SOAK else [list(KINDS)[when % len(KINDS)]]:
            run = tmp_path / f"{when}-{code}" / "run"
            shutil.copytree(prepared, run, symlinks=True)
            said, lines = traced(saver, run, mode, call, "-e", f"inject={call}:error={code}:when={when}")
            what = f"{call} {when} {code}: {said}"
            refused = [index for index, line in enumerate(lines) if "(INJECTED)" in line]
            if not refused and mode == "async":
                continue  # strace counts the calls of each thread
            assert refused, what
            is_refused = True
            commits = [index for index, line in enumerate(lines) if " linkat(" in line and index not in refused]
            is_before = not commits or refused[0] < commits[0]
            is_note = '"process ' in lines[refused[0]]  # the holder of the lock, for people to read
            is_needed = is_before and call in NEEDED and not is_note
            # of a run that cannot be read no save says more
            assert said in ({KINDS[code]} if is_needed else {None, KINDS[code], "SaveFailed"}), what
            assert loaded(run) == digest_of_state(state_at(1 if said else 2)), what
            trainfold.save(state_at(3), run)
            assert loaded(run) == digest_of_state(state_at(3)), what
            assert not list(staged(run)), what
    assert is_refused


def loaded(run):
    """The digest of the state that a resume loads; it may warn that a save did not finish."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a save that did not finish")
        return digest_of_state(trainfold.load(run, like=state_at(0)))
