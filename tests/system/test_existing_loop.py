"""The example of an ordinary loop with eight added lines: it is really killed, and ends with the same bits."""

import os
import re
import signal
import subprocess
import sys

import pytest

from trainfold.adapters.cli import main

MARK = "  # trainfold"
RUN = "runs/existing"
# The example without the added lines, from the data on.
PLAIN_LOOP = '''
def main() -> None:
    """Train for `EPOCHS` epochs."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (an existing loop)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    stream: Iterable[Any] = (batch for _ in range(EPOCHS) for batch in loader)

    for x, y in stream:
        noisy = x + 0.05 * random.gauss(0.0, 1.0)
        loss = nn.functional.mse_loss(model(noisy), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        print(f"step {scheduler.last_epoch}: loss {loss.item()}", flush=True)


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def example(pytestconfig):
    return pytestconfig.rootpath / "examples" / "existing_loop.py"


def start(program, folder, warm=None):
    """Start it, in a fork of a Python that has imported torch if there is one."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        warm.command(program) if warm else [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(program, folder, warm=None):
    with start(program, folder, warm) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    return lines


def kill_after(program, folder, step, warm):
    """Run until the line of a step, then send SIGKILL."""
    with start(program, folder, warm) as process:
        for line in process.stdout:
            if line.startswith(f"step {step}:"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory):
    """A run that was never killed, in a Python of its own as a user has it: its path and its output."""
    folder = tmp_path_factory.mktemp("existing") / "whole"
    return folder, finish(example, folder)


@pytest.mark.slow(4)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_never_killed(example, whole, warm_python, tmp_path):
    """V13, G01: 4 epochs of 19 steps, with a kill in the first epoch, and another in the third epoch after a resume."""
    kill_after(example, tmp_path, 13, warm_python)
    kill_after(example, tmp_path, 49, warm_python)
    resumed = finish(example, tmp_path, warm_python)
    first = int(re.match(r"step (\d+):", resumed[0])[1])
    assert first >= 49  # the checkpoint of step 48 was durable before the line of step 49 was printed
    assert first % 4 == 1
    assert resumed == whole[1][first - 1 :]
    assert main(["diff", str(whole[0] / RUN), str(tmp_path / RUN)]) == 0


def test_a_finished_run_started_again_trains_nothing_more(example, whole, warm_python):
    """A11: it takes no step, does not repeat the last one, and writes no checkpoint."""
    folder, _ = whole

    def written():
        return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob(f"{RUN}/step-*/manifest.json")}

    before = written()
    assert sorted(before) == ["step-00000068", "step-00000072", "step-00000076"]
    assert finish(example, folder, warm_python) == []
    assert written() == before


def test_without_the_marked_lines_it_is_the_plain_loop_with_the_same_losses(example, whole, warm_python, tmp_path):
    """Only the marked lines use trainfold, and they do not change the results of the loop."""
    text = example.read_text()
    marked = [line for line in text.splitlines() if MARK in line]
    plain = "".join(line for line in text.splitlines(keepends=True) if MARK not in line)
    assert len(marked) == 8
    assert "the eight lines" in text.splitlines()[0]
    assert plain.endswith(PLAIN_LOOP)
    code = plain.split('"""', 2)[2]
    assert not re.search(r"trainfold|\blive\b|\bmanager\b", code)
    (tmp_path / "plain_loop.py").write_text(plain)
    losses = finish(tmp_path / "plain_loop.py", tmp_path / "plain", warm_python)
    assert len(losses) == 76
    assert losses == whole[1]
