"""A rank is really killed under torchrun: the survivor is asked to stop, saves nothing, deletes nothing, and leaves in time."""

import os
import re
import subprocess
import warnings

import pytest
import torch

import trainfold
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import trainfold
from trainfold.backends.stores.local import LocalStore

mode, where, run = sys.argv[1:]
rank = int(os.environ["RANK"])

def die():
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

class Deadly(LocalStore):
    def write(self, name, parts, *, size_bytes):
        super().write(name, parts, size_bytes=size_bytes)
        if rank == 1 and where == "in a save" and name.startswith("step-00000003"):
            die()

dist.init_process_group("gloo")
ranks = trainfold.TorchCollectives()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
live = trainfold.attach(model, optimizer)
requests = trainfold.SignalRequests()
try:
    with trainfold.CheckpointManager(Deadly(run), every=1, mode=mode, requests=requests, collectives=ranks) as manager:
        manager.restore(live)
        for _ in range(8):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=4)
            if where == "between saves" and live.progress.step == 4:
                die() if rank else time.sleep(1.0)  # the survivor is asked to stop before it needs the dead rank
            manager.step(live)
        manager.finish(live)
finally:
    print("left at", time.time(), flush=True)
"""


@pytest.mark.slow(4)
@pytest.mark.parametrize(("mode", "where"), [("sync", "in a save"), ("async", "between saves")])
def test_the_survivor_of_a_killed_rank_saves_and_deletes_nothing_and_leaves_in_time(warm_python, tmp_path, mode, where):
    """X10: torchrun sends SIGTERM at once and SIGKILL after 30 s; a request to save and stop cannot be agreed on without the dead rank."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        warm_python.torchrun(["--standalone", "--nproc-per-node=2"], script, mode, where, run),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    killed, left = (float(re.search(f"{word} at ([0-9.]+)", said)[1]) for word in ("killed", "left"))
    assert left - killed < 15, said
    assert "rank 1: expected every rank to take part, found no sign of it" in said
    store = LocalStore(run)
    names = [entry.name for entry in read_inventory(store).entries]
    if where == "in a save":
        assert store.list("step-00000003"), "rank 0's files of the failed save are still there"
    like = trainfold.attach(model := torch.nn.Linear(8, 8), torch.optim.AdamW(model.parameters())).capture()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trainfold.load(run, like=like, policy={"streams": "adapt"})
    assert found.trainer.step in ([2] if where == "in a save" else [2, 3]), (names, said)  # 3 may be under way


READERS = """
import os, signal, sys, time
import torch, torch.distributed as dist
import trainfold
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.fingerprint import fingerprint

where, run = sys.argv[1:]
rank = int(os.environ["RANK"])

def die():
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

class Deadly(LocalStore):
    def opened(self, name):
        if rank == 1 and where == "in a load":
            die()
        return super().opened(name)

def forward(x):
    if rank == 1 and where == "in an evaluation" and x[0, 0] == 2.0:
        die()
    return {"loss": (model(x).sum(), len(x))}

dist.init_process_group("gloo")
ranks = trainfold.TorchCollectives(grace_secs=0.5)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
live = trainfold.attach(model, optimizer)
requests = trainfold.SignalRequests()
try:
    with trainfold.CheckpointManager(Deadly(run), every=1, requests=requests, collectives=ranks) as manager:
        if not manager.restore(live).step:
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            live.advance(samples=4)
            manager.step(live)
        if rank == 0:
            print("bits", fingerprint(live.capture())["optimizer"], flush=True)
        batches = [torch.full((2, 8), float(index)) for index in range(4)]
        found = trainfold.evaluate(forward, batches, {"loss": trainfold.metrics.Ratio()}, collectives=ranks, modules=model)
        if rank == 0:
            print("loss", found["loss"], flush=True)
finally:
    print("left at", time.time(), flush=True)
"""


@pytest.mark.long
def test_a_rank_killed_in_an_evaluation_or_in_a_load_is_named_and_the_next_start_continues(warm_python, tmp_path):
    """C07, X10: one run is started three times: it is killed in its first evaluation, then in a load, and then it is left alone."""
    script, run, said = tmp_path / "train.py", tmp_path / "run", {}
    script.write_text(READERS)
    for where in ("in an evaluation", "in a load", "nowhere"):
        ended = subprocess.run(
            warm_python.torchrun(["--standalone", "--nproc-per-node=2"], script, where, run),
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        said[where] = ended.stdout + ended.stderr
        assert ended.returncode == (where != "nowhere"), said[where]
        if where != "nowhere":
            killed, left = (float(re.search(f"{word} at ([0-9.]+)", said[where])[1]) for word in ("killed", "left"))
            assert left - killed < 15, said[where]
            assert "rank 1: expected every rank to take part, found no sign of it" in said[where]
    bits = [re.findall(r"bits (\S+)", said[where]) for where in said]
    assert bits == [bits[0], [], bits[0]], bits
    assert len(bits[0]) == 1
    assert "loss" in said["nowhere"]
