"""A program that ends without releasing trainfold's objects prints nothing at exit."""

import subprocess
import sys

import pytest

TRAIN = """
import sys
import torch, trainfold
from trainfold import Loss

def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))

def functional():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-3)
    state = trainfold.init_state(model, adamw, seed=0)
    step = trainfold.make_step(model, loss_fn, adamw, donate=True)
    for batch in torch.randn(2, 16, 8):
        state, _ = step(state, batch)
    return state, step

def mutable(run, mode):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=4, shuffle=True)
    live = trainfold.attach(model, optimizer, loader=loader)
    manager = trainfold.CheckpointManager(run, mode=mode, every=1)
    manager.restore(live)
    batches = live.batches()
    for _ in range(3):
        (x,) = next(batches)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.advance(samples=4)
        manager.step(live)
    return live, manager, batches
"""
KEPT_BY = {
    "the program, which something keeps": "import __main__; sys.keep = __main__",
    "another module": "torch.keep = held, [held]; torch.keep[1].append(torch.keep); del held",
}


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "kept_by", [pytest.param("the program, which something keeps", marks=pytest.mark.long), "another module"]
)
def test_a_program_that_ends_with_a_donated_state_and_unclosed_managers_says_nothing(kept_by, tmp_path):
    """Python clears modules at exit, so the cleanup of trainfold's objects must not need them."""
    script = f"""{TRAIN}
held = functional(), mutable({str(tmp_path / "a")!r}, "sync"), mutable({str(tmp_path / "b")!r}, "async")
state, step = held[0]
{KEPT_BY[kept_by]}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if "the run starts fresh" not in line]
    assert (done.returncode, done.stdout, lines) == (0, "", [])
    assert (tmp_path / "b" / "step-00000003" / "manifest.json").exists(), "the save under way was waited for"
