"""Schedulers that a live run finds or misses, and parameters that are frozen in turn."""

import copy
from functools import partial

import pytest
import torch
from kit.adapters.live.live_contract_cases import (
    Heads,
    Homemade,
    check_resumes,
    one_step,
    scheduled,
    scheduled_step,
    two_optimizers,
)
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs import api as runs
from trainfold.backends.runs import load as run_load
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HiddenState, InvalidArgument, RestoreRefused, ResumeRefused


def test_an_object_that_may_hold_the_scheduler_and_does_not_save_it_is_warned_of_after_the_resume():
    """V08, W07: at the attach this cannot be proved; the first change after a resume proves it."""

    def run():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return attach(model, optimizer, extra={"mine": Homemade()}), partial(
            scheduled_step, model, optimizer, scheduler
        )

    store = MemoryStore()
    live, step = run()
    with CheckpointManager(store) as manager:
        for _ in range(4):
            step()
            live.advance(samples=1)
        manager.save(live)
    live, step = run()
    with CheckpointManager(store) as manager:
        manager.restore(live)
        step()
        with pytest.warns(HiddenState, match="the schedule restarts at a resume"):
            live.advance(samples=1)


def test_a_composite_scheduler_of_two_optimizers_that_shows_one_stands_for_both(caplog):
    class Both(Homemade):
        def __init__(self, *schedulers):
            self.schedulers, self.optimizer = schedulers, schedulers[0].optimizer

    model, optimizer, scheduler = scheduled()
    other, second, theirs = scheduled()
    attach(model, optimizer, scheduler=Both(scheduler, theirs), extra={"other": other, "second": second})
    assert not caplog.records


def test_initial_lr_in_a_loaded_optimizer_state_is_no_scheduler_and_the_rate_is_compared(caplog):
    """V08: a warm start from a run with a scheduler."""

    def warm(lr):
        model, optimizer, _ = scheduled()
        again = torch.optim.SGD(model.parameters(), lr=0.1)
        again.load_state_dict(optimizer.state_dict())
        for group in again.param_groups:
            group["lr"] = lr
        live = attach(model, again)
        live.advance(samples=1)
        return live

    with CheckpointManager(MemoryStore()) as manager:
        manager.save(warm(0.1))
        assert not manager.restore(warm(0.1)).is_fresh
        with pytest.raises(ResumeRefused, match=r"optimizer\.groups\['bias'\]\.lr: saved 0.1, wanted 0.2"):
            manager.restore(warm(0.2))
    assert "scheduler" not in caplog.text


def test_a_scheduler_that_has_been_used_before_the_run_is_attached_may_be_done_with(caplog):
    """As after a search for a learning rate: the rate set by the script afterwards is compared."""
    model, optimizer, scheduler = scheduled()
    one_step(model, optimizer)
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 0.05
    live = attach(model, optimizer)
    live.advance(samples=1)
    assert not caplog.records
    assert live.contract()["optimizer.groups['bias'].lr"] == 0.05


def test_what_a_restore_writes_into_the_groups_is_no_scheduler(caplog):
    """Finetuning from a scheduled run, and a policy that drops the scheduler."""
    store = MemoryStore()
    model, optimizer, scheduler = scheduled()
    live = attach(model, optimizer, scheduler=scheduler)
    optimizer.step()
    scheduler.step()
    live.advance(samples=1)
    with CheckpointManager(store) as manager:
        manager.save(live)
    again, _ = without_scheduler()
    again.restore(live.capture(), components=["model", "optimizer", "scheduler", "trainer"])
    assert again.advance(samples=1).step == 2
    again, optimizer = without_scheduler()
    with CheckpointManager(store, policy={"hyperparameters": "adapt"}) as manager:
        manager.restore(again)
        assert again.advance(samples=1).step == 2
        assert optimizer.param_groups[0]["lr"] == 0.1  # the script's
        assert "initial_lr" not in optimizer.param_groups[0]  # nor what the scheduler left there
        manager.save(again)
    with CheckpointManager(store) as manager:
        assert not manager.restore(without_scheduler()[0]).is_fresh  # and from then on there is nothing to let pass
    assert "attach it" not in caplog.text


def without_scheduler():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(model, optimizer), optimizer


def test_a_scheduler_made_after_the_run_was_attached_leaves_the_rate_compared():
    live, optimizer = without_scheduler()
    before = live.contract()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    live.capture()  # there is time to register it until the first step
    optimizer.step()
    with pytest.raises(InvalidArgument, match=r"live\.advance.*extra="):
        live.advance(samples=1)
    live.register("schedule", scheduler)
    assert live.advance(samples=1).step == 1
    assert live.contract() == before
    assert before["optimizer.groups['bias'].lr"] == 0.1


def test_a_scheduler_that_was_made_after_the_restore_is_refused_at_the_next_one():
    """B12: making it overwrites the restored rate; if it is registered before the restore, the rate is right."""

    def begun(manager, *, is_late):
        live, optimizer = without_scheduler()
        if is_late:
            manager.restore(live)
        live.register("schedule", torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
        if not is_late:
            manager.restore(live)
        optimizer.step()
        live._objects.extra["schedule"].step()
        live.advance(samples=1)
        manager.save(live)
        return optimizer.param_groups[0]["lr"]

    with CheckpointManager(MemoryStore()) as manager:
        assert begun(manager, is_late=True) == 0.05
        with pytest.raises(ResumeRefused, match=r"initial_lr: saved 0\.1, wanted nothing"):
            begun(manager, is_late=True)
    with CheckpointManager(MemoryStore()) as manager:
        assert [begun(manager, is_late=False) for _ in range(3)] == [0.05, 0.025, 0.0125]


def test_an_optimizer_around_another_one_resumes_with_the_scheduler_of_that():
    """The outer optimizer shares groups and state, and was not made by ``Optimizer.__init__``."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state

        def step(self):
            self.inner.step()

        def zero_grad(self):
            self.inner.zero_grad()

    def build():
        model, inner, scheduler = scheduled(momentum=0.9)
        optimizer = Around(inner)
        live = attach(model, optimizer, scheduler=scheduler)
        return live, partial(scheduled_step, model, optimizer, scheduler)

    check_resumes(build, steps=5, deaths=(3,))


# --- hyperparameters of other optimizers -----------------------------------------------------------------------------


def test_hyperparameters_of_every_optimizer_are_compared():
    """V08: a learning rate, a weight decay, and the base of a scheduler."""

    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    for schedule, changes, reason in [
        (None, {"lr": 0.5}, r"attached\.second\.groups\['other\.bias'\]\.lr: saved 0.1, wanted 0.5"),
        (None, {"weight_decay": 0.3}, "weight_decay: saved 0.0, wanted 0.3"),
        (halving, {"lr": 0.5}, "initial_lr: saved 0.1, wanted 0.5"),
    ]:
        with CheckpointManager(MemoryStore()) as manager:
            live, _, other = two_optimizers(schedule=schedule)
            other(torch.ones(1, 2)).sum().backward()
            live._objects.extra["second"].step()
            if schedule is not None:
                live._objects.scheduler.schedulers.step()
            live.advance(samples=1)
            manager.save(live)
            assert not manager.restore(two_optimizers(schedule=schedule)[0]).is_fresh
            changed = two_optimizers(schedule=schedule, **changes)[0]
            with pytest.raises(ResumeRefused, match=reason):
                manager.restore(changed)
            reset = ["second"] if schedule is None else ["second", "scheduler"]
            assert not manager.restore(changed, reset=dict.fromkeys(reset, "another rate on purpose")).is_fresh


# --- frozen parameters -----------------------------------------------------------------------------------------------


def partly_frozen(frozen):
    model = Heads()
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    return attach(model, torch.optim.SGD(list(model.parameters()), lr=0.1)), model


def test_another_set_of_frozen_parameters_is_refused_by_name():
    """V08: the script's initial set is compared. Later changes by the loop are not."""
    with CheckpointManager(MemoryStore()) as manager:
        live, model = partly_frozen(["trunk"])
        model.requires_grad_(requires_grad=True)
        live.advance(samples=1)
        manager.save(live)
        with pytest.raises(ResumeRefused, match=r"frozen: saved \['trunk\.bias', 'trunk\.weight'\], wanted \[\]"):
            manager.restore(partly_frozen([])[0])
        assert not manager.restore(partly_frozen(["trunk"])[0]).is_fresh


def test_a_loop_that_unfreezes_by_the_step_resumes_exactly():
    """C01: gradual unfreezing, resumed by a script that starts with the initial set frozen."""

    def build():
        live, model = partly_frozen(["trunk"])

        def step():
            model.trunk.requires_grad_(live.progress.step >= 4)
            live._objects.optimizer.zero_grad()
            model(torch.randn(2, 3), 0).square().mean().backward()
            live._objects.optimizer.step()

        return live, step

    check_resumes(build, steps=8, deaths=(3, 4, 6))


def test_a_gan_in_one_module_that_freezes_its_critic_in_turn_resumes_exactly():
    """C01: saved while the critic is frozen, resumed in objects where it is not frozen yet."""

    def build():
        model = nn.ModuleDict({"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)})
        main = torch.optim.Adam(model["generator"].parameters(), lr=0.1)
        second = torch.optim.Adam(model["critic"].parameters(), lr=0.1)
        live = attach(model, main, extra={"second": second})

        def step():
            made = model["generator"](torch.randn(4, 2))
            model["critic"].requires_grad_(requires_grad=True)
            second.zero_grad()
            model["critic"](made.detach()).mean().backward()
            second.step()
            model["critic"].requires_grad_(requires_grad=False)
            main.zero_grad()
            (-model["critic"](made).mean()).backward()
            main.step()

        return live, step

    check_resumes(build, steps=4, deaths=(2,))


def test_what_was_frozen_before_and_is_frozen_now_resumes():
    with CheckpointManager(MemoryStore()) as manager:
        live, _ = partly_frozen(["trunk"])
        live.advance(samples=1)
        manager.save(live)
        assert not manager.restore(partly_frozen(["trunk"])[0]).is_fresh


def test_a_policy_may_let_another_set_of_frozen_parameters_pass():
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        live, _ = partly_frozen([])
        live.advance(samples=1)
        manager.save(live)
    with (
        CheckpointManager(store, policy={"contract:attached.optimizer.frozen": "warn"}) as manager,
        pytest.warns(run_load.ResumeDrift, match="frozen"),
    ):
        assert not manager.restore(partly_frozen(["heads.0"])[0]).is_fresh


def test_weights_without_their_optimizer_may_be_frozen_otherwise():
    """As in finetuning, and in an evaluation that attaches no optimizer."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        live, _ = partly_frozen([])
        live.advance(samples=1)
        manager.save(live)
    with CheckpointManager(store, components=["model"]) as manager:
        assert not manager.restore(partly_frozen(["trunk"])[0]).is_fresh
    with CheckpointManager(store) as manager:
        model = Heads().requires_grad_(requires_grad=False)
        assert not manager.restore(attach(model)).is_fresh


def test_many_frozen_parameters_are_told_apart_by_a_digest():
    def many(number):
        model = nn.ParameterList([nn.Parameter(torch.zeros(1), requires_grad=i < 1) for i in range(number)])
        return attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).contract()["attached.optimizer.frozen"]

    assert len(many(500)) < 70
    assert many(500) == many(500)
    assert many(500) != many(501)


# --- checkpoints that say nothing of all this ------------------------------------------------------------------------


def test_an_older_checkpoint_that_says_nothing_of_this_still_resumes():
    """R10: frozen parameters, another optimizer, gradients: unsaved values are not compared and stay unchanged."""
    store = MemoryStore()
    live, model, _ = two_optimizers()
    model.weight.requires_grad_(requires_grad=False)
    model.bias.grad = torch.ones(1)
    live.advance(samples=1)
    state = live.capture()
    older = {key: value for key, value in state.contract.items() if not key.startswith("attached.")}
    optimizer = copy.copy(state.optimizer)
    runs.save(state.evolve(contract=older, optimizer=type(optimizer)(**_before(optimizer))), store)
    again, model, _ = two_optimizers(lr=0.7)
    model.weight.requires_grad_(requires_grad=False)
    with CheckpointManager(store) as manager:
        assert not manager.restore(again).is_fresh
    assert model.bias.grad is None


def _before(optimizer):
    return {name: getattr(optimizer, name) for name in ("kind", "slots", "groups", "masters")}


# --- names -----------------------------------------------------------------------------------------------------------


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        del state


def test_an_extra_cannot_have_the_name_of_the_extra_state_of_modules():
    """B18: it would be replaced silently."""
    with pytest.raises(InvalidArgument, match=r"extra\['module_extra_state'\].*another name"):
        attach(WithExtraState(1, 1), extra={"module_extra_state": nn.Linear(1, 1)})
    attach(nn.Linear(1, 1), extra={"module_extra_state": nn.Linear(1, 1)})


def test_a_component_that_is_registered_and_does_not_fit_is_not_registered():
    live, _, _ = two_optimizers()
    live.advance(samples=1)
    again = attach(nn.Linear(2, 1), None)
    again.restore(live.capture(), components=["model", "other", "trainer", "rng"])
    with pytest.raises(RestoreRefused):
        again.register("other", nn.Linear(3, 1))
    assert again.pending == ("other",)
