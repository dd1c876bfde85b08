"""The example of an ordinary loop: killed for real, and the same bits at the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def start(root, run):
    return subprocess.Popen(
        [sys.executable, str(root / "examples" / "existing_loop.py"), str(run)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(root, run):
    with start(root, run) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    return lines


def kill_after(root, run, step):
    """Run until the line of a step, then SIGKILL."""
    with start(root, run) as process:
        for line in process.stdout:
            if line.startswith(f"step {step}:"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def root():
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    """A run that was never killed: where it is and what it said."""
    run = tmp_path_factory.mktemp("existing") / "whole"
    return run, finish(root, run)


def test_a_killed_run_ends_with_the_bits_of_one_that_was_never_killed(root, whole, tmp_path):
    """V13, G01: 4 epochs of 19 steps; killed in the first epoch, and in the third after a resume."""
    killed = tmp_path / "killed"
    kill_after(root, killed, 13)
    kill_after(root, killed, 49)
    resumed = finish(root, killed)
    start_line, *steps = resumed
    started = int(start_line.removeprefix("starting after step "))
    assert started >= 45
    assert started % 5 == 0
    assert steps == whole[1][1 + started :]
    components = [line.split()[0] for line in steps if "xxh3:" in line]
    assert components == ["model", "optimizer", "scheduler", "trainer", "dataset", "rng"]


def test_a_finished_run_started_again_trains_nothing_more(root, whole):
    """A11: no step is taken, not even the last one again, and no checkpoint is written again."""
    run, said = whole

    def written():
        return {str(path): path.stat().st_mtime_ns for path in run.glob("step-*/manifest.json")}

    before = written()
    assert sorted(Path(path).parent.name for path in before) == ["step-00000070", "step-00000075", "step-00000076"]
    again = finish(root, run)
    assert again[0] == "starting after step 76"
    assert not [line for line in again if line.startswith("step ")]
    assert again[1:] == [line for line in said if "xxh3:" in line]
    assert written() == before


def test_the_added_lines_are_marked_and_few(root):
    lines = (root / "examples" / "existing_loop.py").read_text().splitlines()
    marked = [line for line in lines if "# trainfold" in line and not line.startswith('"""')]
    assert len(marked) == 9
    assert all(
        "# trainfold" in line
        for line in lines
        if "live" in line.split("#")[0] or "manager" in line.split("#")[0]
        if "print(" not in line and "fingerprint" not in line
    )
