"""Settings outside of optimizers and torch schedulers: if a second start changes one, it is refused or logged (W08, G12)."""

import logging
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainfold.adapters.components.module_settings import settings_of_modules
from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.loop.batches_per_step import Pace
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RestoreRefused, ResumeRefused


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, scheduler=None):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()


class OwnState(torch.optim.lr_scheduler.LRScheduler):
    """Its ``state_dict`` has only the changing values, and its setting is private."""

    def __init__(self, optimizer, total):
        self._total = total
        super().__init__(optimizer)

    def get_lr(self):
        return [base * max(0.0, 1 - self.last_epoch / self._total) for base in self.base_lrs]

    def state_dict(self):
        return {key: getattr(self, key) for key in ("last_epoch", "_step_count", "_last_lr")}

    def load_state_dict(self, state):
        vars(self).update(state)


class OfConfig(OwnState):
    """Its settings are in an object of the user's."""

    def __init__(self, optimizer, total):
        self.config = SimpleNamespace(total=total)
        super().__init__(optimizer, 1)
        self._total = 1

    def get_lr(self):
        return [base * max(0.0, 1 - self.last_epoch / self.config.total) for base in self.base_lrs]


class Ours:
    """A scheduler that is not torch's, like those of timm; its state has only the count."""

    def __init__(self, optimizer, total):
        self._optimizer, self._total, self.count = optimizer, total, 0

    def step(self):
        self.count += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 * max(0.0, 1 - self.count / self._total)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class OursInFull(Ours):
    """The same with the setting in its state."""

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "_optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


def scheduled(kind, total):
    model, optimizer = parts()
    scheduler = kind(optimizer, total)
    return model, optimizer, scheduler, attach(model, optimizer, scheduler=scheduler)


def stopped(kind, total, store, steps=3):
    model, optimizer, scheduler, live = scheduled(kind, total)
    with CheckpointManager(store) as manager:
        for _ in range(steps):
            step(model, optimizer, scheduler)
            live.advance(samples=1)
        manager.save(live)


def test_a_private_setting_outside_of_a_schedulers_own_state_is_refused_and_adapted():
    """W08: besides the scheduler's state, only public attributes used to be compared."""
    store = MemoryStore()
    stopped(OwnState, 12, store)
    *_, live = scheduled(OwnState, 100)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match="_total: saved 12, wanted 100"):
        manager.restore(live)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    model, optimizer, scheduler, _ = scheduled(OwnState, 100)
    for _ in range(3):
        step(model, optimizer, scheduler)
    assert live.optimizers["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_setting_in_an_object_that_a_scheduler_holds_is_a_warning():
    """W08: such an object may also hold changing values, so this is a warning, not a refusal; a policy may be strict."""
    store = MemoryStore()
    stopped(OfConfig, 12, store)
    with (
        CheckpointManager(store) as manager,
        pytest.warns(ResumeDrift, match=r"config\(SimpleNamespace\).total: saved 12, wanted 100"),
    ):
        manager.restore(scheduled(OfConfig, 100)[3])
    with (
        CheckpointManager(store, policy={"schedule_function": "refuse"}) as manager,
        pytest.raises(ResumeRefused, match=r"config\(SimpleNamespace\).total"),
    ):
        manager.restore(scheduled(OfConfig, 100)[3])


@pytest.mark.parametrize("kind", [Ours, OursInFull])
def test_a_setting_of_a_scheduler_that_is_none_of_torchs_is_refused_once_with_a_policy_that_helps(kind):
    """W08, R09: without the setting in the state, nothing was reported; with it, the suggested policy was refused with two other fixes."""
    store = MemoryStore()
    stopped(kind, 12, store)
    for policy in (None, {"scheduler": "adapt"}):
        with CheckpointManager(store, policy=policy) as manager, pytest.raises(ResumeRefused) as told:
            manager.restore(scheduled(kind, 100)[3])
        assert "attached.scheduler.own._total: saved 12, wanted 100" in str(told.value)
        assert 'policy={"scheduler_own": "warn"}' in told.value.fix
        assert '"adapt"' not in told.value.fix
    *_, scheduler, live = scheduled(kind, 100)
    with CheckpointManager(store, policy={"scheduler_own": "warn"}) as manager, pytest.warns(ResumeDrift):
        manager.restore(live)
    scheduler._total = 100  # as the recipe says
    assert (scheduler.count, scheduler._total) == (3, 100)


def test_a_refusal_of_live_objects_says_once_that_nothing_was_changed():
    """R09: each reason has its fix, and the refusal does not repeat it in other words."""
    store = MemoryStore()
    model, optimizer = parts()
    live = attach(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20))
    with CheckpointManager(store) as manager:
        for _ in range(7):
            step(model, optimizer, live._objects.schedulers[0])
            live.advance(samples=1)
        manager.save(live)
    model, optimizer = parts()
    live = attach(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4))
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager, pytest.raises(RestoreRefused) as told:
        manager.restore(live)
    assert str(told.value).count("nothing was changed") == 1
    assert "build the objects as they were" not in str(told.value)


class Average:
    """A user's own average, whose state does not contain its setting."""

    def __init__(self, decay):
        self.decay, self.values = decay, {"w": torch.zeros(1)}

    def state_dict(self):
        torch.rand(1)  # the user's code may draw
        return self.values

    def load_state_dict(self, state):
        self.values = dict(state)


EXTRAS = {
    "a scaler": (lambda n: torch.amp.GradScaler("cpu", growth_interval=n), 2000, 3, "growth_interval: saved 2000, wanted 3"),
    "an average of torch": (lambda d: AveragedModel(torch.nn.Linear(2, 1), multi_avg_fn=get_ema_multi_avg_fn(d)), 0.9, 0.99,
                            r"multi_avg_fn\(\): saved .*'decay': 0.9.*wanted .*'decay': 0.99"),
    "an average of one's own": (Average, 0.9, 0.99, "decay: saved 0.9, wanted 0.99"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRAS)
def test_a_changed_setting_of_an_object_under_extra_is_said(name):
    """W08: as with T_max, the old growth interval stayed in use silently."""
    make, old, new, said = EXTRAS[name]
    store = MemoryStore()

    def run(setting):
        model, optimizer = parts()
        streams = torch.get_rng_state()
        extra = {"it": make(setting)}
        if name != "an average of torch":  # which draws the weights of its own layer
            assert torch.equal(torch.get_rng_state(), streams)
        before = torch.get_rng_state()
        live = attach(model, optimizer, extra=extra)
        assert torch.equal(torch.get_rng_state(), before)  # C14
        return model, optimizer, live

    model, optimizer, live = run(old)
    with CheckpointManager(store) as manager:
        step(model, optimizer)
        live.advance(samples=1)
        manager.save(live)
    with warnings.catch_warnings(), CheckpointManager(store) as manager:
        warnings.simplefilter("error")
        manager.restore(run(old)[2])
    with CheckpointManager(store) as manager, pytest.warns(ResumeDrift, match=f"settings +attached.it.{said}") as told:
        manager.restore(run(new)[2])
    assert len(told) == 1
    with CheckpointManager(store, policy={"settings": "refuse"}) as manager, pytest.raises(ResumeRefused):
        manager.restore(run(new)[2])


class Block(torch.nn.Module):
    """A user's own module, which reads a number and a string."""

    def __init__(self, rate, log="a"):
        super().__init__()
        self.rate, self.log, self.drop = rate, log, torch.nn.Dropout(rate)

    def forward(self, batch):
        return self.drop(batch) * (1 + self.rate)


def net(*blocks, act=torch.nn.ReLU):
    return torch.nn.Sequential(torch.nn.Linear(2, 2), *blocks, act(), torch.nn.Linear(2, 1))


MODULES = {
    "a rate": (lambda: net(Block(0.1), Block(0.1)), lambda: net(Block(0.2), Block(0.2)),
               [r"attached.model.\*.drop: saved {.*'p': 0.1}, wanted {.*'p': 0.2}", r"attached.model.\*: .*'rate': .*0.1.*0.2"]),
    "one of several": (lambda: net(Block(0.1)), lambda: net(Block(0.1), act=torch.nn.GELU), [r"attached.model.\*: .*'ReLU'.*'GELU'"]),
    "a function": (lambda: torch.nn.TransformerEncoderLayer(2, 1, 2, activation="relu"),
                   lambda: torch.nn.TransformerEncoderLayer(2, 1, 2, activation="gelu"), ["attached.model.activation: saved relu, wanted gelu", "attached.model.activation_relu_or_gelu"]),
    "a wrapper": (lambda: net(Block(0.1)), lambda: torch.nn.DataParallel(net(Block(0.1))), []),
    "a text": (lambda: net(Block(0.1, "a")), lambda: net(Block(0.1, "b")), []),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::trainfold.core.errors.HiddenState")  # of the settings that the loop changes
@pytest.mark.parametrize(
    ("name", "under_extra"),
    [*((name, False) for name in MODULES), ("a rate", True), ("one of several", True)],
)
def test_a_changed_setting_of_a_submodule_is_said(name, under_extra):
    """W08: another dropout rate or activation was accepted silently; changes by the loop itself do not count."""
    old, new, said = MODULES[name]
    store = MemoryStore()

    def run(make):
        model = torch.nn.Linear(1, 1) if under_extra else make()
        return model, attach(model, extra={"other": make()} if under_extra else None)

    model, live = run(old)
    with CheckpointManager(store) as manager:
        for each in model.modules():
            each.p = 0.7  # like a loop that anneals it
        live.advance(samples=1)
        manager.save(live)
    with warnings.catch_warnings(), CheckpointManager(store) as manager:
        warnings.simplefilter("error", ResumeDrift)
        manager.restore(run(old)[1])
    with warnings.catch_warnings(record=True) as told, CheckpointManager(store) as manager:
        warnings.simplefilter("always")
        manager.restore(run(new)[1])
    texts = sorted(str(each.message) for each in told if each.category is ResumeDrift)
    assert len(texts) == len(said), texts
    for words in said:
        place = words.replace("model", "other") if under_extra else words
        assert any(re.search(f"settings +{place}", text) for text in texts), texts


def test_a_large_model_has_a_bounded_number_of_settings():
    """W08: modules that differ only by their number share a key, and settings over the limit become a digest."""
    deep = torch.nn.ModuleDict({"h": torch.nn.ModuleList([Block(0.1) for _ in range(100)])})
    assert settings_of_modules(deep, "m")["m.h.*"] == {"rate": 0.1}
    wide = torch.nn.ModuleDict({f"a{number}": torch.nn.Dropout(0.1) for number in range(400)})
    found = settings_of_modules(wide, "m")
    assert len(found) < 300
    wide.a99.p = 0.2
    assert settings_of_modules(wide, "m") != found


@pytest.mark.parametrize("verdict", ["warn", "refuse", "adapt"])
def test_a_setting_of_an_object_that_is_registered_after_the_restore_is_compared(verdict):
    """W08, B15: its state was kept until it was registered, but its settings were not."""
    store = MemoryStore()
    model, _ = parts()
    with CheckpointManager(store) as manager:
        live = attach(model, extra={"ema": Average(0.9)})
        live.advance(samples=1)
        manager.save(live)
    with CheckpointManager(store, policy={"settings": verdict}) as manager:
        live = attach(model)
        manager.restore(live)
        live.advance(samples=1)
        manager.save(live)  # with the state that is kept for the object
        live = attach(model)
        manager.restore(live)
        if verdict == "refuse":
            with pytest.raises(RestoreRefused, match=r"attached\.ema\.decay = 0\.9, found 0\.5; put it back"):
                live.register("ema", Average(0.5))
            live.register("ema", Average(0.9))
        elif verdict == "warn":
            with pytest.warns(ResumeDrift, match=r"settings +attached\.ema\.decay: saved 0\.9, wanted 0\.5"):
                live.register("ema", Average(0.5))
        else:
            live.register("ema", Average(0.5))
        assert live.contract()["attached.ema.decay"] == (0.9 if verdict == "refuse" else 0.5)


def weights(place):
    held = torch.ones(16)
    held[place] = 50
    return held


LOADERS = {
    "how many are drawn": (lambda data, n: DataLoader(data, 4, sampler=RandomSampler(data, num_samples=n)), 8, 12, "sampler_size: saved 8, wanted 12"),
    "with replacement": (lambda data, r: DataLoader(data, 4, sampler=RandomSampler(data, replacement=r)), False, True,
                         r"sampler_settings: saved nothing, wanted {'replacement': True}"),
    "a seed": (lambda data, n: DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, seed=n)), 0, 5, "sampler_settings: .*'seed': 5"),
    "an order": (lambda data, s: DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, shuffle=s)), True, False, "sampler_settings: .*'shuffle': False"),
    "weights": (lambda data, i: DataLoader(data, 4, sampler=WeightedRandomSampler(weights(i), 16)), 0, 5, "sampler_weights"),
    "a subset's sampler": (lambda data, i: DataLoader(data, 4, sampler=SubsetRandomSampler(range(i, i + 8))), 0, 8, "sampler_indices"),
    "a subset": (lambda data, i: DataLoader(Subset(data, list(range(i, i + 8))), 4), 0, 8, "subset_indices"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("several", [False, True])
def test_other_samples_to_draw_are_refused_at_an_epochs_end_too(name, several):
    """G02: the dataset has the same length. Inside an epoch the last batch shows the difference; at its end nothing did."""
    make, old, new, said = LOADERS[name]
    store = MemoryStore()

    def run(setting):
        model, optimizer = parts()
        loader = make(TensorDataset(torch.arange(32.0).reshape(16, 2)), setting)
        return model, optimizer, attach(model, optimizer, loader={"a": loader} if several else loader)

    model, optimizer, live = run(old)
    with CheckpointManager(store) as manager:
        for _ in live.batches("a", epochs=1) if several else live.batches(epochs=1):
            step(model, optimizer)
            live.advance()
        manager.save(live)
    with CheckpointManager(store) as manager:
        manager.restore(run(old)[2])
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match=said) as told:
        manager.restore(run(new)[2])
    assert 'policy={"samples": "adapt"}' in told.value.fix
    with CheckpointManager(store, policy={"samples": "adapt"}) as manager:
        manager.restore(run(new)[2])


def test_a_dataset_of_another_length_is_one_reason():
    """3.4: the sampler's other length follows from it, and is not reported separately."""
    store = MemoryStore()

    def run(length):
        model, optimizer = parts()
        return attach(model, optimizer, loader=DataLoader(TensorDataset(torch.zeros(length, 2)), 4))

    with CheckpointManager(store) as manager:
        manager.save(run(8))
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused) as told:
        manager.restore(run(12))
    assert [reason.where for reason in told.value.refusal.reasons] == ["dataset_size"]
    assert 'put it back, or begin with the first epoch of these data with reset={"dataset": "why"}' in told.value.fix
    with CheckpointManager(store) as manager:
        live = run(12)
        manager.restore(live, reset={"dataset": "samples were added"})
    assert sum(len(x) for (x,) in live.batches(epochs=1)) == 12


def test_what_each_rank_has_of_its_own_is_compared_by_rank_zero_alone():
    """An object whose settings are declared to be each rank's, or a subset for each rank, does not count as a difference."""
    store = MemoryStore()

    def rank(world):
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = {"average": Average(world.rank)}
        data = TensorDataset(torch.zeros(8, 2))
        loader = DataLoader(Subset(data, list(range(world.rank, 8, 2))), 2)
        live = attach(model, optimizer, extra=extra, loader=loader, sharing={"average.settings": "each_rank"})
        with CheckpointManager(store, collectives=world) as manager:
            restored = manager.restore(live)
            if restored.is_fresh:
                manager.save(live)
            return restored.is_fresh

    assert run_threads(2, rank) == [True, True]
    assert run_threads(2, rank) == [False, False]


def accumulated(store, every, batches, *, length=32, is_cut=True):
    """Train on at least ``batches`` batches, with an update after every ``every`` of an epoch; save.

    With ``is_cut`` the last window of an epoch ends with the epoch.
    """
    model, optimizer = parts()
    live = attach(model, optimizer, loader=DataLoader(TensorDataset(torch.ones(length, 2)), 4))
    with CheckpointManager(store) as manager:
        manager.restore(live)
        inside, epoch = live.progress.samples % length // 4 if is_cut else 0, live.progress.epoch
        for number, _ in enumerate(live.batches(epochs=3), start=1):
            inside += 1
            model(torch.ones(1, 2)).sum().backward()
            if inside % every == 0 or (is_cut and inside * 4 == length):
                optimizer.step()
                optimizer.zero_grad()
                live.advance()
                if number >= batches:
                    break
            else:
                live.advance(steps=0)
            if live.progress.epoch > epoch:
                inside, epoch = 0, live.progress.epoch
        if live.is_in_window:
            live.drop_window()
        manager.save(live)


@pytest.mark.parametrize("then", [1, 2, 3, 4])
def test_another_number_of_batches_for_each_step_is_said_once(then, caplog):
    """G12: no object of the run holds this number, so the first step after the resume shows it."""
    store = MemoryStore()
    with caplog.at_level(logging.WARNING):
        accumulated(store, 2, 8)
        caplog.clear()
        accumulated(store, then, 8)
    told = [
        record.getMessage() for record in caplog.records if "batches for each optimizer step" in record.getMessage()
    ]
    assert len(told) == (0 if then == 2 else 1)
    if told:
        assert f"2 batches for each optimizer step before the resume and {then} now" in told[0]


def test_steps_that_end_with_their_epoch_are_compared_too(caplog):
    """G12: epochs of 4 batches, with 2 batches a step before the resume and 4 after it."""
    store = MemoryStore()
    with caplog.at_level(logging.WARNING):
        accumulated(store, 2, 8, length=16)
        accumulated(store, 4, 4, length=16)
    assert "2 batches for each optimizer step before the resume and 4 now" in caplog.text


def test_a_loop_whose_steps_differ_in_their_batches_is_told_nothing(caplog):
    """G12: 2 and 3 batches in turn, as with gradients of two losses that come at different rates."""
    first = Pace()
    for batches in (2, 3, 2, 3):
        first.advance(batches, is_step=True, epoch=0)
    then = Pace(first.noted)
    then.advance(2, is_step=True, epoch=0)
    assert not caplog.records


def test_batches_that_an_epoch_leaves_over_are_no_other_accumulation(caplog):
    """G12: epochs of 5 batches, 2 for each step: the fifth is in the first window of the next epoch."""
    for cut in (2, 4, 5, 7, 9):
        store = MemoryStore()
        with caplog.at_level(logging.WARNING):
            accumulated(store, 2, cut, length=20, is_cut=False)
            accumulated(store, 2, 9, length=20, is_cut=False)
        assert "batches for each optimizer step" not in caplog.text


def test_a_window_that_an_epochs_end_cuts_short_is_no_other_accumulation(caplog):
    """G12: epochs of 5 batches, 2 for each step: windows of 2, 2 and 1."""
    for cut in range(1, 11):
        store = MemoryStore()
        with caplog.at_level(logging.WARNING):
            accumulated(store, 2, cut, length=20)
            accumulated(store, 2, 5, length=20)
        assert "batches for each optimizer step" not in caplog.text
