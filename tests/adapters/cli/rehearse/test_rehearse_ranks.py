"""`trainfold rehearse --nproc`: torchrun starts the program, and a kill hits all processes or one rank."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema

import trainfold
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.process import Program
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal
from trainfold.adapters.cli.rehearse.starts import _saved
from trainfold.core.errors import InvalidArgument
from trainfold.core.rehearsal.orders import MANIFESTS_NAME, VARIABLE, Orders, encode_orders
from trainfold.ranks import run_threads

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
LAUNCHER = """
import json, os, subprocess, sys, time
rank = "import sys, time; print('rank', flush=True); time.sleep(60)"
ranks = [subprocess.Popen([sys.executable, "-c", rank], start_new_session=True) for _ in range(2)]
with open(sys.argv[1], "a") as record:
    for rank, each in enumerate(ranks):
        record.write(json.dumps(dict(kind="start", step=0, pid=each.pid, secs=0.0, data={"rank": rank, "resumed_from": None})) + "\\n")
while all(each.poll() is None for each in ranks):
    time.sleep(0.01)
dead = [each.poll() for each in ranks]
for each in ranks:
    each.terminate()
print("ended", dead, [each.wait() for each in ranks], flush=True)
sys.exit(1)
"""


@pytest.fixture
def launched(tmp_path):
    """A launcher and its two ranks, which have said who they are."""
    record, output = tmp_path / "record.jsonl", tmp_path / "output.txt"
    command = [sys.executable, "-S", "-E", "-c", LAUNCHER, str(record)]
    program = Program(command, environment=os.environ, record=record, output=output, scan=None)
    with program:
        entries = program.entries(patience_secs=60)
        started = [next(entries), next(entries)]
        yield program, [entry.pid for entry in started], output


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_rank_is_killed_and_the_launcher_ends_the_others(launched):
    """W15: what follows is what follows in a job: the launcher sees a dead process and stops the rest."""
    program, pids, output = launched
    program.kill(1)
    assert program.was_killed
    assert program.code == 1
    assert f"ended [None, {-signal.SIGKILL}] [{-signal.SIGTERM}, {-signal.SIGKILL}]" in output.read_text()
    assert not any(map(is_there, pids))


@pytest.mark.parametrize("rank", [None, 7])
def test_all_ranks_are_killed_also_for_a_rank_that_has_no_manager(launched, rank):
    program, pids, output = launched
    program.kill(rank)
    assert program.was_killed
    assert program.code == -signal.SIGKILL
    assert "ended" not in output.read_text()
    assert not any(map(is_there, pids))


def test_torchrun_starts_the_command_on_as_many_processes():
    settings = make_settings(["python", "train.py", "--out", "{run}"], nproc=[2])
    assert settings.command_for(Path("/r")) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "python", "train.py", "--out", "/r",
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="--nproc: expected 1 or more, found 0"):
        make_settings(["python"], nproc=[0])


def test_the_record_of_two_ranks_has_what_both_have_saved(tmp_path, monkeypatch):
    """W15: the index of rank 1 is kept beside the manifest, so the record is read after the checkpoint is deleted."""
    home = tmp_path / "home"
    orders = Orders(str(home), str(home / "start-1"), every=1, steps=2, linger_after=2)
    monkeypatch.setenv(VARIABLE, encode_orders(orders))

    def train(collectives):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)  # the same on both ranks
        torch.nn.init.ones_(model.bias)
        live = trainfold.attach(model)
        with trainfold.CheckpointManager(home / "run", collectives=collectives) as manager:
            manager.restore(live)
            live.advance(samples=1)
            manager.step(live)

    run_threads(2, train)
    shutil.rmtree(home / "run")
    assert [step for _, step in _saved(home / "start-1" / MANIFESTS_NAME)] == [1]


@pytest.mark.skipif(not IS_DEEP, reason="six starts of torchrun, 8 s each: part of the laws")
@pytest.mark.parametrize("example", ["ddp.py", "fsdp.py"])
def test_the_examples_are_rehearsed_on_two_ranks(example, root, tmp_path):
    """W15, H01: all ranks are killed once and one rank once, and the bits are those of the run that was not."""
    command = [sys.executable, str(root / "examples" / example), "{run}"]
    answer = run_rehearsal(tmp_path / "rehearsal", make_settings(command, steps=20, kills=2, nproc=[2]))
    assert answer.error is None, answer.data
    fits_its_schema("rehearse", {**answer.data})
    kills = [start["kill"]["rank"] for start in answer.data["starts"] if start["kill"] is not None]
    assert len(kills) == 2
    assert kills[0] is None
    assert kills[1] in (0, 1)
