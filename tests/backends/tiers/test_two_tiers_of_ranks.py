"""Two tiers under torchrun: ranks that share the near one, and a machine that is lost with it."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from kit.backends.buckets.proxy import Proxy
from kit.backends.buckets.s3_cases import S3Server, settings_at, store_at

import trainfold
from trainfold.core.format.fingerprint import fingerprint

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROGRAM = """
import os, sys
import torch
from torch.distributed.fsdp import fully_shard
import trainfold
from trainfold.stores import TwoTiers

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
near, far, last = sys.argv[1:]
rank = torch.distributed.get_rank()
near = near.replace("RANK", str(rank))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(64, 63))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
live = trainfold.attach(model, optimizer)

def say(event):
    if rank == 0 and event.kind in ("fetched", "restored", "committed", "uploaded", "not_uploaded"):
        print(event.kind, event.step, flush=True)

options = {"every": 1, "keep_last": 2, "mode": "async", "on_event": say, "collectives": trainfold.TorchCollectives(timeout_secs=60)}
with trainfold.CheckpointManager(TwoTiers(near, far), **options) as manager:
    manager.restore(live)
    while live.progress.step < int(last):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(live.progress.step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=4)
        manager.step(live)
torch.distributed.destroy_process_group()
"""
STEPS = 8


@pytest.fixture(scope="module")
def server():
    found = S3Server()
    yield found
    found.close()


@pytest.fixture
def proxy(server):
    found = Proxy(server.port)
    yield found
    found.close()


class Machine:
    """A program of two ranks, in a session of its own: all of its processes are lost at once."""

    def __init__(self, program, proxy, near, far, steps=STEPS):
        environ = {**os.environ, **settings_at(proxy.port)}
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(program), str(near), far, str(steps)], env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def lose(self):
        os.killpg(self._process.pid, signal.SIGKILL)

    def end(self):
        """Exit code, what rank 0 said, and the errors."""
        said, errors = self._process.communicate()
        return self._process.returncode, [(kind, int(step)) for kind, step in map(str.split, said.splitlines())], errors


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path / "train.py"


def run_in(proxy, far):
    return store_at(proxy.port, run=far.url.removeprefix("s3://bucket/"))


def whole_state():
    model = torch.nn.Linear(64, 63)
    return trainfold.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01)).capture()


def final(store):
    found = fingerprint(trainfold.load(store, like=whole_state(), reset={"rng": "of another number of ranks"}))
    return {name: found[name] for name in ("model", "optimizer", "trainer")}


def test_ranks_whose_machine_is_lost_go_on_from_the_bucket_with_the_same_bits(proxy, program, tmp_path):
    """SIGKILL of all processes at some request of an upload, and the disk is gone: the ranks that start in another place fetch what was uploaded, and end as a run that was never lost."""
    expected, far = store_at(proxy.port), store_at(proxy.port)
    code, said, errors = Machine(program, proxy, tmp_path / "never lost", expected.url).end()
    assert code == 0, errors
    assert ("uploaded", STEPS) in said
    uploaded, at, resumed, was_lost = 0, 45, [], True
    while was_lost:
        near, until, machines = tmp_path / f"disk-{at}", len(proxy.requests) + at, []

        def fault(number, method, path, last=until, machines=machines):
            if number < last:
                return None
            machines[0].lose()
            return "cut"

        proxy.fault = fault
        machines.append(Machine(program, proxy, near, far.url))
        code, said, errors = machines[0].end()
        proxy.fault = lambda number, method, path: None
        was_lost = code == -signal.SIGKILL
        assert was_lost or code == 0, errors
        for step in (step for kind, step in said if kind == "restored"):
            assert step >= uploaded
            assert ("fetched", step) in said
            resumed.append(step)
        uploaded = max([uploaded, *(step for kind, step in said if kind == "uploaded")])
        at += 45
    assert resumed
    assert uploaded == STEPS
    assert final(run_in(proxy, far)) == final(run_in(proxy, expected))


def test_ranks_that_each_have_a_near_tier_of_their_own_are_refused(proxy, program, tmp_path):
    """R08: the disks of two nodes are not one run. Nothing is committed, and so nothing uploaded."""
    far = store_at(proxy.port)
    code, said, errors = Machine(program, proxy, tmp_path / "disk-of-RANK", far.url).end()
    assert code
    assert not [kind for kind, _ in said if kind in {"committed", "uploaded"}], said
    assert not [name for name in run_in(proxy, far).list() if name.startswith("step-")]
    assert "check that all ranks write to the same filesystem, because its path is not the same everywhere" in errors
