"""A resume restores which parameters the loop had frozen or unfrozen (W07)."""

import copy

import pytest
import torch
from torch import nn

from trainfold import CheckpointManager
from trainfold.adapters.live.attach import attach


def start(frozen=(), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    for place in frozen:
        model[place].requires_grad_(False)
    return attach(model, torch.optim.Adam(model.parameters(), lr=0.1), **options)


def train(live, steps, change, manager=None):
    """Train until a step; returns the losses and the states."""
    losses, states = [], []
    (model,), optimizer = live.modules, live.optimizers["optimizer"]
    while live.progress.step < steps:
        change(model, live.progress.step)
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        live.advance(samples=2)
        states.append(copy.deepcopy(live.capture()))
        if manager:
            manager.step(live)
    return losses, states


def once(model, step):
    if step == 3:
        model[0].requires_grad_(True)


def condition(model, step):
    model[0].requires_grad_(step >= 3)


def in_turns(model, step):
    model[0].requires_grad_(step % 2 == 0)
    model[1].requires_grad_(step % 2 == 1)


def two_stages(model, step):
    if step == 3:
        model[0].requires_grad_(True)
    if step == 5:
        model[1].requires_grad_(True)


@pytest.mark.parametrize("change", [once, condition, in_turns, two_stages])
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1)])
def test_a_layer_that_is_frozen_or_unfrozen_on_the_way_is_so_again_after_a_resume_at_any_step(change, frozen):
    """Once at a step, or in each step: the resumed run has the bits of the uninterrupted one."""
    whole, states = train(start(frozen), 8, change)
    for cut in range(1, 8):
        live = start(frozen, strict=True)
        live.restore(states[cut - 1])
        assert train(live, 8, change)[0] == whole[cut:], cut


def test_what_is_put_back_is_said_by_name_and_comes_from_the_checkpoint(tmp_path, caplog):
    for steps in (5, 7):
        live = start((0,))
        with CheckpointManager(tmp_path, every=1, at_end=False) as manager, caplog.at_level("WARNING", "trainfold"):
            manager.restore(live)
            assert steps != 7 or live.modules[0][0].weight.requires_grad
            train(live, steps, once, manager)
            assert live.contract()["requires_grad"] == {"model.0.bias": True, "model.0.weight": True}
    said = [each.getMessage() for each in caplog.records if "requires_grad" in each.getMessage()]
    assert len(said) == 1
    assert "model.0.weight (trained)" in said[0]


def test_a_loop_that_sets_it_otherwise_has_its_way_and_what_is_not_loaded_is_left():
    state = train(start((0,)), 5, once)[1][-1]
    live = start((0,))
    live.restore(state)
    live.modules[0].requires_grad_(False)
    assert live.contract()["requires_grad"] == {
        f"model.{each}.{kind}": False for each in (1, 2) for kind in ("weight", "bias")
    }
    live = start((0,))
    live.restore(state, components=["trainer"])
    assert not live.modules[0][0].weight.requires_grad


def test_modules_under_extra_are_put_back_too():
    def run(critic):
        live = attach(nn.Linear(3, 1), extra={"critic": critic})
        live.register("late", nn.Linear(1, 1))
        return live

    critic = nn.Linear(3, 1)
    live = run(critic)
    critic.bias.requires_grad_(False)
    live.advance(samples=1)
    state = live.capture()
    other = nn.Linear(3, 1)
    run(other).restore(state)
    assert (other.weight.requires_grad, other.bias.requires_grad) == (True, False)


@pytest.mark.parametrize("said", [7, {"model.weight": "no"}, {"model.gone": True}, {"model.count": True}])
def test_a_note_that_no_trainfold_has_written_changes_nothing(said):
    model = nn.Linear(3, 1)
    model.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    live = attach(model)
    live.restore(live.capture().evolve(contract={"requires_grad": said}))
    assert model.weight.requires_grad
    assert not model.count.requires_grad
