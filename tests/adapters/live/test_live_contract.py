"""What a resume restores beside values: which gradients exist, which parameters are frozen, what each scheduler drives."""

from functools import partial

import pytest
import torch
from kit.adapters.live.live_contract_cases import (
    Heads,
    Homemade,
    check_resumes,
    scheduled,
    scheduled_step,
    two_optimizers,
)
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.core.errors import IncompleteWindow, InvalidArgument
from trainfold.core.format.fingerprint import fingerprint

OPTIMIZERS = {
    "decay without slots": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("zero", ["before, to zero", "after, to zero", "before, to none", "after, to none"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_head_that_rests_is_moved_after_a_resume_as_it_would_have_been(optimizer, zero):
    """C01: with a gradient of zeros, weight decay and momentum still apply; without a gradient, the step skips the parameter."""

    def build():
        model = Heads()
        sgd = optimizer(model.parameters())
        live = attach(model, sgd)

        def step():  # three for each head in turn
            if zero.startswith("before"):
                sgd.zero_grad(set_to_none=zero.endswith("none"))
            model(torch.randn(2, 3), live.progress.step // 3 % 2).square().mean().backward()
            sgd.step()
            if zero.startswith("after"):
                sgd.zero_grad(set_to_none=zero.endswith("none"))

        return live, step

    check_resumes(build, steps=12, deaths=(2, 4, 7))


def test_a_restore_leaves_zeros_where_a_gradient_was_and_none_where_there_was_none():
    """In every module and optimizer; the values of gradients are not saved."""
    live, model, other = two_optimizers()
    model.weight.grad, other.bias.grad = torch.ones(1, 2), torch.ones(1)
    live.advance(samples=1)
    state = live.capture()
    again, model, other = two_optimizers()
    for parameter in [*model.parameters(), *other.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    again.advance(samples=1)
    again.restore(state)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert torch.equal(other.bias.grad, torch.zeros(1))
    assert model.bias.grad is other.weight.grad is None
    again.capture()  # it is a boundary


def test_a_restore_clears_gradients_that_no_optimizer_has():
    """A model restored in the middle of a run, for evaluation or after a spike, begins its next window empty."""
    model = nn.Linear(2, 1)
    live = attach(model)
    state = live.capture()
    model.weight.grad = torch.ones(1, 2)
    live.advance(samples=1)
    live.restore(state)
    assert model.weight.grad is None


def test_gradients_do_not_show_in_a_fingerprint():
    """They are not leaves: a run that clears to zero and one that clears to None have the same bits."""
    live, model, _ = two_optimizers()
    before = fingerprint(live.capture())
    model.weight.grad = torch.zeros(1, 2)
    assert fingerprint(live.capture()) == before


def test_a_sparse_gradient_does_not_come_back_dense():
    model = nn.Embedding(4, 2, sparse=True)
    live = attach(model, torch.optim.SparseAdam(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    live.advance(samples=1)
    live.restore(live.capture())
    assert model.weight.grad is None


def test_a_gan_that_steps_its_second_optimizer_now_and_then_resumes_exactly():
    """Both within one advance, the second every third time only."""

    def build():
        generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
        main = torch.optim.Adam(generator.parameters(), lr=0.1)
        second = torch.optim.Adam(critic.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (main, second)]
        live = attach(generator, main, scheduler=schedulers, extra={"critic": critic, "second": second})

        def step():
            if live.progress.step % 3 == 0:
                second.zero_grad()
                critic(generator(torch.randn(4, 2)).detach()).mean().backward()
                second.step()
            main.zero_grad()
            (-critic(generator(torch.randn(4, 2))).mean()).backward()
            main.step()
            for scheduler in schedulers:
                scheduler.step()

        return live, step

    check_resumes(build, steps=10, deaths=(4, 6, 8))


# --- boundaries ------------------------------------------------------------------------------------------------------


def test_a_step_that_was_not_counted_is_an_open_window():
    """A06: with no gradient left to see."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    optimizer.step()
    with pytest.raises(IncompleteWindow, match=r"optimizer steps since the last advance\(\): 1 of optimizer"):
        live.capture()
    live.advance(samples=1)
    live.capture()


def test_the_optimizers_and_modules_among_the_extras_are_watched_too():
    """A06: a critic in the middle of its window, and one that has stepped where the generator has not."""
    live, _, other = two_optimizers()
    other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()
    live._objects.extra["second"].step()
    with pytest.raises(IncompleteWindow, match="1 of second"):
        live.capture()
    live.advance(samples=1)
    live.capture()


def test_what_is_registered_later_is_watched_from_then_on():
    live = attach(nn.Linear(2, 1))
    other = nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    live.register("other", other)
    live.register("second", second)
    live.capture()
    other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()
    second.step()
    with pytest.raises(IncompleteWindow, match="1 of second"):
        live.capture()
    live.drop_window()
    assert other.weight.grad is None
    live.capture()


# --- schedulers ------------------------------------------------------------------------------------------------------


def test_a_forgotten_scheduler_is_refused_when_the_run_is_attached():
    """B12: a resume would go on with the saved rate and a scheduler at its beginning."""
    model, optimizer, _ = scheduled()
    with pytest.raises(InvalidArgument, match=r"attach\.scheduler.*optimizer.*scheduler="):
        attach(model, optimizer)


def test_a_scheduler_may_be_among_the_extras():
    model, optimizer, scheduler = scheduled()
    live = attach(model, optimizer, extra={"schedule": scheduler})
    assert live.contract()["optimizer.groups['bias'].lr"] == "live"
    pair = (scheduler.state_dict, scheduler.load_state_dict)
    assert attach(model, optimizer, extra={"schedule": pair}).contract() == live.contract()


def test_the_scheduler_of_another_optimizer_does_not_stand_for_it():
    model, optimizer, _ = scheduled()
    other, second, theirs = scheduled()
    with pytest.raises(InvalidArgument, match=r"attach\.scheduler.*of optimizer"):
        attach(model, optimizer, scheduler=theirs, extra={"other": other, "second": second})
    with pytest.raises(InvalidArgument, match=r"attach\.scheduler.*of second"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"other": other, "second": second})


def test_a_scheduler_whose_optimizer_is_not_known_is_taken_at_its_word():
    model, optimizer, _ = scheduled()
    assert attach(model, optimizer, scheduler=Homemade()).contract()["optimizer.groups['bias'].lr"] == "live"
    model, optimizer, _ = scheduled()
    with pytest.raises(InvalidArgument, match="scheduler="):
        attach(
            model, optimizer, extra={"scaler": torch.amp.GradScaler("cpu")}
        )  # has step() and a state, but is not a scheduler
    teacher = Heads()
    with pytest.raises(InvalidArgument, match="scheduler="):
        attach(model, optimizer, extra={"teacher": (teacher.state_dict, teacher.load_state_dict)})


class Trainer:
    """A user's own object, with a scheduler inside."""

    def __init__(self, scheduler):
        self.inside = scheduler

    def state_dict(self):
        return {"best": [0.0], "inside": [self.inside.state_dict()]}

    def load_state_dict(self, state):
        self.inside.load_state_dict(state["inside"][0])


COVERS = {
    "object": Trainer,
    "lambdas": lambda scheduler: (
        lambda: {"it": scheduler.state_dict()},
        lambda state: scheduler.load_state_dict(state["it"]),
    ),
    "partials": lambda scheduler: (partial(scheduler.state_dict), partial(scheduler.load_state_dict)),
}


@pytest.mark.parametrize("cover", COVERS.values(), ids=COVERS)
def test_a_scheduler_inside_an_object_or_behind_functions_resumes_exactly(cover, caplog):
    """B12: there is no warning, because its state is part of theirs."""

    def build():
        model, optimizer, scheduler = scheduled(momentum=0.9)
        live = attach(model, optimizer, extra={"mine": cover(scheduler)})
        return live, partial(scheduled_step, model, optimizer, scheduler)

    check_resumes(build, steps=5, deaths=(3,))
    assert "scheduler" not in caplog.text
