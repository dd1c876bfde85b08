"""Replay and bisect of runs of two ranks that torchrun starts: the whole commands, with a fault in one rank alone."""

import json
import os
import subprocess
import sys

import pytest

from trainfold.adapters.cli import main

pytestmark = [pytest.mark.slow(60), pytest.mark.long]

PROGRAM = """
import os, sys

import torch
from torch.nn.parallel import DistributedDataParallel

import trainfold

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
flip, spoil = (int(os.environ.get(name, -1)) if torch.distributed.get_rank() == 1 else -1 for name in ("FLIP", "SPOIL"))
x = torch.linspace(-1, 1, 192).reshape(96, 2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
loader = torch.utils.data.DataLoader(x, batch_size=4, sampler=torch.utils.data.DistributedSampler(x))
live = trainfold.attach(ddp, optimizer, loader=loader)
with trainfold.CheckpointManager(sys.argv[1], every=3, record=1, collectives=trainfold.TorchCollectives()) as manager:
    manager.restore(live)
    for x in live.batches(epochs=1):
        loss = (ddp(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if live.progress.step == spoil:
                model[2].weight[0, 0] = float("nan")
            if live.progress.step == flip:
                model[0].weight.view(torch.int32)[0, 0].bitwise_xor_(1 << 20)
        live.record(loss=loss)
        live.advance(samples=len(x))
        manager.step(live)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
    return [sys.executable, *launcher, "train.py"]


def train(command, run, **fault):
    done = subprocess.run([*command, run], env={**os.environ, **fault}, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def asked(capsys, command, *words):
    code = main([command, "--json", *words])
    found = json.loads(capsys.readouterr().out)
    return code, found


def test_a_bit_that_is_flipped_in_the_memory_of_one_rank_is_named_with_the_rank(command, capsys):
    """The next save refuses replicas that differ; the logs name the step and the rank, and the program does not do it again."""
    assert train(command, "runs/a")[0] == 0
    code, said = train(command, "runs/b", FLIP="7")
    assert code
    assert "others on rank 1" in said
    code, found = asked(capsys, "bisect", "runs/a", "runs/b", "--", *command, "{run}")
    assert (code, found["step"], found["rank"], found["cause"]) == (3, 8, 1, "fault")
    assert (found["repeats"], found["names"]) == ([True, False], ["the second"])


def test_a_run_of_two_ranks_is_replayed_and_the_rank_with_the_first_nan_is_named(command, capsys, monkeypatch):
    monkeypatch.setenv("SPOIL", "7")  # all ranks have it a step later, by the mean of the gradients
    assert train(command, "runs/a")[0] == 0
    code, found = asked(capsys, "replay", "runs/a", "--from", "3", "--to", "6", "--", *command, "runs/a")
    assert (code, found["same"], found["steps"]) == (0, True, 3)
    code, found = asked(capsys, "replay", "runs/a", "--from", "6", "--until-nonfinite", "--", *command, "runs/a")
    assert (code, found["rank"], found["nonfinite"]["step"]) == (0, 1, 8)
    assert found["nonfinite"]["output"]["module"] == "2"
    assert [leaf["path"] for leaf in found["nonfinite"]["output"]["tensors"]] == ["weight"]
