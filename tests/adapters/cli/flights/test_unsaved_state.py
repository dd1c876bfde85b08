"""A bisection of a resumed run that has state which no checkpoint has: a stale buffer is not excluded, and no fault is claimed."""

import pytest
import torch
from kit.adapters.manager import replay_cases

from trainfold import CheckpointManager, attach

bisected = replay_cases.bisected


class Centred(torch.nn.Module):
    """Its mean changes with training, and is saved by no checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.linear(x - self.mean)


def train(run, *ends):
    """Train to each of these steps, each time in a new process, as it were."""
    for end in ends:
        torch.manual_seed(0)
        model = Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer, loader=torch.utils.data.DataLoader(torch.arange(48.0).view(24, 2), batch_size=2))  # fmt: skip
        with CheckpointManager(run, every=4, record=1) as manager:
            manager.restore(live)
            for x in live.batches(epochs=1, steps=end):
                loss = model(x / 48).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                live.record(loss=loss)
                live.advance(samples=2)
                manager.step(live)


@pytest.mark.filterwarnings("ignore::trainfold.core.errors.HiddenState")
def test_a_stale_buffer_that_no_checkpoint_has_is_not_excluded(bisected, tmp_path):
    """It was: both states before the step were the same, and have no buffers; and the program that reset it had a fault."""
    train(tmp_path / "a", 8)
    train(tmp_path / "b", 6, 8)
    for found in (bisected().data, bisected("true", "{run}", a="b", b="b").data):
        assert (found["step"], found["cause"]) == (5, "arithmetic"), found["text"]
        assert "buffer" in found["may_be"]
        assert any("no checkpoint has model.mean" in each for each in found["warnings"]), found["warnings"]
        assert not any(each["name"] == "unsaved" for each in found["settings"])
    assert found["repeats_itself"] == [False, True]
