"""Conversions in processes that are killed, and the memory of one that is not."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from kit.backends.conversion_cases import a_hub_directory, bytes_of, weights

import trainfold
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source

KILLED = """
import os, signal, sys
from trainfold.backends.convert import continued_files
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.formats import staged_directory
continued_files.NOTE_BYTES = staged_directory.NOTE_BYTES = 4096
read = []
def advance(size_bytes):
    read.append(size_bytes)
    if len(read) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
run_conversion(plan_conversion(open_source(sys.argv[1]), sys.argv[2], to=sys.argv[3]), advance=advance)
"""


@pytest.mark.long
@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_process_that_is_killed_for_real_leaves_what_the_next_one_goes_on_with(tmp_path, to, monkeypatch):
    """SIGKILL: no handler runs, and no exit. One file, of which five tensors of ten were written: they are not read again, but for the last."""
    tensors = {f"w{number}": torch.randn(1024) for number in range(10)}
    hub, target = a_hub_directory(tmp_path / "hub", tensors), tmp_path / "target"
    done = subprocess.run([sys.executable, "-c", KILLED, hub, target, to], check=False)
    assert done.returncode == -signal.SIGKILL
    if to == "native":
        assert trainfold.weights.detect_format(target / "step-00000000").format == "unknown"
    else:
        assert not target.exists()
    read, written = [], []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(real(fd, data, at)) or written[-1])
    run_conversion(plan_conversion(open_source(hub), target, to=to), advance=read.append)
    assert len(read) <= 6
    assert sum(written) <= 8 * 4096  # of 10, and what is around them
    assert weights(open_source(target).model) == bytes_of(tensors)


KILLED_AT_ITS_END = """
import os, signal, sys
from trainfold.adapters.cli import main
from trainfold.backends.stores import run_lock
real = run_lock.release
def release(lock):
    if not os.environ.get("AT_RENAME"):
        real(lock)
    os.kill(os.getpid(), signal.SIGKILL)
run_lock.release = release
if os.environ.get("AT_RENAME"):
    from trainfold.backends.formats import staged_directory
    staged_directory.sync_above = lambda path: release(None)
main(["convert", sys.argv[1], sys.argv[2], "--to", sys.argv[3]])
"""


@pytest.mark.long
@pytest.mark.parametrize("at_rename", ["", "1"])
@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_command_that_is_killed_after_its_commit_is_complete_when_it_is_run_again(tmp_path, to, at_rename):
    """SIGKILL between the rename and the exit: nothing is written again, whether or not what was staged had been removed."""
    hub, target = a_hub_directory(tmp_path / "hub", {"w": torch.randn(1024)}), tmp_path / "target"
    done = subprocess.run([sys.executable, "-c", KILLED_AT_ITS_END, hub, target, to], check=False, env={**os.environ, "AT_RENAME": at_rename})  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    before = {each: each.stat().st_mtime_ns for each in target.rglob("*")}
    assert before
    again = plan_conversion(open_source(hub), target, to=to)
    assert again.plan.is_there
    run_conversion(again)
    assert {each: each.stat().st_mtime_ns for each in target.rglob("*")} == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hub", "target"]


PEAK = """
import resource, sys
from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
planned = plan_conversion(open_source(sys.argv[1]), sys.argv[2], to="native", dtype=sys.argv[3] or None)
before = peak()
run_conversion(planned)
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_conversion_needs_the_memory_of_a_tensor_and_not_of_the_model(tmp_path, dtype):
    """The limit of a conversion: twice the largest leaf, and 128 MiB; here the model is twelve of these leaves."""
    leaf_bytes = 32 << 20
    hub = a_hub_directory(
        tmp_path / "hub", {f"w{number}": torch.full((leaf_bytes // 4,), float(number)) for number in range(12)}
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK, hub, tmp_path / "run", dtype], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) <= 2 * leaf_bytes + (128 << 20)
