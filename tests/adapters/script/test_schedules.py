"""Schedulers whose settings change between two starts of a script are refused by name, or adapted at the current count."""

import copy
import functools
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as S

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RestoreRefused, ResumeRefused


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def adam(model, rate=0.1):
    return torch.optim.Adam(model.parameters(), lr=rate)


class Stepped:
    """A multiplier that is an object with its own state."""

    def __init__(self, every):
        self.every = every

    def __call__(self, step):
        return 0.5 ** (step // self.every)


class Ours(S.LRScheduler):
    """A user's own recursive scheduler, with a setting that no library knows."""

    def __init__(self, optimizer, shrink):
        self.shrink = shrink
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] * (self.shrink if self.last_epoch else 1) for group in self.optimizer.param_groups]


# name -> (optimizer, the scheduler by a setting, the old setting, the new one, the key that the refusal names)
CHANGES = {
    "step": (sgd, lambda o, n: S.StepLR(o, step_size=n, gamma=0.5), 3, 5, "step_size"),
    "gamma": (sgd, lambda o, g: S.StepLR(o, 3, gamma=g), 0.5, 0.1, "gamma"),
    "milestones": (sgd, S.MultiStepLR, [3, 9], [5, 20], "milestones"),
    "exponential": (adam, S.ExponentialLR, 0.9, 0.99, "gamma"),
    "constant": (sgd, lambda o, n: S.ConstantLR(o, 0.5, n), 3, 8, "total_iters"),
    "linear": (sgd, lambda o, n: S.LinearLR(o, 0.1, 1.0, n), 4, 11, "total_iters"),
    "polynomial": (sgd, lambda o, n: S.PolynomialLR(o, n, power=2.0), 12, 30, "total_iters"),
    "cosine": (adam, lambda o, n: S.CosineAnnealingLR(o, n, eta_min=0.001), 12, 40, "T_max"),
    "restarts": (sgd, lambda o, n: S.CosineAnnealingWarmRestarts(o, n, T_mult=2), 3, 5, "T_0"),
    "one cycle": (sgd, lambda o, n: S.OneCycleLR(o, 0.5, total_steps=n), 20, 60, "total_steps"),
    "one cycle of betas": (adam, lambda o, n: S.OneCycleLR(o, 0.5, total_steps=n), 20, 60, "total_steps"),
    "another peak": (sgd, lambda o, m: S.OneCycleLR(o, m, total_steps=20), 0.5, 1.0, "max_lr"),
    "cyclic": (sgd, lambda o, n: S.CyclicLR(o, 0.01, 0.1, step_size_up=n), 3, 7, "total_size"),
    "chained": (sgd, lambda o, g: S.ChainedScheduler([S.LinearLR(o, 0.1, total_iters=4), S.ExponentialLR(o, g)]), 0.9, 0.5, "schedulers[1].gamma"),
    "warm-up and cosine": (
        sgd,
        lambda o, n: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=4), S.CosineAnnealingLR(o, n)], [4]),
        12, 40, "schedulers[1].T_max",
    ),
    "a longer warm-up": (
        sgd,
        lambda o, n: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=n), S.ExponentialLR(o, 0.9)], [n]),
        2, 5, "schedulers[0].total_iters",
    ),
    "an object": (sgd, lambda o, n: S.LambdaLR(o, Stepped(n)), 3, 5, None),
    "a user's own": (sgd, Ours, 0.9, 0.8, "shrink"),
}  # fmt: skip


def built(optimizer, scheduler, setting, rate=0.1):
    model = torch.nn.Linear(2, 1)
    made = optimizer(model, rate)
    return model, made, scheduler(made, setting)


def trained(model, optimizer, scheduler, steps, live=None):
    """Train on data that depend on the step alone."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(step))).sum().backward()
        optimizer.step()
        scheduler.step()
        if live is not None:
            live.advance(samples=1)


def rates(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def stopped(kind, steps, store, **changes):
    """Save a run of some steps under the old setting."""
    optimizer, scheduler, old, *_ = CHANGES[kind]
    model, made, schedule = built(optimizer, scheduler, old, **changes)
    live = attach(model, made, scheduler=schedule)
    trained(model, made, schedule, steps, live)
    with CheckpointManager(store) as manager:
        manager.save(live)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_setting_is_refused_by_name_and_says_what_to_type(kind):
    """W08, V08: the resume used to keep the old setting silently."""
    store = MemoryStore()
    stopped(kind, 5, store)
    optimizer, scheduler, _, new, key = CHANGES[kind]
    model, made, schedule = built(optimizer, scheduler, new)
    live = attach(model, made, scheduler=schedule)
    with CheckpointManager(store) as manager:
        if key is None:  # a function
            with pytest.warns(ResumeDrift, match=r"schedule_function.*lr_lambdas\(\).*'every': 3.*'every': 5"):
                manager.restore(live)
            return
        with pytest.raises(ResumeRefused) as refused:
            manager.restore(live)
    assert f".{key}: saved " in str(refused.value)
    assert 'policy={"scheduler": "adapt"}' in str(refused.value)
    assert live.progress.step == 0


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_adapt_is_a_fresh_run_of_the_new_schedule_stepped_as_often(kind, steps):
    """W08: the law, for each scheduler of torch, including recursive ones and chains.

    Rates, momenta and the schedulers' own states are those of the fresh run, then and after more steps.
    """
    store = MemoryStore()
    stopped(kind, steps, store)
    optimizer, scheduler, _, new, _ = CHANGES[kind]
    whole = built(optimizer, scheduler, new)
    trained(*whole, steps)
    model, made, schedule = built(optimizer, scheduler, new)
    live = attach(model, made, scheduler=schedule)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    assert live.progress.step == steps
    for _ in range(3):
        assert rates(made) == rates(whole[1])
        assert schedule.state_dict() == whole[2].state_dict()
        assert schedule.get_last_lr() == whole[2].get_last_lr()
        trained(model, made, schedule, 2)
        trained(*whole, 2)


@given(old=st.integers(2, 30), new=st.integers(2, 60), steps=st.integers(0, 25), rate=st.sampled_from([0.1, 0.03]))
def test_another_horizon_and_base_rate_are_adapted_together(old, new, steps, rate):
    """W08: whatever the horizons are and wherever the run stopped; the base rate is a setting of the schedule."""
    store = MemoryStore()

    def cosine(optimizer, n):
        return S.CosineAnnealingLR(optimizer, n)

    model, made, schedule = built(sgd, cosine, old)
    live = attach(model, made, scheduler=schedule)
    trained(model, made, schedule, steps, live)
    save(live.capture(), store)
    whole = built(sgd, cosine, new, rate)
    trained(*whole, steps)
    model, made, schedule = built(sgd, cosine, new, rate)
    live = attach(model, made, scheduler=schedule)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    assert rates(made) == rates(whole[1])
    assert schedule.state_dict() == whole[2].state_dict()


def test_a_restart_in_the_middle_of_an_epoch_is_adapted_with_its_fraction():
    """W08: with warm restarts, ``scheduler.step(epoch + i / n)`` sets the position and counts nothing."""
    store, made = MemoryStore(), {}
    for period in (3, 5):
        model, optimizer, schedule = built(sgd, S.CosineAnnealingWarmRestarts, period)
        live = attach(model, optimizer, scheduler=schedule)
        optimizer.step()
        made[period] = (live, optimizer, schedule)
    made[3][2].step(3 + 2.25)
    made[3][0].advance(samples=1)
    save(made[3][0].capture(), store)
    live, optimizer, schedule = made[5]
    live.advance(samples=1)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    _, other, fresh = built(sgd, S.CosineAnnealingWarmRestarts, 5)
    fresh.step(5.25)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert schedule.T_cur == fresh.T_cur == 0.25


def test_a_plateau_keeps_what_it_has_seen_and_takes_the_new_settings():
    """W08: the rate follows from measurements, and no schedule can compute it again, so the saved rate continues."""
    store = MemoryStore()

    def plateau(patience):
        model = torch.nn.Linear(2, 1)
        optimizer = sgd(model)
        schedule = S.ReduceLROnPlateau(optimizer, patience=patience)
        return optimizer, schedule, attach(model, optimizer, scheduler=schedule)

    optimizer, schedule, live = plateau(1)
    for _ in range(4):
        optimizer.step()
        schedule.step(1.0)
        live.advance(samples=1)
    save(live.capture(), store)
    assert optimizer.param_groups[0]["lr"] < 0.1
    again, new, other = plateau(7)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match="patience: saved 1, wanted 7"):
        manager.restore(other)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(other)
    assert (new.patience, new.best, new.num_bad_epochs) == (7, 1.0, schedule.num_bad_epochs)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_another_class_of_scheduler_is_one_reason_and_adapts_at_the_count():
    """W08: its settings and its entries in the groups follow from it, and are not reported separately."""
    store = MemoryStore()
    stopped("cosine", 7, store)
    optimizer, scheduler, _, new, _ = CHANGES["one cycle of betas"]
    model, made, schedule = built(optimizer, scheduler, new)
    live = attach(model, made, scheduler=schedule)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused) as refused:
        manager.restore(live)
    assert {reason.where for reason in refused.value.refusal.reasons} == {
        "scheduler.kind",
        "optimizer.groups['bias'].initial_lr",
    }
    whole = built(optimizer, scheduler, new)
    trained(*whole, 7)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    assert rates(made) == rates(whole[1])
    assert schedule.state_dict() == whole[2].state_dict()


def test_what_another_class_left_in_the_groups_goes_with_it():
    """W08: the peak of a one-cycle schedule must not become the base rate of a cosine."""
    store = MemoryStore()
    stopped("one cycle", 7, store)
    _optimizer, scheduler, _, new, _ = CHANGES["cosine"]
    model, made, schedule = built(sgd, scheduler, new)
    live = attach(model, made, scheduler=schedule)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(live)
    assert "max_lr" not in made.param_groups[0]
    whole = built(sgd, scheduler, new)
    trained(*whole, 7)
    assert rates(made) == rates(whole[1])


def test_a_cycle_of_momentum_takes_the_first_beta_and_leaves_the_second_as_it_was_saved():
    """W08: a loop may set ``betas[1]`` itself, and no schedule changes that."""
    store = MemoryStore()
    optimizer, scheduler, old, new, _ = CHANGES["one cycle of betas"]
    model, made, schedule = built(optimizer, scheduler, old)
    live = attach(model, made, scheduler=schedule)
    trained(model, made, schedule, 5, live)
    group = made.param_groups[0]
    group["betas"] = (group["betas"][0], 0.95)
    save(live.capture(), store)
    whole = built(optimizer, scheduler, new)
    trained(*whole, 5)
    model, made, schedule = built(optimizer, scheduler, new)
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(attach(model, made, scheduler=schedule))
    assert made.param_groups[0]["betas"] == (whole[1].param_groups[0]["betas"][0], 0.95)


def test_two_schedulers_of_one_optimizer_are_stepped_in_turn():
    """W08: both change the rate, so both are replayed; a scheduler of another optimizer is left alone."""

    def make(gamma):
        model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        first, second = sgd(model), adam(other)
        schedulers = {
            "a": S.ExponentialLR(first, gamma),
            "b": S.MultiStepLR(first, [3]),
            "other": S.StepLR(second, 2),
        }
        return first, second, schedulers, attach(model, first, scheduler=schedulers, extra={"m": other, "o": second})

    def step(made, times):
        first, second, schedulers, live = made
        for _ in range(times):
            first.step()
            second.step()
            for each in schedulers.values():
                each.step()
            live.advance(samples=1)

    old, new, whole = make(0.9), make(0.8), make(0.8)
    step(old, 5)
    step(whole, 5)
    store = MemoryStore()
    save(old[3].capture(), store)
    with (
        CheckpointManager(store) as manager,
        pytest.raises(ResumeRefused, match=r"scheduler\['a'\].gamma: saved 0.9, wanted 0.8"),
    ):
        manager.restore(new[3])
    with CheckpointManager(store, policy={"contract:attached.scheduler['a'].gamma": "adapt"}) as manager:
        manager.restore(new[3])
    assert rates(new[0]) == rates(whole[0])
    assert rates(new[1]) == rates(old[1])
    assert {name: each.state_dict() for name, each in new[2].items()} == {
        n: each.state_dict() for n, each in whole[2].items()
    }


def test_a_scheduler_under_extra_is_compared_and_adapted_too():
    """W08: it is attached there too, alone or beside others."""

    def make(gamma):
        model = torch.nn.Linear(2, 1)
        optimizer = sgd(model)
        schedule = S.ExponentialLR(optimizer, gamma)
        return model, optimizer, schedule, attach(model, optimizer, extra={"decay": schedule})

    old, whole, new = make(0.9), make(0.5), make(0.5)
    trained(*old[:3], 4, old[3])
    trained(*whole[:3], 4)
    store = MemoryStore()
    save(old[3].capture(), store)
    with (
        CheckpointManager(store) as manager,
        pytest.raises(ResumeRefused, match=r"\[extra decay\].gamma: saved 0.9, wanted 0.5"),
    ):
        manager.restore(new[3])
    with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
        manager.restore(new[3])
    assert rates(new[1]) == rates(whole[1])
    assert new[2].state_dict() == whole[2].state_dict()


def test_schedulers_of_one_optimizer_that_were_not_stepped_alike_are_refused_and_nothing_is_changed():
    """V12: no state says in which order they were stepped."""

    def make(gamma):
        model = torch.nn.Linear(2, 1)
        optimizer = sgd(model)
        schedulers = [S.ExponentialLR(optimizer, gamma), S.StepLR(optimizer, 2)]
        return optimizer, schedulers, attach(model, optimizer, scheduler=schedulers)

    optimizer, schedulers, live = make(0.9)
    for count in range(4):
        optimizer.step()
        schedulers[0].step()
        if count % 2:
            schedulers[1].step()
        live.advance(samples=1)
    store = MemoryStore()
    save(live.capture(), store)
    optimizer, schedulers, live = make(0.5)
    before = copy.deepcopy([rates(optimizer), [each.state_dict() for each in schedulers]])
    with (
        CheckpointManager(store, policy={"scheduler": "adapt"}) as manager,
        pytest.raises(RestoreRefused, match="equally often"),
    ):
        manager.restore(live)
    assert [rates(optimizer), [each.state_dict() for each in schedulers]] == before
    assert live.progress.step == 0


def test_a_new_schedule_that_is_shorter_than_the_run_is_refused_and_nothing_is_changed():
    """V12, W08: a one-cycle schedule of 4 steps has no seventh."""
    store = MemoryStore()
    stopped("one cycle", 7, store)
    optimizer, scheduler, *_ = CHANGES["one cycle"]
    model, made, schedule = built(optimizer, scheduler, 4)
    live = attach(model, made, scheduler=schedule)
    before = copy.deepcopy([rates(made), schedule.state_dict()])
    with (
        CheckpointManager(store, policy={"scheduler": "adapt"}) as manager,
        pytest.raises(RestoreRefused, match="of at least 7 steps"),
    ):
        manager.restore(live)
    assert [rates(made), schedule.state_dict()] == before


def test_a_state_that_load_has_planned_is_adapted_by_live_restore_too():
    """W08: the policy is given to ``trainfold.load``; the state remembers what it allowed."""
    store = MemoryStore()
    stopped("cosine", 7, store)
    optimizer, scheduler, _, new, _ = CHANGES["cosine"]
    whole = built(optimizer, scheduler, new)
    trained(*whole, 7)
    model, made, schedule = built(optimizer, scheduler, new)
    live = attach(model, made, scheduler=schedule)
    live.restore(load(store, like=live.capture(), policy={"scheduler": "adapt"}))
    assert rates(made) == rates(whole[1])
    assert live.capture().origin.adapts == frozenset()


def test_without_a_change_nothing_is_refused_and_the_saved_rates_go_on():
    """W08: also if the loop has set a rate by hand."""
    for kind, (optimizer, scheduler, old, *_) in CHANGES.items():
        store = MemoryStore()
        stopped(kind, 5, store)
        live = attach(*(made := built(optimizer, scheduler, old))[:2], scheduler=made[2])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with CheckpointManager(store, policy={"scheduler": "adapt"}) as manager:
                manager.restore(live)
        whole = built(optimizer, scheduler, old)
        trained(*whole, 5)
        assert rates(made[1]) == rates(whole[1])


def warmup(step, total):
    return min(1.0, (step + 1) / total)


def closed_over(n):
    return lambda step: step / n


WARMUP = 4


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (lambda step: 0.5**step, lambda step: 0.6**step, "code"),
        (lambda step: warmup(step, 4), lambda step: warmup(step, 5), "code"),
        (functools.partial(warmup, total=4), functools.partial(warmup, total=9), "'total': 9"),
        (Stepped(4), Stepped(9), "'every': 9"),
        (closed_over(4), closed_over(9), "'n': 9"),
        (lambda step, n=4: step / n, lambda step, n=9: step / n, "'n': 9"),
    ],
    ids=["another constant", "another argument", "partial", "object", "closure", "default"],
)
def test_a_changed_function_is_a_warning_that_names_what_changed(old, new, said):
    """W08: only a function's code and what it reads can be compared, so a change is a warning; the policy ``refuse`` is stricter."""
    store, made = MemoryStore(), []
    for function in (old, new):
        model, optimizer, schedule = built(sgd, S.LambdaLR, function)
        made.append((attach(model, optimizer, scheduler=schedule), optimizer))
    live = made[0][0]
    live.advance(samples=1)
    save(live.capture(), store)
    with CheckpointManager(store) as manager, pytest.warns(ResumeDrift, match=said):
        manager.restore(made[1][0])
    with (
        CheckpointManager(store, policy={"schedule_function": "refuse"}) as manager,
        pytest.raises(ResumeRefused, match="schedule_function"),
    ):
        manager.restore(made[1][0])


def test_a_global_that_a_function_reads_is_compared(monkeypatch):
    """W08: such as ``WARMUP = 4`` at the top of a script."""
    store = MemoryStore()

    def make():
        model, optimizer, schedule = built(sgd, S.LambdaLR, lambda step: min(1.0, (step + 1) / WARMUP))
        return attach(model, optimizer, scheduler=schedule)

    live = make()
    live.advance(samples=1)
    save(live.capture(), store)
    monkeypatch.setitem(globals(), "WARMUP", 9)
    with CheckpointManager(store) as manager, pytest.warns(ResumeDrift, match="'WARMUP': 4.*'WARMUP': 9"):
        manager.restore(make())


def test_adapt_replays_a_recursive_function_and_a_warning_does_not():
    """W08: ``MultiplicativeLR`` continues from the saved rate; only ``adapt`` computes the rate again with the new function."""
    found = {}
    for verdict in ("warn", "adapt"):
        store = MemoryStore()
        model, optimizer, schedule = built(sgd, S.MultiplicativeLR, lambda _: 0.5)
        live = attach(model, optimizer, scheduler=schedule)
        trained(model, optimizer, schedule, 3, live)
        save(live.capture(), store)
        model, optimizer, schedule = built(sgd, S.MultiplicativeLR, lambda _: 0.9)
        live = attach(model, optimizer, scheduler=schedule)
        with warnings.catch_warnings(), CheckpointManager(store, policy={"scheduler": verdict}) as manager:
            warnings.simplefilter("ignore")
            manager.restore(live)
        found[verdict] = optimizer.param_groups[0]["lr"]
    assert math.isclose(found["warn"], 0.1 * 0.5**3)
    assert math.isclose(found["adapt"], 0.1 * 0.9**3)


def test_a_checkpoint_that_says_nothing_of_settings_is_resumed_as_before():
    """V09: checkpoints of earlier versions have only ``scheduler.kind``."""
    store = MemoryStore()
    optimizer, scheduler, old, new, _ = CHANGES["cosine"]
    model, made, schedule = built(optimizer, scheduler, old)
    live = attach(model, made, scheduler=schedule)
    live.advance(samples=1)
    state = live.capture()
    kept = {key: value for key, value in state.contract.items() if not key.startswith("attached.scheduler")}
    save(state.evolve(contract=kept), store)
    other = attach(*(again := built(optimizer, scheduler, new))[:2], scheduler=again[2])
    with CheckpointManager(store) as manager:
        manager.restore(other)
    assert other.progress.step == 1
