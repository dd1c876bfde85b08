"""What accelerate has wrapped is attached as what it wraps, and its windows are seen."""

import types

import pytest
import torch

import trainfold
from trainfold.adapters.script.accelerate_wrappers import unwrapped


class Window:
    """accelerate's ``GradientState``."""

    def __init__(self):
        self.sync_gradients = True


class AcceleratedOptimizer(torch.optim.Optimizer):
    """What the class of accelerate 1.15 does: it never calls the ``__init__`` of torch's."""

    def __init__(self, optimizer, window, scaler=None):
        self.optimizer, self.gradient_state, self.scaler = optimizer, window, scaler

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def step(self):
        if self.gradient_state.sync_gradients:
            self.optimizer.step()


class AcceleratedScheduler:
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


AcceleratedOptimizer.__module__, AcceleratedScheduler.__module__ = "accelerate.optimizer", "accelerate.scheduler"


def made(scaler=None):
    torch.manual_seed(0)
    model, window = torch.nn.Linear(2, 1), Window()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = AcceleratedOptimizer(optimizer, window, scaler), AcceleratedScheduler(scheduler)
    return types.SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, wrapped=wrapped, window=window)


def stepped(run, live):
    run.model(torch.ones(1, 2)).sum().backward()
    run.optimizer.step()
    run.scheduler.step()
    live.advance()
    return live.capture()


def test_a_run_of_wrappers_is_that_of_what_they_wrap():
    """So a run of a loop with accelerate is gone on with by one without, and weights and moments have their names."""
    plain, other = made(), made()
    one = stepped(plain, trainfold.attach(plain.model, plain.optimizer, scheduler=plain.scheduler))
    live = trainfold.attach(other.model, other.wrapped[0], scheduler=other.wrapped[1])
    assert stepped(other, live).contract == one.contract
    assert list(live.capture().optimizer.slots) == ["weight", "bias"]
    live.restore(one)
    assert trainfold.fingerprint(live.capture()) == trainfold.fingerprint(one)


def test_wrappers_under_extra_and_registered_later_are_unwrapped():
    main, second, third = made(), made(), made()
    live = trainfold.attach(main.model, main.optimizer, scheduler={"main": main.scheduler, "second": second.wrapped[1]},
                            extra={"critic": second.model, "second": second.wrapped[0]})  # fmt: skip
    live.register("third_model", third.model)
    live.register("third", third.wrapped[0])
    attached = live.attached()
    assert attached["second"] is second.optimizer
    assert attached["third"] is third.optimizer
    assert unwrapped(main.model) is main.model
    second.window.sync_gradients = False
    assert live.is_in_window
    second.window.sync_gradients, third.window.sync_gradients = True, False
    assert live.is_in_window  # of one that was registered, too
    third.window.sync_gradients = True
    assert not live.is_in_window


def test_a_window_of_accumulate_counts_no_step_and_saves_nothing(tmp_path):
    """`live.advance()` and `manager.step(live)` after each batch are right, whatever `accumulate` does."""
    run = made()
    live = trainfold.attach(run.model, run.wrapped[0], scheduler=run.wrapped[1])
    with trainfold.CheckpointManager(str(tmp_path / "a"), every=1) as manager:
        manager.restore(live)
        saved = []
        for number in range(4):
            run.window.sync_gradients = number % 2 == 1
            run.model(torch.ones(1, 2)).sum().backward()
            run.wrapped[0].step()
            if run.window.sync_gradients:
                run.scheduler.step()
            live.advance()
            assert live.is_in_window != run.window.sync_gradients
            saved.append(manager.step(live))
    assert [each and each.step for each in saved] == [None, 1, None, 2]
    run.window.sync_gradients = False
    with pytest.raises(trainfold.errors.IncompleteWindow, match=r"inside a window of accelerator\.accumulate"):
        live.advance(steps=1)


def test_a_gradient_scaler_that_is_not_attached_is_refused():
    scaler = torch.amp.GradScaler("cpu")
    run = made(scaler)
    with pytest.raises(trainfold.errors.InvalidArgument, match=r'extra=\{"scaler": accelerator.scaler\}'):
        trainfold.attach(run.model, run.wrapped[0], scheduler=run.wrapped[1])
    live = trainfold.attach(run.model, run.wrapped[0], scheduler=run.wrapped[1], extra={"scaler": scaler})
    assert live.names == ("scaler",)
    plain, critic = made(), torch.nn.Linear(2, 1)
    live = trainfold.attach(plain.model, plain.optimizer, scheduler=plain.scheduler, extra={"critic": critic})
    with pytest.raises(trainfold.errors.InvalidArgument, match="the gradient scaler of the optimizer"):
        live.register("its optimizer", AcceleratedOptimizer(torch.optim.AdamW(critic.parameters()), Window(), scaler))
    assert live.names == ("critic",)
