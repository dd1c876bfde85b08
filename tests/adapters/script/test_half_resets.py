"""B04: an optimizer or its scheduler alone is reset: the learning rate, which lives in both, is that of one run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, ResumeRefused

WHY = "on purpose"


def sequential(optimizer):
    return lrs.SequentialLR(
        optimizer, [lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.CosineAnnealingLR(optimizer, 20)], [3]
    )


class Own:
    """A scheduler of the user's own, which moves the rate that it finds."""

    def __init__(self, optimizer):
        self.target, self.count = optimizer, 0

    def step(self):
        self.count += 1
        for group in self.target.param_groups:
            group["lr"] *= 0.5

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


SCHEDULES = {
    "lambda": lambda optimizer: lrs.LambdaLR(optimizer, lambda n: 0.9**n),
    "step": lambda optimizer: lrs.StepLR(optimizer, 1, gamma=0.5),
    "cosine": lambda optimizer: lrs.CosineAnnealingLR(optimizer, 30),
    "one cycle": lambda optimizer: lrs.OneCycleLR(optimizer, max_lr=[1.0, 0.5], total_steps=40),
    "sequential": sequential,
    "plateau": lambda optimizer: lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.7),
    "own": Own,
}


class Run:
    """Two groups under a scheduler; `rates` are what each step used."""

    def __init__(self, schedule, *, make=torch.optim.SGD, lr=0.1, **kwargs):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[1].parameters(), "lr": lr / 4}]
        kwargs = {"momentum": 0.9} if make is torch.optim.SGD and not kwargs else kwargs
        self.optimizer = make(groups, lr=lr, **kwargs)
        self.scheduler = SCHEDULES[schedule](self.optimizer)
        self.live = attach(self.model, self.optimizer, scheduler=self.scheduler)

    def rates(self, steps):
        found = []
        for _ in range(steps):
            found.append(
                [(group["lr"], group.get("momentum"), group.get("betas")) for group in self.optimizer.param_groups]
            )
            self.model(torch.ones(1, 2)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            args = (1.0,) if isinstance(self.scheduler, lrs.ReduceLROnPlateau) else ()
            self.scheduler.step(*args)
            self.live.advance(samples=1)
        return found

    def restore(self, store, reset, *, by_value=False, policy=None):
        reset = dict.fromkeys(reset, WHY)
        if by_value:
            self.live.restore(load(store, like=self.live.capture(), reset=reset, policy=policy))
        else:
            with CheckpointManager(store, policy=policy) as manager:
                assert not manager.restore(self.live, reset=reset).is_fresh
        return self

    def saved(self):
        store = MemoryStore()
        save(self.live.capture(), store)
        return store


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@settings(max_examples=10)
@given(steps=st.integers(1, 6), by_value=st.booleans())
def test_a_reset_optimizer_goes_on_at_the_rates_of_the_run_that_goes_on(schedule, steps, by_value):
    """B04: the loaded scheduler continued from the script's rate: StepLR at a rate eight times too high."""
    run = Run(schedule)
    run.rates(steps)
    store = run.saved()
    again = Run(schedule).restore(store, ["optimizer"], by_value=by_value)
    assert not again.optimizer.state
    assert again.rates(8) == run.rates(8)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@settings(max_examples=10)
@given(steps=st.integers(1, 6), by_value=st.booleans())
def test_a_reset_scheduler_begins_with_the_rates_of_the_script(schedule, steps, by_value):
    """B04: the new scheduler began with the rate that the old one had left."""
    run = Run(schedule)
    run.rates(steps)
    store = run.saved()
    again = Run(schedule).restore(store, ["scheduler"], by_value=by_value)
    assert again.optimizer.state
    assert again.rates(8) == Run(schedule).rates(8)


@pytest.mark.parametrize("schedule", ["lambda", "cosine", "one cycle", "sequential"])
def test_another_base_rate_of_a_reset_optimizer_is_refused_unless_the_schedule_adapts_to_it(schedule):
    """B04: a reset hid that the script has another rate than the one at which the loaded scheduler continues."""
    run = Run(schedule)
    run.rates(3)
    store = run.saved()
    other = {"make": torch.optim.AdamW, "lr": 0.01}
    if schedule != "one cycle":  # max_lr is the same in both
        with pytest.raises(ResumeRefused, match=r"initial_lr: saved 0.1, wanted 0.01"):
            Run(schedule, **other).restore(store, ["optimizer"])
    again = Run(schedule, **other).restore(store, ["optimizer"], policy={"scheduler": "adapt"})
    fresh = Run(schedule, **other)
    fresh.rates(3)
    found, expected = again.rates(8), fresh.rates(8)
    assert [[rate[0] for rate in rates] for rates in found] == [[rate[0] for rate in rates] for rates in expected]


def test_both_or_neither_reset_changes_no_rate():
    """B04: a pair is one thing."""
    run = Run("cosine")
    run.rates(3)
    store = run.saved()
    assert Run("cosine").restore(store, ["optimizer", "scheduler"]).rates(5) == Run("cosine").rates(5)
    assert Run("cosine").restore(store, []).rates(5) == run.rates(5)


def test_the_plan_says_whose_rate_counts():
    """B04: nothing is silent."""
    run = Run("cosine")
    run.rates(3)
    store = run.saved()
    like = Run("cosine").live.capture()
    for reset, rates, said in (
        ("optimizer", "checkpoint", "on purpose; at the learning rate of its scheduler, which is loaded"),
        ("scheduler", "script", "at the learning rate of the script, as its scheduler, which is not loaded"),
    ):
        found = plan(store, like=like, reset={reset: WHY})
        assert found.actions[1].rates == rates
        assert f"({said})" in str(found)


def test_a_reset_optimizer_without_saved_rates_is_refused_and_the_fix_works():
    """B04: other groups than the saved ones, rates in tensors, and a checkpoint without the optimizer."""
    fix = r'reset both: reset=\{"optimizer": "why", "scheduler": "why"\}'
    run = Run("cosine")
    run.rates(3)
    state = run.live.capture()
    tensors = Run("cosine", lr=torch.tensor(0.1), make=torch.optim.AdamW)
    tensors.rates(3)
    half = MemoryStore()
    save(state.evolve(optimizer=None), half)
    policy = {"missing_component": "adapt"}
    for store, like, reset, found in (
        (half, Run("cosine"), [], "no optimizer"),
        (tensors.saved(), Run("cosine", lr=torch.tensor(0.1), make=torch.optim.AdamW), ["optimizer"], "tensors"),
    ):
        with pytest.raises(
            ResumeRefused, match=rf"(?s)the rates at which the loaded scheduler continues, found {found}.*{fix}"
        ):
            like.restore(store, reset, policy=policy)
        like.restore(store, ["optimizer", "scheduler"], policy=policy)


def test_a_checkpoint_without_the_scheduler_begins_the_new_one_at_the_rates_of_the_script():
    """B04: ``missing_component`` lets one half of the pair be missing; the other half is then as with a reset."""
    run = Run("cosine")
    run.rates(3)
    store = MemoryStore()
    save(run.live.capture().evolve(scheduler=None), store)
    again = Run("cosine").restore(store, [], policy={"missing_component": "adapt"})
    assert again.rates(8) == Run("cosine").rates(8)


def test_counters_that_are_not_loaded_need_a_position_that_is_not():
    """B04: the counters were 0, and the loader continued inside of its epoch."""

    def attached():
        model = torch.nn.Linear(2, 1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
        return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)

    live, store = attached(), MemoryStore()
    with CheckpointManager(store) as manager:
        for _ in live.batches(epochs=1):
            live.advance(samples=2)
            if live.progress.step == 2:
                manager.save(live)
    again = attached()
    with CheckpointManager(store) as manager:
        with pytest.raises(
            ResumeRefused, match=r'(?s)dataset: .*counters that are not loaded\s*; reset both: reset=\{"trainer"'
        ):
            manager.restore(again, reset={"trainer": WHY})
        manager.restore(again, reset={"trainer": WHY, "dataset": WHY})
        assert again.progress.step == 0
        assert len(list(again.batches(epochs=1))) == 4


@pytest.mark.parametrize("reset", ["other", "schedule"])
def test_another_pair_is_reset_as_one_or_not_at_all(reset):
    """B04: the rates of an optimizer under ``extra`` are in its scheduler too, and no plan knows which one that is."""
    store = MemoryStore()

    def made():
        model, critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        schedule = lrs.StepLR(other, 1, gamma=0.5)
        extra = {"critic": critic, "other": other, "schedule": schedule}
        return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), extra=extra), other, schedule

    live, other, schedule = made()
    with CheckpointManager(store, every=1) as manager:
        for _ in range(3):
            other.step()
            schedule.step()
            live.advance(samples=1)
            manager.step(live)
    live, other, schedule = made()
    with CheckpointManager(store) as manager:
        with pytest.raises(InvalidArgument, match="other and schedule both or neither"):
            manager.restore(live, reset={reset: WHY})
        manager.restore(live, reset={"other": WHY, "schedule": WHY})
        assert (other.param_groups[0]["lr"], schedule.last_epoch) == (0.1, 0)
        manager.restore(live, reset={"critic": WHY})
        assert (other.param_groups[0]["lr"], schedule.last_epoch) == (0.1 * 0.5**3, 3)
