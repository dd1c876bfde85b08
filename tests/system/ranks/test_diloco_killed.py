"""Workers and a server of DiLoCo as real processes, killed with SIGKILL: each sample counts once in the weights that are left."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import trainfold

TOKEN = "a token that both sides know"
SAMPLES, UNIT = 144, 4

SERVER = """
import sys, torch, trainfold
from trainfold.diloco import DilocoServer, outer_state

run, (port, fragments, every, grace_secs) = sys.argv[1], map(int, sys.argv[2:])
plain = trainfold.optimizer(torch.optim.SGD, lr=1.0)
model = torch.nn.ParameterDict({name: torch.zeros(SAMPLES) for name in "ab"})
state = outer_state(model, optimizer=plain)
with trainfold.CheckpointManager(run, every=every, keep_last=2) as manager:
    if manager.should_load(state):
        state = manager.load(state)
    server = DilocoServer(state, token=TOKEN, unit_samples=UNIT, total_samples=SAMPLES, optimizer=plain, port=port,
                          fragments=fragments, grace_secs=grace_secs)
    with server:
        print(server.port, flush=True)
        for state in server.rounds():
            manager.step(state)
            print("round", state.trainer.step, flush=True)
        manager.finish(state)
"""

WORKER = """
import sys, time, torch, trainfold
from trainfold.construct import materialize, on_meta
from trainfold.diloco import DilocoWorker

def build():
    return torch.nn.ParameterDict({name: torch.zeros(SAMPLES) for name in "ab"})

run, port = sys.argv[1], int(sys.argv[2])
model = on_meta(build)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
materialize(model, "cpu")
worker = DilocoWorker("127.0.0.1", port, token=TOKEN, retry_secs=60.0)
live = trainfold.attach(model, optimizer, weights=worker)
with trainfold.CheckpointManager(run, every=1, keep_last=2) as manager:
    manager.restore(live)
    print("begins at", live.progress.step, flush=True)
    for unit in worker.units(live):
        for index in unit.positions:
            for each in model.values():
                each.grad = torch.zeros(SAMPLES)
                each.grad[index] = -1.0
            optimizer.step()
            live.advance(samples=1)
            time.sleep(0.005)
        manager.step(live)
print("over", worker.sent_bytes, worker.received_bytes, flush=True)
"""


class Programs:
    """Starts and kills them."""

    def __init__(self, warm_python, folder, *, fragments=1, every=1, grace_secs=1):
        self.warm, self.folder, self.options = warm_python, folder, (fragments, every, grace_secs)
        self.port, self.rounds, self.ends = 0, [], {}
        self.all = []

    def start(self, code, *arguments):
        head = f"TOKEN, SAMPLES, UNIT = {TOKEN!r}, {SAMPLES}, {UNIT}\n"
        command = self.warm.command("-c", head + code, *map(str, arguments))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        self.all.append(process)
        return process

    def server(self):
        process = self.start(SERVER, self.folder / "server", self.port, *self.options)
        self.port = int(process.stdout.readline())
        return process

    def worker(self, name):
        return self.start(WORKER, self.folder / f"worker-{name}", self.port)

    def end(self):
        for each in self.all:
            each.kill()
            each.wait()
            each.stdout.close()


@pytest.fixture
def programs(warm_python, tmp_path, request):
    made = Programs(warm_python, tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


def read_until(process, number):
    """Read the server's lines until a round has ended."""
    for line in process.stdout:
        if line.startswith("round") and int(line.split()[1]) >= number:
            return
    raise AssertionError("the server has ended")


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for_all(programs, server, workers):
    """Wait until all have ended well; return what the server and each worker have printed. Where it ends before a worker has heard that all is over, it is started again, as the page says."""
    lines, until = "", time.monotonic() + 120
    while any(each.poll() is None for each in workers):
        assert time.monotonic() < until
        if server.poll() is not None:
            lines += server.stdout.read()
            assert server.returncode == 0
            server = programs.server()
        time.sleep(0.02)
    lines += server.communicate(timeout=60)[0]
    assert [each.returncode for each in (server, *workers)] == [0] * (1 + len(workers))
    said = [each.stdout.read() for each in workers]
    assert all("over" in each for each in said)
    return lines, said


def final_state(folder):
    model = torch.nn.ParameterDict({name: torch.zeros(SAMPLES) for name in "ab"})
    plain = trainfold.optimizer(torch.optim.SGD, lr=1.0)
    return trainfold.load(folder / "server", like=trainfold.diloco.outer_state(model, optimizer=plain))


def check_each_counted_once(state):
    """A sample that counted moved its own weight by a share of its round; each once, or another one would be missing."""
    assert state.trainer.samples == SAMPLES
    for each in state.model.params.values():
        assert (each > 0).all(), "a sample was skipped"
        assert all(any(abs(value - 1 / count) < 1e-9 for count in (1, 2, 3)) for value in each.tolist())


@pytest.mark.slow(4)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_each_sample_counts_once_whoever_is_killed(seed, programs):
    """G09, J01, J05: a worker is killed and comes back with its own optimizer, the server is killed and goes on, and all end."""
    chance = random.Random(seed)
    server = programs.server()
    workers = [programs.worker(name) for name in "abc"]
    begun = [each.stdout.readline() for each in workers]
    assert begun == ["begins at 0\n"] * 3
    read_until(server, chance.randint(1, 3))
    while not list((programs.folder / "worker-b").glob("step-*/manifest.json")):
        time.sleep(0.005)
    time.sleep(chance.random() * 0.03)
    kill(workers[1])
    read_until(server, chance.randint(4, 5))
    workers[1] = programs.worker("b")
    time.sleep(chance.random() * 0.3)
    kill(server)
    _, said = wait_for_all(programs, programs.server(), workers)
    assert int(said[1].splitlines()[0].removeprefix("begins at ")) > 0, "it continues from its own checkpoint"
    check_each_counted_once(final_state(programs.folder))


@pytest.mark.slow(5)
@pytest.mark.long
@pytest.mark.parametrize("programs", [{"every": 5}], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_what_the_server_had_not_saved_is_trained_again(seed, programs):
    """It saves every fifth round, so up to four are lost, and their units are handed out again to workers that take the older weights."""
    server = programs.server()
    workers = [programs.worker(name) for name in "ab"]
    read_until(server, 7 + seed)
    kill(server)
    assert "round 6" in wait_for_all(programs, programs.server(), workers)[0]
    check_each_counted_once(final_state(programs.folder))


@pytest.mark.slow(4)
@pytest.mark.long
@pytest.mark.parametrize("programs", [{"fragments": 2, "grace_secs": 20}], indirect=True)
def test_each_fragment_has_what_was_trained_when_its_turn_came(programs):
    """One after the other is exchanged, so what a worker has trained is in a fragment when the worker next sends it: only of its last unit a fragment may have nothing."""
    server = programs.server()
    workers = [programs.worker(name) for name in "ab"]
    wait_for_all(programs, server, workers)
    state = final_state(programs.folder)
    assert state.trainer.samples == SAMPLES
    missing = [SAMPLES - (each > 0).sum().item() for each in state.model.params.values()]
    assert sum(missing) <= 2 * UNIT, "a unit of each worker, in one fragment"


@pytest.mark.slow(90)
@pytest.mark.long
def test_the_example_ends_and_draws(root, tmp_path):
    """A worker and the server are killed in it; every sample counts."""
    run = tmp_path / "run"
    command = [sys.executable, root / "examples" / "diloco.py", run, "18000"]
    assert subprocess.run(command, check=False, timeout=600).returncode == 0
    last = json.loads((run / "diloco.jsonl").read_text().splitlines()[-1])
    assert last["samples"] == 18000
    assert last["loss"] < 2.5
    assert (run / "diloco.png").stat().st_size > 10_000
