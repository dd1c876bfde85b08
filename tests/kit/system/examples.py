"""Runs the examples as a user does, in a fork of a Python that has imported torch."""

import os
import signal
import subprocess


def lines_of(command, kill_after=None):
    """The lines of a program; with ``kill_after``, it is killed at the first line with this prefix."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        for line in process.stdout:
            lines.append(line.strip())
            if kill_after is not None and line.startswith(kill_after):
                process.kill()
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return lines
