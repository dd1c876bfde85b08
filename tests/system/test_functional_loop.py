"""The example that composes functions, as a user would run it: killed, started again, compared."""

import signal
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "functional_loop.py"


def run_example(run, *, warm, kill_after=None):
    """Run it and return its lines; with ``kill_after``, kill it at the first line with this prefix.

    It runs in a fork of a Python that has imported torch.
    """
    lines = []
    with subprocess.Popen(warm.command(EXAMPLE, run), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line.strip())
            if kill_after is not None and line.startswith(kill_after):
                process.kill()
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return lines


@pytest.mark.slow(2)
def test_the_loop_of_functions_survives_a_kill_and_ends_with_the_same_bits(warm_python, tmp_path):
    whole = run_example(tmp_path / "whole", warm=warm_python)
    assert whole[0] == "starting after step 0"
    killed = run_example(tmp_path / "killed", warm=warm_python, kill_after="step 23:")
    rest = run_example(tmp_path / "killed", warm=warm_python)
    first = int(rest[0].removeprefix("starting after step "))
    assert 20 <= first <= 60
    assert first % 5 == 0
    assert rest[1:] == whole[first + 1 :]
    assert killed[1:24] == whole[1:24]
    fingerprints = [line.split()[0] for line in whole[61:]]
    assert fingerprints == ["model", "optimizer", "scheduler", "trainer", "dataset", "rng"]
