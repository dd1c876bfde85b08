"""The first resumable program of a page, copied as it stands, killed and started again, as a reader does it."""

import json
import os
import re
import signal
import subprocess

import pytest

# A page, what its block leaves to a reader to call, and the optimizer steps in which two processes die.
PROGRAMS = [
    ("README.md", "", (5, 3)),
    ("docs/how-to/resumable-loop.md", "train('runs/a')", (11, 6)),
    ("docs/how-to/save-without-stalling.md", "", (11, 6)),
    ("docs/how-to/infer-from-a-checkpoint.md", "", (7, 3)),
]
# Streams without a seed, as in a new process; and SIGKILL inside a step, before the loop counts it.
DRIVER = """
import os, random, runpy, signal
import numpy, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.seed(), random.seed(), numpy.random.seed()
steps = 0


def count(*_):
    global steps
    steps += 1
    if steps == int(os.environ["DIE_IN"]):
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
runpy.run_path("train.py", run_name="__main__")
print("steps", steps)
"""


def started(warm_python, folder, die_in=0):
    return subprocess.run(
        warm_python.command(folder / "driver.py"),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DIE_IN": str(die_in)},
        text=True,
        capture_output=True,
        check=False,
    )


def steps_of(done):
    assert done.returncode == 0, done.stderr
    return int(re.search(r"^steps (\d+)$", done.stdout, re.MULTILINE)[1])


def end_of(folder):
    """The last checkpoint and the fingerprints in it, but for the streams: the programs seed torch's alone."""
    path = max(folder.glob("runs/a/step-*/manifest.json"))
    fingerprints = json.loads(path.read_text())["fingerprints"]
    return path.parent.name, {name: each for name, each in fingerprints.items() if name != "rng"}


@pytest.mark.parametrize(("page", "call", "die_in"), PROGRAMS, ids=lambda value: str(value)[:30])
def test_the_program_of_a_page_ends_with_the_same_weights_when_it_is_killed(
    page, call, die_in, root, tmp_path, warm_python
):
    """G01: the data of the README's program had no seed, so its restart was refused."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (root / page).read_text(), re.MULTILINE | re.DOTALL)
    program = next(block for block in blocks if ".restore(live)" in block)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "train.py").write_text(f"{program}\n{call}\n")
        (folder / "driver.py").write_text(DRIVER)
    steps = steps_of(started(warm_python, whole))
    for each in die_in:
        died = started(warm_python, killed, die_in=each)
        assert died.returncode == -signal.SIGKILL, died.stderr
    assert steps_of(started(warm_python, killed)) < steps
    assert end_of(killed) == end_of(whole)
    assert {"model", "optimizer"} <= end_of(whole)[1].keys()
