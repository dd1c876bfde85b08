"""A run that is changed on purpose: what the refusal says to type, and that it does what it says (3.3, 3.4 of the issue)."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization import PerChannelMinMaxObserver

from trainfold.adapters.live.live import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.memory import MemoryStore
from trainfold.backends.runs import load, plan, save
from trainfold.core.errors import RestoreRefused, ResumeRefused
from trainfold.core.inventory import Problem
from trainfold.core.policy import KINDS, RECIPES, check_policy, make_drift
from trainfold.core.resume_plan import Refusal

PAGE = "docs/how-to/change-a-run.md"


def refused(*kinds):
    return Refusal(
        "r", "step-1", tuple(make_drift(kind, f"key.{kind}", saved=1, wanted=2, policy={}) for kind in kinds)
    )


@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6))
def test_a_refusal_says_the_policy_to_type_where_one_helps_and_none_where_none_does(kinds):
    """R09: what it says can be typed, and lets all of that pass which can; what cannot is named, to be put back."""
    fix = refused(*kinds).fix
    helped = [kind for kind in kinds if "adapt" in KINDS[kind][1]]
    typed = dict.fromkeys(helped, "adapt")
    assert ("policy" in fix) == bool(helped)
    assert (f"policy={typed!r}".replace("'", '"') in fix) == bool(helped)
    check_policy(typed)
    for kind in kinds:
        assert helped.count(kind) or f"key.{kind}" in fix or "more back" in fix
    assert (PAGE in fix) == any(kind in RECIPES for kind in kinds if kind != "shape")


def test_a_problem_of_a_checkpoint_says_its_own_fix_and_nothing_of_policies():
    problem = Problem("CheckpointTorn", "runs/a/step-1", "a manifest", "none", "copy the run again", 13)
    assert Refusal("r", None, (problem, *refused("batch_size").reasons)).fix == "copy the run again"


@pytest.mark.parametrize("name", sorted(set(RECIPES.values())))
def test_each_recipe_that_a_refusal_names_is_on_its_page(name, request):
    assert f"\n## {name}\n" in (request.config.rootpath / PAGE).read_text()


def test_what_follows_comes_after_its_cause_and_a_cause_is_told_once():
    """A parameter that has another shape has other slots; one that is new has no group: 28 lines for one cause, before."""

    def state(width, parameters):
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(list(model.parameters())[-parameters:])
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        live = attach(model, optimizer)
        live.advance(samples=1)
        return live.capture()

    store = MemoryStore()
    save(state(3, 4), store)
    wheres = [reason.where for reason in plan(store, like=state(5, 4)).reasons]
    assert wheres[0].startswith("model.params")
    assert wheres == sorted(wheres, key=lambda where: where.startswith("optimizer."))
    fewer = plan(store, like=state(3, 2)).reasons
    assert {reason.where for reason in fewer} == {"optimizer.groups: 0.weight", "optimizer.groups: 0.bias"}


@pytest.mark.parametrize("own_group", [False, True])
def test_unfreezing_keeps_the_moments_of_the_others_and_begins_the_new_ones_without(own_group):
    """B10: with ``add_param_group``, and in the one group; it goes on, and the next resume is exact."""

    def build(unfrozen):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        model[0].requires_grad_(unfrozen)
        parameters = list(model[1].parameters()) + (list(model[0].parameters()) if unfrozen and not own_group else [])
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        if unfrozen and own_group:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return model, optimizer, scheduler, attach(model, optimizer, scheduler=scheduler)

    def step(model, optimizer, scheduler, live):
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        live.advance(samples=1)

    store, old = MemoryStore(), build(unfrozen=False)
    step(*old)
    save(old[3].capture(), store)
    new = build(unfrozen=True)
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused) as told:
        manager.restore(new[3])
    kinds = {reason.kind for reason in told.value.refusal.reasons}
    assert kinds == ({"missing", "contract", "scheduler"} if own_group else {"missing", "contract"})
    assert '"missing": "adapt"' in told.value.mend
    with CheckpointManager(store, policy=dict.fromkeys(kinds, "adapt")) as manager:
        manager.restore(new[3])
        moments = {name: dict(held) for name, held in new[3].capture().optimizer.slots.items()}
        assert {name for name, held in moments.items() if held} == {"1.weight", "1.bias"}
        assert torch.equal(moments["1.weight"]["exp_avg"], old[3].capture().optimizer.slots["1.weight"]["exp_avg"])
        step(*new)
        manager.save(new[3])
        again = build(unfrozen=True)
    with CheckpointManager(store) as manager:
        manager.restore(again[3])
    for run in (new, again):
        step(*run)
    assert torch.equal(new[0][0].weight, again[0][0].weight)


def test_fewer_epochs_than_were_done_are_said(caplog):
    """3.3: it was no iteration and no word."""
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    live = attach(model, loader=torch.utils.data.DataLoader(data, batch_size=2))
    with caplog.at_level(logging.WARNING):
        for _ in live.batches(epochs=3):
            live.advance()
        assert not caplog.records
        assert list(live.batches(epochs=2)) == []
    assert "live.batches(epochs=2) has nothing to give: the run has had 3 epochs" in caplog.text
    assert f'"Train for fewer epochs than were done" in {PAGE}' in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "line", "recipes"),
    [
        ({}, {"horizon": 16}, 'policy={"scheduler": "adapt"}', '"Extend the run"'),
        ({}, {"lr": 0.05}, 'policy={"scheduler": "adapt"}', '"Change the learning rate"'),
        ({"horizon": None}, {"horizon": None, "lr": 0.05}, 'policy={"hyperparameters": "adapt"}', '"Change the learning rate"'),
        ({}, {"batch": 4}, 'policy={"batch_size": "adapt"}', '"Change the batch size"'),
        ({}, {"frozen": False}, '"missing": "adapt"', '"Unfreeze layers"'),
        ({}, {"frozen": False, "own_group": True}, '"missing": "adapt"', '"Unfreeze layers"'),
        ({"observer": True}, {"observer": True}, "run one batch through the model before it is attached", '"Observers that resize"'),
        ({}, {"batch": 4, "frozen": False}, '"batch_size": "adapt"', '"Unfreeze layers" and "Change the batch size"'),
    ],
)  # fmt: skip
def test_the_refusal_of_a_common_change_says_the_line_to_type_and_names_its_recipe(before, after, line, recipes):
    """3.3: each recipe is named by the refusal that needs it, and no other one."""
    store = MemoryStore()

    def start(*, horizon=8, lr=0.1, batch=2, frozen=True, own_group=False, observer=False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        if observer:
            model.append(PerChannelMinMaxObserver(ch_axis=1))
        model[0].requires_grad_(not frozen)
        trained = list(model[1].parameters()) + ([] if frozen or own_group else list(model[0].parameters()))
        optimizer = torch.optim.SGD(trained, lr=lr)
        if own_group:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        scheduler = None if horizon is None else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=batch)
        live = attach(model, optimizer, scheduler=scheduler, loader=data)
        with CheckpointManager(store, every=None) as manager:
            if manager.restore(live).is_fresh:
                for (x,) in live.batches(steps=1):
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
                    live.advance()
                manager.save(live)

    start(**before)
    with pytest.raises(ResumeRefused) as told:
        start(**after)
    assert line in told.value.mend
    assert told.value.mend.endswith(f": {recipes} in {PAGE}")


def test_a_refusal_of_the_live_objects_says_nothing_of_policies():
    """3.4: no policy changes what objects can take; each reason has its own fix, and is told by one of plan and restore."""
    live = attach(torch.nn.Linear(2, 1))
    with pytest.raises(RestoreRefused) as told:
        live.restore(attach(torch.nn.Linear(3, 1)).capture())
    assert "policy" not in str(told.value)
    store = MemoryStore()
    save(attach(torch.nn.Linear(3, 1)).capture(), store)
    with pytest.raises(ResumeRefused) as planned:
        load(store, like=live.capture())
    assert str(planned.value).count("model.params['weight']") == 2  # the reason, and the fix
    assert "policy" not in str(planned.value)
