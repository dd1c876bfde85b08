"""The examples of DDP, FSDP2, a pipeline and a pure step on parts: all processes are really killed, and as many, more or fewer continue the run."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from kit.free_port import free_port

pytestmark = pytest.mark.slow(4)

LAST = 40
EXAMPLES = ["ddp.py", "fsdp.py", "pipeline.py", "sharded_step.py"]
BUFFERED = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def train(warm_python, pytestconfig):
    """Start an example on a number of processes, as torchrun does; they are killed when rank 0 has printed the line of a step."""

    def start(example, folder, ranks, until=None):
        folder.mkdir(exist_ok=True)
        script, port = pytestconfig.rootpath / "examples" / example, str(free_port())
        # a pipe of one write: rank 0 waits until its line is read, so it is at most a line ahead when it is killed
        reading, writing = os.pipe2(os.O_DIRECT)
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        started = [
            subprocess.Popen(
                warm_python.command(script, folder / "run"),
                stdout=subprocess.PIPE if rank else writing, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **BUFFERED, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        os.close(writing)
        lines = []
        with open(reading, encoding="utf-8") as output:  # noqa: PTH123 - a descriptor
            for line in output:
                lines.append(line.rstrip())
                if until is not None and line.startswith(f"step {until}:"):
                    for each in started:
                        each.send_signal(signal.SIGKILL)
        rest = [each.communicate()[0] for each in started]
        assert [each.returncode for each in started] == [0 if until is None else -signal.SIGKILL] * ranks, (lines, rest)
        return lines

    return start


@pytest.fixture(
    scope="module", params=["ddp.py", "fsdp.py", *(pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES[2:])]
)
def whole(request, train, tmp_path_factory):
    """An example, and the folder of its run on two processes, which was never killed."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    lines = train(request.param, folder, 2)
    assert f"step {LAST}:" in lines[-1]
    assert not any("set_epoch" in line for line in lines), lines  # the example's own sampler means its orders
    return request.param, folder


def weights(folder):
    """The model of the last checkpoint, put together from the parts that its ranks wrote."""
    (last,) = (folder / "run").glob(f"step-{LAST:08}")
    found = {}
    for path in sorted(last.glob("model-*.safetensors")):
        for name, value in safetensors.torch.load_file(path).items():
            found.setdefault(name, []).append(value)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def first_step(lines):
    return next(int(found[1]) for line in lines if (found := re.match(r"0 of \d+ starts after step (\d+)", line)))


def test_killed_ranks_continue_with_the_same_bits(whole, train, tmp_path):
    """H01: a run of two processes that is killed and started again ends as one that was not."""
    example, folder = whole
    train(example, tmp_path / "killed", 2, until=13)
    assert first_step(train(example, tmp_path / "killed", 2)) >= 5
    killed, expected = weights(tmp_path / "killed"), weights(folder)
    assert killed.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(killed[name], value), name


@pytest.mark.parametrize(
    "whole", ["ddp.py", *(pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES[1:])], indirect=True
)
def test_other_numbers_of_ranks_continue_the_same_run(whole, train, tmp_path):
    """N01, N03, H03: the same batches of all processes together, whose sums are rounded otherwise. I05: with stages nothing is."""
    example, folder = whole
    train(example, tmp_path / "killed", 2, until=13)
    middle = train(example, tmp_path / "killed", 3, until=28)
    last = train(example, tmp_path / "killed", 1)
    assert 5 <= first_step(middle) <= 13
    assert 20 <= first_step(last) <= 28
    expected = weights(folder)
    for name, value in weights(tmp_path / "killed").items():
        if example == "pipeline.py":
            assert torch.equal(value, expected[name]), name
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_torchrun_restarts_the_example_after_one_process_is_killed(warm_python, pytestconfig, tmp_path):
    """N03: the others are stopped by torchrun, nothing is lost, and the new processes resume from the newest checkpoint."""
    script, run = pytestconfig.rootpath / "examples" / "ddp.py", tmp_path / "run"
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--no-python",
        *warm_python.command(script, run),
    ]
    environment = {**os.environ, **BUFFERED, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    lines, killed = [], False
    with subprocess.Popen(torchrun, stdout=subprocess.PIPE, text=True, env=environment) as agent:
        for line in agent.stdout:
            lines.append(line.rstrip())
            if not killed and "step 12:" in line:
                killed = True
                (_, second) = children(agent.pid)
                os.kill(second, signal.SIGKILL)
    assert agent.returncode == 0, lines
    # both processes write to one pipe, so lines may run together
    starts = [int(each) for each in re.findall(r"of 2 starts after step (\d+?)(?=\d of 2|\D|$)", "\n".join(lines))]
    assert starts[:2] == [0, 0]
    assert len(starts) == 4
    assert starts[2] == starts[3] >= 5
    assert (run / f"step-{LAST:08}" / "manifest.json").exists()


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
