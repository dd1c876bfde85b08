"""Checkpoints changed by an attacker who can compute digests: every reader either refuses one by name or returns a whole state."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory

import pytest

USUAL = 600  # always the same ones
LAWS = 40_000
IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
CASES = int(os.environ.get("TRAINFOLD_FUZZ_CASES", LAWS if IS_DEEP else USUAL))
IS_LONG = CASES > USUAL
SEED = int(os.environ.get("TRAINFOLD_FUZZ_SEED", str(SystemRandom().getrandbits(32) if IS_LONG else 0)))
FIRST = int(os.environ.get("TRAINFOLD_FUZZ_FIRST", "0"))
CHUNK = 25_000  # cases per process; their findings are lost if the soak is killed
MOST_KB = 300 << 10
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


def drive(first, cases, folder):
    """Run some cases in a separate process: return its last line, its finding, or the case that killed it."""
    command = [
        sys.executable,
        "-m",
        "fuzz.drive",
        "--folder",
        folder,
        "--cases",
        str(cases),
        "--first",
        str(first),
        "--seed",
        str(SEED),
    ]
    command += [] if IS_LONG else ["--skips-refused", "--teeth", "600"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    again = f"python -m fuzz.drive --folder NEW --seed {SEED} --first CASE --cases 1; TRAINFOLD_FUZZ_SEED={SEED} TRAINFOLD_FUZZ_FIRST=CASE goes on"
    case = Path(folder, "case")
    at = case.read_text().strip() if case.exists() else "none"
    assert done.returncode == 0, f"it ended with {done.returncode} at case {at}: {done.stderr[-2000:]}\n{again}"
    *found, last = map(json.loads, done.stdout.splitlines())
    assert not found, f"{len(found)} cases, such as {json.dumps(found[:3], indent=1)}\n{again}"
    return last


@pytest.mark.slow(15)
@pytest.mark.timeout(0 if IS_LONG else 280)
def test_whatever_a_signed_checkpoint_says_no_reader_fails_in_a_way_of_its_own():
    """W20, W23, U01, U04, U05: readers raise only trainfold's own errors, in bounded time and memory.

    The readers are ls, inspect, verify, plan, diff, load and a restore into a live run. None leaves half-written objects, and none
    prints terminal control characters. The usual run has the same 600 cases each time; the laws have 40,000 new ones, and the soak has 50 million, 25,000 a process.
    """
    for first in range(FIRST, FIRST + CASES, CHUNK):
        with TemporaryDirectory(dir=SHM) as folder:
            last = drive(first, min(CHUNK, FIRST + CASES - first), folder)
        assert last["grown_kb"] < MOST_KB
        if IS_LONG:
            sys.stdout.write(f"\nseed {SEED}: {first + last['done']} cases\n")
    outcomes = last["outcomes"]
    for read in (
        "ls: exit 0",
        "inspect: exit 0",
        "verify: exit 0",
        "plan: exit 0",
        "diff: exit 3",
        "load: loaded",
        "restore: restored",
    ):
        assert outcomes.get(read, 0) > min(CASES, USUAL) // 200, f"too few cases come as far as {read}: {outcomes}"
    for read in (
        "ls: exit 12",
        "inspect: exit 17",
        "verify: exit 17",
        "plan: exit 17",
        "load: ResumeRefused",
        "restore: RestoreRefused",
    ):
        assert outcomes.get(read, 0) > min(CASES, USUAL) // 500, f"too few cases are refused as {read}: {outcomes}"
    if not IS_LONG:
        assert last["teeth"], "without the check of structures the same cases find nothing"
