"""Modules and objects that define their own state are saved, read back, or refused by name (W05, W20, B18, V12)."""

import copy
import time
import warnings

import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.components.component import ObjectPart, copied
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CaptureRefused, RestoreRefused, ResumeRefused
from trainfold.core.state.state import Opaque


class Counted(nn.Module):
    """Keeps a count and a table where only its own pair of methods finds them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.count, self.table = 0, torch.zeros(2)

    def forward(self, x):
        self.count += 1
        self.table = self.table + self.count
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.linear(x - self.mean) / (self.count + self.table.sum())

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count
        destination[prefix + "table"] = self.table

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.count = state_dict.pop(prefix + "count")
        self.table = state_dict.pop(prefix + "table").clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Overridden(nn.Module):
    """The same, by overriding `state_dict` itself, without `strict`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = 1.0

    def forward(self, x):
        self.scale *= 1.5
        return self.inner(x) * self.scale

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "scale": self.scale}

    def load_state_dict(self, state_dict):
        self.scale = state_dict["scale"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scale"})


class Derived(nn.Linear):
    """Adds values derived from its weights, and ignores them at a load."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "norm"] = self.weight.detach().norm()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(prefix + "norm")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Packed(nn.Linear):
    """Saves its weight in fewer bits: its load would change it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().bfloat16()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"].float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def hooked():
    module = nn.Linear(3, 3)
    module.seen = 0

    def count(module, given):
        module.seen += 1
        return (given[0] * module.seen,)

    def save(module, state, prefix, _):
        state[prefix + "seen"] = module.seen

    def load(module, state, prefix, *_):
        module.seen = state.pop(prefix + "seen")

    module.register_forward_pre_hook(count)
    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)
    return module


class Noting(nn.Module):
    """With `get_extra_state`."""

    def __init__(self):
        super().__init__()
        self.linear, self.notes = nn.Linear(3, 3), []

    def forward(self, x):
        self.notes.append(len(self.notes))
        return self.linear(x) + sum(self.notes)

    def get_extra_state(self):
        return {"notes": list(self.notes)}

    def set_extra_state(self, state):
        self.notes = list(state["notes"])


class Forgetful(Noting):
    def set_extra_state(self, state):
        self.notes = [*state["notes"], 0]


class Deaf(Counted):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.count = 0


MAKERS = {
    "_save_to_state_dict": Counted,
    "state_dict": Overridden,
    "derived": lambda: Derived(3, 3),
    "packed": lambda: Packed(3, 3),
    "hooks": hooked,
    "extra state": Noting,
}


class Run:
    """A model with such a module in it, and such a module beside it."""

    def __init__(self, make, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 3), make(), nn.BatchNorm1d(3))
        self.beside = make()
        parameters = [*self.model.parameters(), *self.beside.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.02)
        self.live = attach(self.model, self.optimizer, extra={"beside": self.beside})

    def train(self, steps):
        for _ in range(steps):
            x = torch.linspace(0, 1, 12).reshape(4, 3) + self.live.progress.step
            self.optimizer.zero_grad()
            (self.model(x) + self.beside(x)).square().sum().backward()
            self.optimizer.step()
            self.live.advance(samples=4)
        return self

    def bits(self):
        return trainfold.fingerprint(self.live.capture())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_a_module_says_itself_comes_back(make, mode):
    """W05: in the model and in a module under extra."""
    store, run = MemoryStore(), Run(make, 0)
    with CheckpointManager(store, mode=mode) as manager:
        run.train(3)
        manager.save(run.live)
        run.train(3)
    resumed = Run(make, 1)
    with CheckpointManager(store) as manager:
        manager.restore(resumed.live)
    assert resumed.train(3).bits() == run.bits()


@pytest.mark.parametrize(("make", "name"), [(Forgetful, "notes"), (Deaf, "count")])
def test_a_module_whose_own_way_does_not_come_back_is_refused_by_name_and_nothing_is_changed(make, name):
    """W05, V12: weights, buffers, gradients and attributes stay as they were."""
    state = Run(make, 0).train(3).live.capture()
    other = Run(make, 1).train(1)
    before, gradient = other.bits(), other.model[0].weight.grad
    attributes = copy.deepcopy({key: value for key, value in vars(other.model[1]).items() if key[0] != "_"})
    with pytest.raises(RestoreRefused, match=rf"{name}'\].*{make.__name__}"):
        other.live.restore(state)
    assert other.bits() == before
    assert other.model[0].weight.grad is gradient
    assert str({key: value for key, value in vars(other.model[1]).items() if key[0] != "_"}) == str(attributes)


def test_a_plain_module_has_no_component_of_its_own():
    """W05: nothing changes for what torch saves as parameters and buffers, its own hooks and old spectral norms included."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.spectral_norm(model[2].out_proj)
    assert list(attach(model).capture().extra) == []


def test_a_state_that_lacks_what_a_module_says_is_refused():
    """W05: by the name of the component."""
    run = Run(Counted, 0)
    state = run.live.capture()
    without = state.evolve(extra={name: held for name, held in state.extra.items() if name != "module_own_state"})
    with pytest.raises(RestoreRefused, match="module_own_state"):
        run.live.restore(without)


def test_a_module_that_is_registered_later_gets_what_it_has_said():
    """W05, B15."""
    run = Run(Counted, 0).train(2)
    state = copied(run.live.capture())
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), Counted(), nn.BatchNorm1d(3))
    live = attach(model)
    live.restore(state, components=["model", "module_own_state", "beside", "beside_own_state"])
    late = Counted()
    live.register("beside", late)
    assert late.count == 2
    assert not [name for name in live.pending if name.startswith("beside")]


def test_a_hook_that_comes_after_the_attach_is_refused_at_the_first_step():
    """W05, W14: its additions would be lost silently."""
    run = Run(lambda: nn.Linear(3, 3), 0)
    run.model[1].register_state_dict_post_hook(lambda module, state, prefix, _: state.update({prefix + "seen": 1}))
    with pytest.raises(CaptureRefused, match=r"model\.1.*before trainfold\.attach"):
        run.train(1)


class Quantised(nn.Module):
    """Training that is aware of quantisation: the observer has no channels before the first forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.ao is on its way out
            from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

            self.fake = FakeQuantize(MovingAveragePerChannelMinMaxObserver, -127, 127, dtype=torch.qint8, ch_axis=0,
                                     qscheme=torch.per_channel_symmetric)  # fmt: skip

    def forward(self, x):
        return nn.functional.linear(x, self.fake(self.linear.weight), self.linear.bias)


def test_observers_that_get_their_size_in_a_forward_resume_after_one():
    """W05: refused as they are built, by the names of the buffers; exact after one forward before the attach."""

    def build(seed, *, has_run):
        torch.manual_seed(seed)
        model = Quantised()
        if has_run:
            model(torch.zeros(1, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, attach(model, optimizer)

    def train(model, optimizer, live, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.5 + live.progress.step)).square().sum().backward()
            optimizer.step()
            live.advance(samples=2)
        return trainfold.fingerprint(live.capture())

    store, run = MemoryStore(), build(0, has_run=False)
    with CheckpointManager(store) as manager:
        train(*run, 3)
        manager.save(run[2])
        whole = train(*run, 3)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match="min_val"):
        manager.restore(build(1, has_run=False)[2])
    resumed = build(1, has_run=True)
    with CheckpointManager(store) as manager:
        manager.restore(resumed[2])
    assert train(*resumed, 3) == whole


class Pair:
    """A user's object with torch's pair of methods."""

    def __init__(self):
        self.seen = 1

    def state_dict(self):
        return {"seen": self.seen, "mean": torch.full((2,), float(self.seen))}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Lossy(Pair):
    def load_state_dict(self, state):
        self.seen = min(state["seen"], 3)


class Clock(Pair):
    def state_dict(self):
        return {**super().state_dict(), "now": time.perf_counter_ns()}


def test_an_object_that_does_not_take_its_state_back_is_refused_by_name():
    """W05: and its state is unchanged; a clock cannot be compared, and is accepted."""
    saved = Opaque({"seen": 7, "mean": torch.full((2,), 7.0)})
    lossy = Lossy()
    live = attach(nn.Linear(1, 1), extra={"pair": lossy})
    with pytest.raises(RestoreRefused, match=r"pair\['(mean|seen)'\].*Lossy"):
        live.restore(live.capture().evolve(extra={"pair": saved}))
    assert lossy.seen == 1
    clock = Clock()
    ObjectPart(clock, "clock").write(Opaque({**saved.value, "now": 5}))
    assert clock.seen == 7


# --- schedulers ------------------------------------------------------------------------------------------------------


def scheduled(kind):
    optimizer = torch.optim.SGD([{"params": [each]} for each in nn.Linear(2, 1).parameters()], lr=0.1)
    return optimizer, SCHEDULERS[kind](optimizer)


rates = torch.optim.lr_scheduler
SCHEDULERS = {
    "cosine": lambda o: rates.CosineAnnealingLR(o, 10),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 4),
    "step": lambda o: rates.StepLR(o, 3),
    "milestones": lambda o: rates.MultiStepLR(o, [3, 5]),
    "lambda": lambda o: rates.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: rates.ReduceLROnPlateau(o, patience=1),
    "cycle": lambda o: rates.OneCycleLR(o, 0.2, total_steps=20),
    "cyclic": lambda o: rates.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "sequence": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.CosineAnnealingLR(o, 9)], [2]),
    "chain": lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)]),
}


def fields(state, path=()):
    for key, value in state.items():
        yield (*path, key), value
        nested = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
        if nested and all(isinstance(each, dict) for each in nested.values()):
            yield from fields(nested, (*path, key))


def replaced(state, path, value):
    found = copy.deepcopy(state)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_field_of_another_type_is_refused_before_anything_is_written(kind):
    """W20: a manifest is changed and sealed again; the state of a continued run is accepted."""
    optimizer, scheduler = scheduled(kind)
    model = nn.Module()
    model.weights = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
    for step in range(6):
        optimizer.step()
        scheduler.step(*([1.0 + step] if kind == "plateau" else []))
    fresh_optimizer, fresh = scheduled(kind)
    fresh_model = nn.Module()
    fresh_model.weights = nn.ParameterList([p for group in fresh_optimizer.param_groups for p in group["params"]])
    state = copied(attach(model, optimizer, scheduler=scheduler).capture())
    live = attach(fresh_model, fresh_optimizer, scheduler=fresh)
    before = trainfold.fingerprint(live.capture())
    wrong = 0
    for path, value in fields(state.scheduler.value):
        for odd in ("text", b"bytes", {"a": 1}, [[]], 3.5, True, torch.zeros(2), None):
            if type(odd) is type(value) or value is None or (isinstance(value, list) and odd == [[]]):
                continue
            if (
                isinstance(odd, float)
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and path[-1] not in ("last_epoch", "_step_count")
            ):
                continue  # a number may be any number
            bad = state.evolve(scheduler=Opaque(replaced(state.scheduler.value, path, odd)))
            with pytest.raises(RestoreRefused, match="scheduler"):
                live.restore(bad)
            wrong += 1
    assert wrong > 20
    assert trainfold.fingerprint(live.capture()) == before
    live.restore(state)
    assert str(fresh.state_dict()) == str(scheduler.state_dict())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("last_epoch", -2),
        ("last_epoch", True),
        ("_step_count", 1.0),
        ("base_lrs", [0.1]),
        ("_last_lr", [0.1, float("nan")]),
        ("_last_lr", [0.1, "x"]),
    ],
)
def test_a_count_or_a_rate_out_of_range_is_refused(key, value):
    """W20."""
    optimizer, scheduler = scheduled("cosine")
    model = nn.Module()
    model.weights = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
    live = attach(model, optimizer, scheduler=scheduler)
    state = live.capture()
    with pytest.raises(RestoreRefused, match=rf"scheduler\['{key}'\]"):
        live.restore(state.evolve(scheduler=Opaque({**state.scheduler.value, key: value})))
