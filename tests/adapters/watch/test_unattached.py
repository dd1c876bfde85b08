"""An unattached optimizer that steps parameters of a live run is refused at the next boundary (W13)."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import InvalidState, UnattachedOptimizer


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model[0].parameters(), lr=0.1)


def step(model, *optimizers):
    model(torch.ones(2, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class Wrapper(torch.optim.Optimizer):
    """Contains another optimizer and calls its step, like Lookahead and SAM."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_a_second_optimizer_that_is_not_attached_is_refused_by_name():
    """W13: the class and the parameters that it steps are named."""
    model, first = make()
    second = torch.optim.Adam(model[1].parameters())
    live = attach(model, first)
    step(model, first, second)
    with pytest.raises(
        UnattachedOptimizer, match=r"1 by a torch\.optim\.adam\.Adam on 1\.weight, 1\.bias.*live\.register"
    ):
        live.advance(samples=2)
    assert live.progress.step == 0
    with pytest.raises(UnattachedOptimizer):  # a save by hand, at what should be a boundary
        live.capture()
    live.register("second", second)
    live.advance(samples=2)


def test_a_run_without_its_optimizer_is_refused():
    """W11: attach was called without the optimizer."""
    model, optimizer = make()
    live = attach(model)
    step(model, optimizer)
    with pytest.raises(UnattachedOptimizer, match=r"attach\(model, optimizer\)") as refused:
        live.advance(samples=2)
    assert isinstance(refused.value, InvalidState)


def test_the_optimizer_of_another_model_is_nobodys_business():
    model, optimizer = make()
    other = nn.Linear(3, 1)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    live, beside = attach(model, optimizer), attach(other, elsewhere)
    for _ in range(2):
        step(model, optimizer)
        step(other, elsewhere)
        live.advance(samples=2)
        beside.advance(samples=2)


def test_an_optimizer_that_comes_to_parameters_of_the_run_later_is_seen():
    model, optimizer = make()
    later = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    live = attach(model, optimizer)
    step(model, optimizer, later)
    live.advance(samples=2)
    later.add_param_group({"params": list(model[1].parameters())})
    step(model, optimizer, later)
    with pytest.raises(UnattachedOptimizer):
        live.advance(samples=2)


LATER = []


@pytest.mark.parametrize(
    "extra",
    [
        lambda second: {"second": second},
        lambda second: {"second": (second.state_dict, second.load_state_dict)},
        lambda second: {
            "second": (lambda: {"state": second.state_dict()}, lambda state: second.load_state_dict(state["state"]))
        },
        lambda second: {"second": (lambda: [each.state_dict() for each in LATER], lambda state: None)},
        lambda second: {"loop": Trainer(second)},
    ],
)
def test_an_optimizer_whose_state_somebody_attached_may_save_is_fine(extra):
    model, first = make()
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    LATER[:] = [second]
    live = attach(model, first, extra=extra(second))
    step(model, first, second)
    live.advance(samples=2)


class Trainer:
    def __init__(self, optimizer):
        self.optimizers = [optimizer]

    def state_dict(self):
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_the_inner_optimizer_of_an_attached_wrapper_is_fine_and_a_wrapper_around_an_attached_one_is_not():
    model, first = make()
    wrapper = Wrapper(first)
    inside, outside = attach(model, wrapper), attach(model, first)
    step(model, wrapper)
    inside.advance(samples=2)
    with pytest.raises(UnattachedOptimizer, match="Wrapper"):
        outside.advance(samples=2)


def test_a_scheduler_that_is_attached_does_not_save_its_optimizer():
    model, first = make()
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    live = attach(model, first, extra={"schedule": torch.optim.lr_scheduler.StepLR(second, 1)})
    step(model, first, second)
    with pytest.raises(UnattachedOptimizer):
        live.advance(samples=2)


def test_an_optimizer_that_was_thrown_away_before_the_boundary_leaves_nothing_to_save():
    """As after a search for a learning rate."""
    model, first = make()
    live = attach(model, first)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    gc.collect()
    step(model, first)
    live.advance(samples=2)


def test_what_watches_the_steps_goes_with_its_run_and_torch_keeps_one_hook():
    attach(*make())
    before = len(hooks)
    model, optimizer = make()
    live = attach(model, optimizer)
    gone = weakref.ref(live)
    step(model, optimizer)
    live.advance(samples=2)
    del live
    gc.collect()
    assert gone() is None
    assert len(hooks) == before
    step(model, optimizer)


def test_a_run_that_is_collected_in_a_step_does_not_break_that_step():
    """A hook that is removed while torch calls the hooks breaks the step."""
    model, optimizer = make()
    runs = [attach(*make())]
    late = register_optimizer_step_post_hook(lambda *_: None)
    early = optimizer.register_step_post_hook(lambda *_: (runs.clear(), gc.collect()))
    step(model, optimizer)
    early.remove()
    late.remove()


def test_the_step_of_the_functional_core_is_nobodys_business():
    model, _ = make()
    live = attach(model)
    adam = trainfold.optimizer(torch.optim.Adam, lr=0.1)
    state = trainfold.init_state(model, adam)
    run = trainfold.make_step(model, lambda m, b: trainfold.Loss(sum=m(b).sum(), weight=len(b)), adam)
    run(state, torch.ones(2, 3))
    live.advance(samples=2)
