"""Several agents of torchrun on one machine: a machine is lost in mid-save, another one joins, and the run reads the same samples."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter, defaultdict

import pytest
from kit.free_port import free_port

import trainfold

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
LAST, BATCH, LENGTH = 60, 12, 96
PROGRAM = f"""
import json, os, sys, time
import torch, torch.distributed as dist
import trainfold
from trainfold.backends.stores.local import LocalStore

run, most, dies = sys.argv[1], int(sys.argv[2]), os.environ.get("DIES")


class Store(LocalStore):
    def write(self, name, parts, *, size_bytes):
        super().write(name, parts, size_bytes=size_bytes)
        if dies and name.startswith("step-00000010"):
            open(dies, "w").write(str(os.getpid()))
            time.sleep(60)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {LENGTH}

    def __getitem__(self, index):
        return torch.tensor(index)


dist.init_process_group("gloo")
rank, world, start = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_PORT"]
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = Data()
loader = torch.utils.data.DataLoader(data, batch_sampler=trainfold.data.GlobalBatchSampler(data, {BATCH}, seed=0))
live = trainfold.attach(model, optimizer, loader=loader)
manager = trainfold.CheckpointManager(Store(run), every=5, collectives=trainfold.TorchCollectives())
manager.restore(live)
log = open(f"{{run}}.{{start}}.{{rank}}.{{os.getpid()}}", "a", buffering=1)
print("start", rank, world, live.progress.step, flush=True)
for batch in live.batches(steps={LAST}):
    model(torch.ones(len(batch), 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance()
    log.write(json.dumps([live.progress.step, batch.tolist()]) + "\\n")
    if world < most:
        time.sleep(0.1)  # until another machine joins
    manager.step(live)
manager.finish(live)
dist.destroy_process_group()
"""


class Agents:
    """Agents of torchrun, each a machine with one worker; their output goes to files."""

    def __init__(self, warm_python, folder):
        self._warm, self._folder, self._port = warm_python, folder, free_port()
        self.most = 0
        self.started = []
        (folder / "train.py").write_text(PROGRAM)

    def start(self, **environment):
        words = [
            f"--nnodes=1:{self.most}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=one", "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5", "--no-python",
            *self._warm.command(self._folder / "train.py", self._folder / "run", self.most),
        ]  # fmt: skip
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"agent-{time.monotonic_ns()}").open("wb") as output:
            self.started.append(
                subprocess.Popen(
                    self._warm.command("-m", "torch.distributed.run", *words),
                    stdout=output, stderr=output, env={**os.environ, **settings, **environment},
                )
            )  # fmt: skip

    def is_host(self):
        """Whether the first agent keeps the store of all."""
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", self._port)) == 0

    def said(self):
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("agent-*")))

    def starts(self):
        """(rank, world size, step) of each start of a worker so far, and how often."""
        return Counter(tuple(map(int, each)) for each in re.findall(r"start (\d) (\d) (\d+)", self.said()))

    def wait_for(self, is_true):
        late = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < late, self.said()
            time.sleep(0.02)


@pytest.fixture
def agents(warm_python, tmp_path):
    made = Agents(warm_python, tmp_path)
    yield made
    for agent in made.started:
        agent.kill()
        agent.wait()


def expected_batches():
    """The samples of each step, as one process reads them."""
    sampler = trainfold.data.GlobalBatchSampler(range(LENGTH), BATCH, seed=0)
    steps = []
    for epoch in range(LAST * BATCH // LENGTH + 1):
        sampler.set_epoch(epoch)
        steps += [sorted(batch) for batch in sampler]
    return dict(enumerate(steps[:LAST], start=1))


@pytest.mark.slow(6)
@pytest.mark.skipif(not IS_DEEP, reason="10 to 20 s each, most of it waiting for torchrun: part of the laws")
@pytest.mark.parametrize("most", [2, 3])
def test_a_machine_that_is_lost_in_a_save_and_one_that_joins_change_no_sample(agents, tmp_path, most):
    """N03, H03: all machines, then one fewer, then all; each time the run goes on from the newest checkpoint."""
    dies, agents.most = tmp_path / "dies", most
    agents.start()
    agents.wait_for(agents.is_host)  # so that the agent that is lost is not the one that keeps the store
    for number in range(1, most):
        agents.start(**({"DIES": str(dies)} if number == most - 1 else {}))
    agents.wait_for(lambda: dies.exists() and dies.read_text())
    before = agents.starts()  # a machine that torchrun has waited for too briefly joins a run of fewer
    lost = agents.started.pop()
    lost.kill()
    os.kill(int(dies.read_text()), signal.SIGKILL)
    lost.wait()
    agents.wait_for(lambda: any(world == most - 1 for _, world, _ in agents.starts() - before))
    agents.start()
    for agent in agents.started:
        assert agent.wait(60) == 0, agents.said()
    after = agents.starts() - before
    fewer, again = ([step for _, world, step in after if world == each] for each in (most - 1, most))
    assert set(fewer) == {5}
    assert 5 <= max(again) < LAST
    expected, read = expected_batches(), defaultdict(list)
    for path in tmp_path.glob("run.*"):
        for line in path.read_text().splitlines():
            step, indices = json.loads(line)
            read[path.name.split(".")[1], step] += indices
    for (start, step), indices in read.items():
        assert set(indices) <= set(expected[step]), (start, step)
    whole = {step for (_, step), indices in read.items() if sorted(indices) == expected[step]}
    assert whole == set(range(1, LAST + 1))
    assert (tmp_path / "run" / f"step-{LAST:08}" / "manifest.json").exists()
