"""The audit of objects with their own state: recurrent modules, extras, datasets, caches."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from kit.adapters.live.audit_cases import Net, attributes, run
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.state import audit
from trainfold.weights import ByScript


class Recurrent(nn.Module):
    """A hidden state that is passed from batch to batch; the next forward detaches it."""

    def __init__(self, *, is_saved=False):
        super().__init__()
        self.cell, self.out, self.is_saved = nn.GRUCell(3, 4), nn.Linear(4, 1), is_saved
        self.register_buffer("h", torch.zeros(4, 4) if is_saved else None)
        if not is_saved:
            del self.h
            self.h = None

    def forward(self, x):
        hidden = self.cell(x, x.new_zeros(4, 4) if self.h is None else self.h.detach())
        self.h = hidden.detach() if self.is_saved else hidden
        return self.out(hidden)


class Tuple(Recurrent):
    def forward(self, x):
        hidden = self.cell(x, x.new_zeros(4, 4) if self.h is None else self.h[0].detach())
        self.h = (hidden, 1)
        return self.out(hidden)


@pytest.mark.parametrize("kind", [Recurrent, Tuple])
def test_a_hidden_state_that_is_kept_with_its_graph_and_read_by_the_next_forward_is_named(kind):
    heard, listed = run(kind(), steps=4)
    assert len(heard) == 1
    assert listed == {"model.h": audit.CARRIED}
    assert "a resume from step 1 would" in heard[0]


def test_the_cure_for_a_hidden_state_is_exact():
    def start():
        torch.manual_seed(0)
        model = Recurrent(is_saved=True)
        return model, attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)

    def go_on(model, live, steps):
        losses, states = [], []
        while live.progress.step < steps:
            loss = model(torch.full((4, 3), float(live.progress.step))).sum()
            loss.backward()
            live.optimizers["optimizer"].step()
            live.optimizers["optimizer"].zero_grad()
            losses.append(loss.item())
            live.advance(samples=4)
            states.append(copy.deepcopy(live.capture()))
        return losses, states

    whole, states = go_on(*start(), 5)
    model, live = start()
    live.restore(states[1])
    assert go_on(model, live, 5)[0] == whole[2:]


# --- what is saved ---------------------------------------------------------------------------------------------------


class ExtraState(Net):
    def get_extra_state(self):
        return {"n": self.calls}

    def set_extra_state(self, state):
        self.calls = state["n"]


class Average:
    """An average of the weights with a counter, as in many tutorials."""

    def __init__(self, model, *, saves_counter):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.updates, self.saves_counter = 0, saves_counter

    def update(self, model):
        self.updates += 1
        for name, value in model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow} | ({"num_updates": self.updates} if self.saves_counter else {})

    def load_state_dict(self, state):
        raise NotImplementedError


def test_each_cure_cures():
    def change(net):
        net.calls += 1
        torch.rand(1, generator=net.generator)
        net.rng.random()
        net.random.random()
        net.bits.random()

    model = Net(change, **attributes(), bits=np.random.RandomState(0))
    extra = {
        "calls": (lambda: model.calls, print),
        "one": (model.generator.get_state, model.generator.set_state),
        "two": (lambda: model.rng.bit_generator.state, print),
        "three": (model.random.getstate, model.random.setstate),
        "four": (lambda: model.bits.get_state(legacy=False), print),
    }
    assert run(model, extra=extra, strict=True) == ([], {})
    assert len(run(Net(change, **attributes(), bits=np.random.RandomState(0)))[1]) == 5

    registered = Net(lambda net: net.mask.add_(1))
    registered.register_buffer("mask", torch.zeros(2))
    assert run(registered, strict=True) == ([], {})
    assert run(ExtraState(lambda net: setattr(net, "calls", net.calls + 3), calls=7), strict=True) == ([], {})


@pytest.mark.parametrize("saves_counter", [False, True])
def test_an_object_with_a_state_of_its_own_is_compared_with_what_it_says(saves_counter):
    model = Net()
    ema = Average(model, saves_counter=saves_counter)
    _, listed = run(model, each=lambda step: ema.update(model), extra={"ema": ema})
    assert listed == ({} if saves_counter else {"ema.updates": "a number"})


class Holding:
    """An average that contains a module, and saves the module's state."""

    def __init__(self, wide, *, says):
        self.net, self.says = nn.Linear(3, wide), says

    def update(self):
        with torch.no_grad():
            self.net.weight.add_(1)

    def state_dict(self):
        return {"ema": self.net.state_dict() if self.says else {}}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize("wide", [1, 2**19])
@pytest.mark.parametrize("says", [False, True])
def test_a_module_inside_of_an_object_is_compared_with_what_the_object_says(wide, says):
    """Also a large module, of which only a part is read."""
    ema = Holding(wide, says=says)
    _, listed = run(Net(), each=lambda step: ema.update(), extra={"ema": ema})
    assert listed == ({} if says else {"ema.net.weight": "a tensor"})


def test_what_is_left_out_on_purpose_is_not_named():
    model = Net(lambda net: net.mask.add_(1))
    optimizer = Counting(model.parameters(), lr=0.1)
    ema = Average(model, saves_counter=False)
    live = attach(model, optimizer, extra={"ema": ema}, strict=True, weights=ByScript())
    with CheckpointManager(MemoryStore(), every=1, components=["trainer"]) as manager:
        manager.restore(live)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        ema.update(model)
        live.advance(samples=4)
        manager.step(live)


class Counting(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._steps = 0

    def step(self, closure=None):
        self._steps += 1
        return super().step(closure)


def test_a_counter_of_an_optimizer_object_is_named():
    model = Net()
    optimizer = Counting(model.parameters(), lr=0.1)
    assert list(run(model, optimizer=optimizer, each=lambda step: None)[1]) == ["optimizer._steps"]


# --- loaders ---------------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.reads = 0
        self.cache = {}

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.reads += 1
        self.cache[index] = index
        return torch.from_numpy(self.rng.standard_normal(3)).float()


class Collate:
    def __init__(self):
        self.random = random.Random(0)

    def __call__(self, samples):
        self.random.random()
        return torch.stack(samples)


class Shuffles(torch.utils.data.Sampler):
    """Has its own generator and the order of its epoch, which it draws again at each start."""

    def __init__(self, length):
        self.length, self.rng, self.order = length, random.Random(0), []

    def __iter__(self):
        self.order = list(range(self.length))
        self.rng.shuffle(self.order)
        return iter(self.order)

    def __len__(self):
        return self.length


def test_what_datasets_samplers_and_collates_own_is_named():
    """1.4: in the process of the loop; a rehearsal finds the state of workers."""
    data, rng = Noisy(), torch.Generator()

    def scaled(samples, generator):
        torch.rand(1, generator=generator)
        return torch.stack(samples)

    loader = DataLoader(data, batch_size=4, sampler=Shuffles(64), collate_fn=Collate())
    assert sorted(run(Net(), loader=loader)[1]) == [
        "loader.collate_fn.random", "loader.dataset.reads", "loader.dataset.rng", "loader.sampler.rng",
    ]  # fmt: skip
    loader = DataLoader(torch.rand(64, 3), batch_size=4, collate_fn=functools.partial(scaled, generator=rng))
    assert list(run(Net(), loader=loader)[1]) == ["loader.collate_fn.keywords['generator']"]
    loader = DataLoader(torch.rand(64, 3), batch_size=4, collate_fn=lambda samples: scaled(samples, rng))
    assert list(run(Net(), loader=loader)[1]) == ["loader.collate_fn.rng"]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}])
def test_the_generators_of_a_loader_are_saved_with_its_position(options):
    loader = DataLoader(torch.rand(16, 3), batch_size=4, **options)
    assert run(Net(), 9, loader=loader, strict=True) == ([], {})


# --- no false alarms -------------------------------------------------------------------------------------------------


class Rope(nn.Module):
    """A cache that is a function of the length, made when it is needed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cached_length, self.cos, self.first = 0, None, None
        self.tables = {}
        self.register_buffer("lazy", None, persistent=False)

    def forward(self, x):
        length = x.shape[1]
        if length > self.cached_length:
            self.cached_length = length
            self.cos = torch.arange(length).float().cos()
        self.tables.setdefault(length, torch.ones(length))
        self.lazy = torch.ones(3) if self.lazy is None else self.lazy
        return self.layer(x) * self.cos[:length, None] + self.bias(length)

    @functools.lru_cache  # noqa: B019
    def bias(self, length):
        return torch.ones(length, 1)

    @functools.cached_property
    def scale(self):
        return 1.0


def test_a_cache_that_is_a_function_of_the_length_is_no_hidden_state():
    model = Rope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, strict=True)
    for length in (3, 5, 2, 9, 9, 12, 4, 13):
        (model(torch.ones(2, length, 4)).sum() * model.scale).backward()
        optimizer.step()
        live.advance(samples=2)
        live.capture()
    assert "unsaved" not in live.contract()


class Keeps(nn.Module):
    """A module whose forward keeps a value for a loss or a plot."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.aux = torch.zeros(())

    def forward(self, x):
        y = self.layer(x)
        self.aux = y.square().mean()
        return y + 0 * self.aux


def test_what_a_forward_leaves_for_its_backward_is_no_hidden_state():
    assert run(Keeps(), strict=True) == ([], {})


class Trainer:
    """Lightning's: a graph of counters, to which its modules refer."""

    def __init__(self):
        self.steps = 0


Trainer.__module__ = "lightning.pytorch.trainer.trainer"


def test_the_trainer_that_a_module_refers_to_is_not_looked_at():
    """It used up the look, and what the module itself keeps went unnoticed."""

    class Module(Net):
        def __init__(self):
            super().__init__()
            self._trainer, self.calls = Trainer(), 0

        def forward(self, x):
            self._trainer.steps += 1
            self.calls += 1
            return super().forward(x)

    _, listed = run(Module(), steps=4)
    assert listed == {"model.calls": audit.NUMBER}
