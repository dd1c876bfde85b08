"""`live.averaged`: averaged weights in the model for a while; a save inside has the trained ones and the average (B13, P25)."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, SwappedWeights
from trainfold.core.format.fingerprint import fingerprint


class Run:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.live = attach(self.model, self.optimizer, extra={"ema": self.ema})

    def train(self, steps):
        while self.live.progress.step < steps:
            torch.manual_seed(self.live.progress.step)
            self.model(torch.randn(8, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
            self.live.advance(samples=8)
        return self


def bits(module):
    return [each.tolist() for each in module.state_dict().values()]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_while_averages_are_in_the_model_is_the_save_before_and_after(mode):
    """B13, P25: raw and averaged weights both, and the count of the average; a run resumed from it is the run that was not stopped."""
    run, store = Run(0), MemoryStore()
    with CheckpointManager(store, mode=mode, every=None, at_end=False) as manager:
        manager.restore(run.live)
        run.train(3)
        wanted, trained = fingerprint(run.live.capture()), bits(run.model)
        manager.save(run.live)  # in the background while the averages are written over what it reads
        with run.live.averaged("ema"):
            assert bits(run.model) == bits(run.ema.module)
            assert fingerprint(run.live.capture()) == wanted
            manager.save(run.live)
            manager.drain()
        assert bits(run.model) == trained
    saved = read_manifest(store, "step-00000003")
    assert {each.name: each.fingerprint for each in saved.components} == wanted
    again = Run(1)
    with CheckpointManager(store) as manager:
        manager.restore(again.live)
    assert bits(again.train(5).model) == bits(run.train(5).model)
    assert bits(again.ema) == bits(run.ema)


def test_the_trained_weights_come_back_whatever_happens_and_nothing_trains_meanwhile():
    run = Run(0).train(2)
    trained = bits(run.model)
    state = run.live.capture()
    with pytest.raises(RuntimeError, match="evaluation"), run.live.averaged("ema"):
        raise RuntimeError("evaluation")
    assert bits(run.model) == trained
    with run.live.averaged("ema"):
        for call in (
            lambda: run.live.advance(samples=1),
            lambda: run.live.restore(state),
            lambda: run.live.averaged("ema").__enter__(),
        ):
            with pytest.raises(InvalidState, match="expected the trained weights in the model, found those of ema"):
                call()
    assert bits(run.model) == trained


def test_what_is_no_average_of_the_model_is_refused_and_a_swap_by_hand_still_is():
    run = Run(0).train(2)
    for name in ("optimizer", "emma"):
        with pytest.raises(InvalidArgument, match="an attached module that averages"), run.live.averaged(name):
            pass
    live = attach(nn.Linear(2, 1), extra={"other": nn.Linear(3, 1)})
    with pytest.raises(InvalidArgument, match="none for 'weight'"), live.averaged("other"):
        pass
    run.model.load_state_dict(run.ema.module.state_dict())
    with pytest.raises(SwappedWeights):
        run.live.capture()
