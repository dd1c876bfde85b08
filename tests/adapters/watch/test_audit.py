"""State that no component saves and that changes with training is named, once and loudly, with the cure (W07)."""

import copy
import functools
import itertools
import json
import logging
import random
import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainfold import CheckpointManager
from trainfold.adapters.live.live import attach
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HiddenState, HiddenStateRefused, InvalidArgument
from trainfold.core.state import audit


class Net(nn.Module):
    """A model whose forward calls ``change`` on it."""

    def __init__(self, change=lambda net: None, **attributes):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        for name, value in attributes.items():
            setattr(self, name, value)
        object.__setattr__(self, "change", change)

    def forward(self, x):
        self.change(self)
        return self.layer(self.drop(self.norm(x)))


def run(model, steps=3, *, loader=None, optimizer=None, each=lambda step: None, every=1, restore=True, **options):
    """Train and save at each ``every`` steps; return the warnings, and the contract of the last checkpoint."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, loader=loader, **options)
    store = MemoryStore()
    with CheckpointManager(store, every=every) as manager, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if restore:
            manager.restore(live)
        batches = live.batches(steps=steps) if loader else itertools.repeat(torch.ones(4, 3), steps)
        for step, batch in enumerate(batches, 1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            each(step)
            live.advance(samples=len(batch))
            manager.step(live)
        contract = live.contract()
    return [str(each.message) for each in heard if each.category is HiddenState], contract.get("unsaved", {})


def mode_at(step):
    def change(net):
        net.calls = getattr(net, "calls", 0) + 1
        if net.calls >= step:
            net.norm.eval()

    return change


CHANGES = {
    "a non-persistent buffer": (lambda net: net.mask.add_(1), "model.mask"),
    "dropout": (lambda net: setattr(net.drop, "p", net.drop.p + 0.1), "model.drop.p"),
    "momentum": (lambda net: setattr(net.norm, "momentum", net.norm.momentum * 0.9), "model.norm.momentum"),
    "a tensor": (lambda net: setattr(net, "average", net.average + 1), "model.average"),
    "an array": (lambda net: net.seen.__iadd__(1), "model.seen"),
    "a counter": (lambda net: setattr(net, "calls", net.calls + 1), "model.calls"),
    "a list": (lambda net: net.losses.append(1.0), "model.losses"),
    "a queue": (lambda net: net.queue.append(net.calls) or setattr(net, "calls", net.calls), "model.queue"),
    "a dict": (lambda net: net.counts.update("a"), "model.counts"),
    "a generator": (lambda net: torch.rand(1, generator=net.generator), "model.generator"),
    "numpy's": (lambda net: net.rng.random(), "model.rng"),
    "python's": (lambda net: net.random.random(), "model.random"),
    "an object": (lambda net: net.helper.count(), "model.helper.n"),
    "slots": (lambda net: setattr(net.slots, "n", net.slots.n + 1), "model.slots.n"),
    "a module in a list": (lambda net: net.teachers[0].weight.data.mul_(0.9), "model.teachers[0].weight"),
    "a count": (lambda net: next(net.ids), "model.ids"),
}


class Helper:
    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1


class Slots:
    __slots__ = ("empty", "n")

    def __init__(self):
        self.n = 0


def attributes():
    return {
        "average": torch.zeros(2), "seen": np.zeros(2), "calls": 0, "losses": [0.0], "queue": deque([0, 1], maxlen=2),
        "counts": Counter("ab"), "generator": torch.Generator(), "rng": np.random.default_rng(0), "random": random.Random(0),
        "helper": Helper(), "slots": Slots(), "teachers": [nn.Linear(3, 1)], "ids": itertools.count(),
    }  # fmt: skip


@pytest.mark.parametrize("case", [name for name in CHANGES if name != "a queue"])
def test_what_changes_with_training_and_is_saved_nowhere_is_named_once(case):
    """W07: a buffer that is not persistent, an attribute, a mode, a generator; with the cure."""
    change, path = CHANGES[case]
    heard, listed = run(Net(change, **attributes()), steps=5)
    assert len(heard) == 1, heard
    assert f"  {path}: " in heard[0]
    assert list(listed) == [path]
    assert "a resume from step 1 would begin it anew" in heard[0]


def test_a_queue_of_a_constant_length_is_seen_by_what_is_in_it():
    def change(net):
        net.queue.append(net.queue[-1] + 1)

    assert list(run(Net(change, **attributes()))[1]) == ["model.queue"]


def test_a_submodule_that_changes_its_mode_on_the_way_is_named():
    heard, listed = run(Net(mode_at(2), calls=0), steps=4, unsaved=["model.calls"])
    assert listed == {"model.norm.training": "a mode (train or eval)"}
    assert "function of live.progress.step" in heard[0]


def test_a_model_that_goes_on_in_eval_mode_is_named():
    """The classic: nobody calls ``train()`` after the first evaluation."""
    model = Net()
    _, listed = run(model, steps=3, each=lambda step: model.eval() if step == 2 else None)
    assert list(listed) == ["model.training"]


def test_an_evaluation_before_each_save_is_none_of_it():
    """Nor are frozen statistics: they are set before the first step, and a resume sets them again."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    for _ in range(4):
        model.train()
        model.norm.eval()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        model.eval()
        live.capture()
    assert "unsaved" not in live.contract()


def test_everything_is_named_at_once_and_what_comes_later_later():
    def change(net):
        net.calls += 1
        net.drop.p += 0.01
        if net.calls > 5:
            net.mask.add_(1)

    heard, listed = run(Net(change, calls=0), steps=16)
    assert len(heard) == 2
    assert heard[0].startswith("2 attributes change with training and are saved by no component")
    assert heard[1].startswith("1 attribute changes")
    assert sorted(listed) == ["model.calls", "model.drop.p", "model.mask"]


def test_a_steady_run_is_looked_at_less_and_less(monkeypatch):
    from trainfold.adapters.watch import audit as adapter

    looks = []
    look = adapter.Look
    monkeypatch.setattr(adapter, "Look", lambda *args: looks.append(1) or look(*args))
    run(Net(), steps=16, restore=False)
    assert len(looks) == 2 + 5  # at attach, after the first step, and at saves 1, 2, 4, 8, 16
    looks.clear()
    run(Net(), steps=8, every=100, restore=False)
    assert len(looks) == 2  # nothing was saved


def test_the_log_has_it_too(caplog):
    with caplog.at_level(logging.WARNING, "trainfold"):
        run(Net(lambda net: net.mask.add_(1)))
    assert sum("model.mask: a non-persistent buffer" in each.getMessage() for each in caplog.records) == 1


def test_a_program_without_a_log_is_told_once(monkeypatch, caplog):
    """Python prints a warning, and what is logged where no log is kept, both to the terminal."""
    monkeypatch.setattr(logging.getLogger("trainfold"), "hasHandlers", lambda: False)
    assert len(run(Net(lambda net: net.mask.add_(1)), steps=8)[0]) == 1
    assert not [each for each in caplog.records if "model.mask" in each.getMessage()]


def test_what_a_resume_has_named_is_not_named_again_and_what_is_new_is():
    def change(net):
        net.mask.add_(1)
        net.calls += net.counts

    states = []
    for counts in (0, 0, 1):
        model = Net(change, calls=0, counts=counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(model, optimizer, unsaved=["model.counts"])
        if states:
            live.restore(states[-1])
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                live.advance(samples=4)
                states.append(live.capture())
        assert [str(each.message).splitlines()[1] for each in heard] == [
            ["  model.mask: a non-persistent buffer"], [], ["  model.calls: a number"],
        ][(len(states) - 1) // 2]  # fmt: skip
        assert "model.mask" in live.contract()["unsaved"]


# --- what is made on the way -------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    """An average that is not there before the first forward."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way, self.mean = nn.Linear(3, 1), way, None

    def forward(self, x):
        now = x.detach().mean(0)
        if self.way == "one line":
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        elif self.mean is None:
            self.mean = now.clone()
        self.mean.mul_(0.9).add_(now, alpha=0.2)
        return self.layer(x - self.mean)


def strict_at(model, saves, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, strict=True)
    for step in range(1, steps + 1):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        if step in saves:
            live.capture()


@pytest.mark.parametrize("way", ["one line", "in place"])
def test_strict_refuses_what_the_first_forward_makes_and_the_others_change(way):
    """The first save after the second step finds it: what the first step has made is what it is compared with."""
    with pytest.raises(HiddenStateRefused, match=r"model\.mean: a tensor"):
        strict_at(Lazy(way), saves=[5])
    with pytest.raises(HiddenStateRefused, match=r"model\.mean: a tensor"):
        strict_at(Lazy(way), saves=[1, 2], steps=2)


def test_what_appears_between_two_looks_is_looked_at_in_the_next_save():
    def change(net):
        net.calls += 1
        if net.calls >= 5:
            net.log = getattr(net, "log", 0.5) + 1

    heard, _ = run(Net(change, calls=0), steps=9, unsaved=["model.calls"])
    assert [each.splitlines()[0].partition("step ")[2].split()[0] for each in heard] == ["9"]


class Recurrent(nn.Module):
    """A hidden state that goes from batch to batch, detached by the next forward."""

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
    """An average of the weights with a counter, as in many a tutorial."""

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
    """An average that holds a module, and saves what that says."""

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
    """Also a large one, of which a part is read."""
    ema = Holding(wide, says=says)
    _, listed = run(Net(), each=lambda step: ema.update(), extra={"ema": ema})
    assert listed == ({} if says else {"ema.net.weight": "a tensor"})


def test_what_is_left_out_on_purpose_is_not_named():
    model = Net(lambda net: net.mask.add_(1))
    optimizer = Counting(model.parameters(), lr=0.1)
    ema = Average(model, saves_counter=False)
    live = attach(model, optimizer, extra={"ema": ema}, strict=True)
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
    """Keeps the order of its epoch, which it draws anew when it is started, and a generator of its own."""

    def __init__(self, length):
        self.length, self.rng, self.order = length, random.Random(0), []

    def __iter__(self):
        self.order = list(range(self.length))
        self.rng.shuffle(self.order)
        return iter(self.order)

    def __len__(self):
        return self.length


def test_what_datasets_samplers_and_collates_own_is_named():
    """1.4: in the process of the loop; what workers own is found by a rehearsal."""
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
    """What a forward leaves for a loss or a plot."""

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


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU(), nn.Linear(8, 1)), (4, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.PReLU()), (2, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True), (2, 5, 8)),
    "gru": (lambda: nn.GRU(8, 8, bidirectional=True), (2, 5, 8)),
    "transformer": (encoder, (2, 5, 8)),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (4, 8)),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), backend="eager"), (4, 8)),
}  # fmt: skip
OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.LBFGS,
]  # fmt: skip
SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


def train(model, shape, optimizer, *, steps=5, **options):
    live = attach(model, optimizer, strict=True, **options)
    extra = options.get("extra", {})
    for _ in range(steps):

        def loss():
            optimizer.zero_grad()
            out = model(torch.randn(shape))
            found = (out[0] if isinstance(out, tuple) else out).square().mean()
            found.backward()
            return found

        optimizer.step(loss)
        if "ema" in extra:
            extra["ema"].update_parameters(model)
        if options.get("scheduler"):
            options["scheduler"].step()
        live.advance(samples=2)
        live.capture()
    assert "unsaved" not in live.contract()


@pytest.mark.parametrize("name", MODELS)
def test_plain_modules_of_torch_have_no_hidden_state(name):
    make, shape = MODELS[name]
    model = make()
    train(model, shape, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_plain_optimizers_of_torch_have_no_hidden_state(kind):
    model = nn.Linear(3, 1)
    train(model, (4, 3), kind(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("make", SCHEDULERS)
def test_plain_schedulers_of_torch_have_no_hidden_state(make):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = torch.optim.swa_utils.AveragedModel(model)
    extra = {"ema": ema, "scaler": torch.amp.GradScaler("cpu")}
    train(model, (4, 3), optimizer, scheduler=make(optimizer), extra=extra)


def test_a_model_under_ddp_has_no_hidden_state(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/join", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 1), nn.Dropout()))
        train(model, (4, 3), torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        torch.distributed.destroy_process_group()


# --- strict, and what is accepted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_strict_refuses_the_save_with_the_names_and_leaves_nothing_half_done(mode):
    model = Net(lambda net: net.mask.add_(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = MemoryStore()
    with CheckpointManager(store, every=1, at_end=False, mode=mode) as manager:
        live = attach(model, optimizer, strict=True)
        manager.restore(live)
        for _ in range(2):  # each save, and not only the first one
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            with pytest.raises(
                HiddenStateRefused, match=r"(?s)model\.mask: a non-persistent buffer.*nothing was written"
            ):
                manager.step(live)
    assert not [name for name in store.list("") if name.startswith("step-")]


@pytest.mark.parametrize("accepted", [["model.helper"], ["model.helper.n"]])
def test_what_is_accepted_by_name_is_neither_named_nor_refused(accepted):
    assert run(Net(lambda net: net.helper.count(), helper=Helper()), strict=True, unsaved=accepted) == ([], {})


@pytest.mark.parametrize("accepted", ["model.helper", [1], None])
def test_what_cannot_be_names_is_refused_when_it_is_given(accepted):
    with pytest.raises(InvalidArgument, match=r"attach\.unsaved"):
        attach(nn.Linear(1, 1), unsaved=accepted)


# --- what is told apart: pure ---------------------------------------------------------------------------------------

KINDS = (audit.NUMBER, audit.TENSOR, audit.NOTHING, audit.LENGTH, audit.GENERATOR)
LOOKS = st.dictionaries(
    st.sampled_from(["m.a", "m.b", "m.c[0]", "n.a"]),
    st.builds(
        lambda kind, value, shape: audit.Fact(kind, value, "m", shape if kind == audit.TENSOR else ()),
        st.sampled_from(KINDS), st.sampled_from("0123"), st.sampled_from([(1,), (2, 3)]),
    ),
)  # fmt: skip


@given(before=LOOKS, now=LOOKS)
@example(
    before={"m.a": audit.Fact(audit.NUMBER, "0", "m"), "m.c[0]": audit.Fact(audit.GENERATOR, "0", "m")},
    now={"m.c[0]": audit.Fact(audit.GENERATOR, "1", "m"), "m.a": audit.Fact(audit.TENSOR, "0", "m", (1,))},
)
def test_only_what_was_there_before_and_differs_is_a_change(before, now):
    found = audit.changed(before, now)
    assert found == {path: now[path] for path in found}
    assert all(before[path].value != now[path].value for path in found)
    assert not audit.changed(now, now)
    assert not any({before[path].kind, now[path].kind} & {audit.NOTHING} for path in found)
    both = set(before) & set(now)
    assert all(
        path in found
        for path in both
        if before[path].kind == now[path].kind == audit.GENERATOR and before[path].value != now[path].value
    )


def test_a_manifest_lists_so_many_and_no_more():
    named = {f"model.p{i}": audit.NUMBER for i in range(100)}
    listed = audit.listed(named)
    assert len(listed) == audit.LISTED + 1
    assert listed["..."] == "and 36 more"
    text = audit.hidden_state_text(named, step=3)
    assert "  and 88 more" in text
    assert audit.not_restored({"unsaved": listed}, ["model"]) == listed
    assert list(audit.not_restored({"unsaved": listed}, ["optimizer"])) == ["..."]
    assert audit.unsaved_of({"unsaved": 7}) == {}


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_a_resume_says_what_the_checkpoint_does_not_hold_and_compares_nothing_of_it(tmp_path, capsys):
    """What is listed is no difference: a run that has changed nothing yet has nothing to list."""
    from trainfold.adapters.cli import main

    model = Net(lambda net: net.mask.add_(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path / "run", every=1) as manager:
        live = attach(model, optimizer)
        manager.restore(live)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        live.advance(samples=4)
        with pytest.warns(HiddenState, match=r"model\.mask: a non-persistent buffer"):
            manager.step(live)
    for command in ("plan", "inspect"):
        assert main([command, str(tmp_path / "run")]) == 0
        assert "model.mask" in capsys.readouterr().out
        assert main([command, str(tmp_path / "run"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unsaved"] == {"model.mask": "a non-persistent buffer"}
    model = Net()
    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.warns(HiddenState, match=r"does not hold.*\n  model\.mask"),
    ):
        assert not manager.restore(attach(model, torch.optim.SGD(model.parameters(), lr=0.1))).is_fresh


def test_what_a_restore_changes_has_not_changed_with_training():
    def change(net):
        torch.rand(1, generator=net.generator)

    store = MemoryStore()
    for _ in range(2):
        model = Net(change, generator=torch.Generator(), table=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = {
            "stream": (model.generator.get_state, lambda state, m=model: (m.generator.set_state(state), m.mask.add_(1)))
        }
        live = attach(model, optimizer, extra=extra, strict=True)
        with CheckpointManager(store, every=1) as manager:
            manager.restore(live)
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            live.advance(samples=4)
            manager.step(live)


def test_a_component_that_is_registered_later_is_looked_at_from_then_on():
    model, other = Net(), Net()
    live = attach(model, strict=True)
    other.mask.add_(1)
    live.register("other", other)
    live.advance(samples=1)
    live.capture()
    other.mask.add_(1)
    live.advance(samples=1)
    with pytest.raises(HiddenStateRefused, match=r"other\.mask"):
        live.capture()


def test_the_audit_moves_nothing_and_runs_no_code_of_the_users():
    """C14."""

    class Guarded(Net):
        @property
        def secret(self):
            raise AssertionError

        def __getattr__(self, name):
            assert name not in ("secret", "anything")
            return super().__getattr__(name)

    class Trap(dict):
        def __iter__(self):
            raise AssertionError

        items = values = keys = __iter__

    model = Guarded(table=Trap(a=1), rng=np.random.default_rng(0), generator=torch.Generator())
    live = attach(model)
    before = (torch.get_rng_state(), model.generator.get_state(), model.rng.bit_generator.state, random.getstate())
    live.advance(samples=1)
    live.capture()
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], model.generator.get_state())
    assert before[2] == model.rng.bit_generator.state
    assert before[3] == random.getstate()


class Proxy:
    """It answers for what it stands for, when it can."""

    @property
    def __class__(self):
        raise RuntimeError("not connected")


def test_what_is_odd_does_not_fail_a_save(tmp_path):
    np.arange(8.0).tofile(tmp_path / "data.bin")
    fixed = np.zeros(3)
    fixed.setflags(write=False)
    options = {"proxies": [Proxy()], "huge": 10**6000, "data": np.memmap(tmp_path / "data.bin", mode="r"), "fixed": fixed,
               "strided": np.zeros((4, 4))[:, ::2], "half": np.zeros(2, np.float16), "words": np.array(["a"])}  # fmt: skip

    def change(net):
        net.huge += 1
        net.strided[0] += 1

    assert sorted(run(Net(change, **options))[1]) == ["model.huge", "model.strided"]


def test_a_look_is_bounded():
    from trainfold.adapters.watch import facts

    class Link:
        def __init__(self, depth):
            self.next = Link(depth - 1) if depth else None

    class Loop:
        def __init__(self):
            self.me, self.n = self, 0

    data = [[i] for i in range(10**5)]
    look = facts.Look({}, set())
    look.module("model", Net(links=[Link(100) for _ in range(20)], loop=Loop(), data=data, big=torch.zeros(10**8 // 4)))
    assert len(look.facts) < 300
    assert "model.big" in look.facts
