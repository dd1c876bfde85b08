"""A save is refused while the model contains averaged weights, and at no other time (B13)."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import SwappedWeights


class Shadow:
    """As in many a tutorial: new tensors by name at each update, a backup while they are applied."""

    def __init__(self, model):
        self.model, self.backup = model, {}
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self):
        for name, value in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value.detach()

    def apply(self):
        self.backup = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for name, value in self.model.named_parameters():
            value.data.copy_(self.shadow[name])

    def restore(self):
        for name, value in self.model.named_parameters():
            value.data.copy_(self.backup[name])

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        self.shadow = dict(state)


class Listed:
    """As torch_ema and diffusers have it: a list in the order of the parameters, averaged in place."""

    def __init__(self, model):
        self.params = list(model.parameters())
        self.shadow_params, self.collected = [p.detach().clone() for p in self.params], []

    def update(self):
        for shadow, param in zip(self.shadow_params, self.params, strict=True):
            shadow.lerp_(param.detach(), 0.1)

    def apply(self):
        self.collected = [p.detach().clone() for p in self.params]
        for shadow, param in zip(self.shadow_params, self.params, strict=True):
            param.data.copy_(shadow)

    def restore(self):
        for kept, param in zip(self.collected, self.params, strict=True):
            param.data.copy_(kept)

    def state_dict(self):
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state):
        raise NotImplementedError


class Averaged(AveragedModel):
    """Torch's, with a swap by one of the ways that libraries have."""

    def __init__(self, model, how):
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        object.__setattr__(self, "model", model)
        self.how = how

    def update(self):
        self.update_parameters(self.model)

    def pairs(self):
        return list(zip(self.model.parameters(), self.module.parameters(), strict=True))

    def apply(self):
        object.__setattr__(self, "kept", [param.data for param, _ in self.pairs()])
        for param, average in self.pairs():
            if self.how == "pointer":
                param.data = average.data
            elif self.how == "exchange":  # as Lightning does
                raw = param.data.clone()
                param.data.copy_(average.data)
                average.data.copy_(raw)
            else:
                torch.utils.swap_tensors(param, average)

    def restore(self):
        if self.how == "pointer":
            for (param, _), kept in zip(self.pairs(), self.kept, strict=True):
                param.data = kept
        else:
            self.apply()


AVERAGES = {
    "dict": Shadow,
    "list": Listed,
    "pointer": lambda model: Averaged(model, "pointer"),
    "exchange": lambda model: Averaged(model, "exchange"),
    "swap_tensors": lambda model: Averaged(model, "swap_tensors"),
}


def make(average):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = average(model)
    return model, optimizer, ema, attach(model, optimizer, extra={"ema": ema}, unsaved=["ema.how"])


def step(model, optimizer):
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", AVERAGES)
def test_a_save_while_averaged_weights_are_swapped_in_is_refused(name):
    """B13: it would lose the raw ones."""
    model, optimizer, ema, live = make(AVERAGES[name])
    with CheckpointManager(MemoryStore(), every=100, at_end=False) as manager:
        manager.restore(live)
        for _ in range(3):
            step(model, optimizer)
            ema.update()
            live.advance(samples=8)
        ema.apply()
        with pytest.raises(SwappedWeights, match=r"model: .*the weights that ema had.*swap the averaged weights out"):
            manager.save(live)
        ema.restore()
        manager.save(live)
        step(model, optimizer)
        ema.update()
        live.advance(samples=8)
        manager.save(live)


@pytest.mark.filterwarnings("ignore:(?s)1 attribute changes.*ema.(backup|collected)")  # what stood in the model
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_at_any_other_moment_is_refused_nothing(name):
    """At the first step the average is a copy of the model; after an evaluation the raw weights are back."""
    model, optimizer, ema, live = make(AVERAGES[name])
    for _ in range(3):
        step(model, optimizer)
        ema.update()
        live.advance(samples=8)
        live.capture()
        ema.apply()
        ema.restore()
        live.capture()


def test_a_target_network_may_be_set_to_the_model_and_the_model_be_written_to():
    model, optimizer, target, live = make(copy.deepcopy)
    for number in range(4):
        step(model, optimizer)
        live.advance(samples=8)
        if number % 2:
            target.load_state_dict(model.state_dict())
        live.capture()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
        live.capture()


def test_a_restore_is_no_swap():
    model, optimizer, _, live = make(copy.deepcopy)
    step(model, optimizer)
    live.advance(samples=8)
    average = live.capture()
    kept = average.evolve(model=average.extra["ema"])
    live.restore(kept)
    live.capture()


def test_without_an_average_nothing_is_remembered():
    model = nn.Linear(3, 1)
    live = attach(model, extra={"head": nn.Linear(3, 4), "n": (lambda: 1, print)})
    assert live._watch._averages._twins == {}
    live.advance(samples=1)
    assert live._watch._averages._kept is None
