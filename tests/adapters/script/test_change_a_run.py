"""A run changed on purpose: the refusal prints the fix to type, and that fix works (3.3, 3.4 of the issue)."""

import logging
import warnings

import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization import PerChannelMinMaxObserver

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RestoreRefused, ResumeRefused
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import KINDS, RATE, RECIPES, UNFREEZE, check_policy, make_drift
from trainfold.core.resume.resume_plan import Refusal

PAGE = "docs/how-to/change-a-run.md"


def refused(*kinds):
    return Refusal(
        "r", "step-1", tuple(make_drift(kind, f"key.{kind}", saved=1, wanted=2, policy={}) for kind in kinds)
    )


@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6))
def test_a_refusal_says_the_policy_to_type_where_one_helps_and_none_where_none_does(kinds):
    """R09: the policy can be typed, and allows every difference that it can; the others are named, to be reverted."""
    fix = refused(*kinds).fix
    begun_anew = {"optimizer", "dataset_size"}  # moments, and the place in the data
    helped = [kind for kind in kinds if KINDS[kind][1] != {"refuse"} and kind not in begun_anew]
    typed = {kind: "adapt" if "adapt" in KINDS[kind][1] else "warn" for kind in helped}
    assert ("reset" in fix) == (not begun_anew.isdisjoint(kinds))
    assert ("policy" in fix) == bool(helped)
    assert (f"policy={typed!r}".replace("'", '"') in fix) == bool(helped)
    check_policy(typed)
    for kind in kinds:
        assert helped.count(kind) or kind in begun_anew or f"key.{kind}" in fix or "more back" in fix
    assert (PAGE in fix) == any(kind in RECIPES for kind in kinds if kind != "shape")


def test_a_problem_of_a_checkpoint_says_its_own_fix_and_nothing_of_policies():
    problem = Problem("CheckpointTorn", "runs/a/step-1", "a manifest", "none", "copy the run again", 13)
    assert Refusal("r", None, (problem, *refused("batch_size").reasons)).fix == "copy the run again"


@pytest.mark.parametrize("name", sorted({*RECIPES.values(), RATE, UNFREEZE}))
def test_each_recipe_that_a_refusal_names_is_on_its_page(name, request):
    assert f"\n## {name}\n" in (request.config.rootpath / PAGE).read_text()


def test_what_follows_comes_after_its_cause_and_a_cause_is_told_once():
    """A parameter of another shape has other slots, and a new one has no group: one cause used to print 28 lines."""

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


def test_another_hyperparameter_is_not_sent_to_the_recipe_for_the_rate():
    """3.4: the fix for changed betas was to change the learning rate."""

    def fix(where, kind="hyperparameters"):
        return Refusal("r", None, (make_drift(kind, where, saved=1, wanted=2, policy={}),)).fix

    assert '"Change another hyperparameter"' in fix("optimizer.groups['0.bias'].betas")
    assert '"Change the learning rate"' in fix("optimizer.groups['0.bias'].lr")
    assert '"Change the learning rate"' in fix("optimizer.groups['0.bias'].initial_lr", "scheduler")


@pytest.mark.parametrize("policy", [None, {"hyperparameters": "adapt"}, {"implementation": "refuse"}])
def test_another_foreach_is_a_warning_and_the_scripts_counts(policy):
    """N01: tensor parallelism may demand another one. It was refused, and an optimizer under ``extra`` got the saved one in any case."""

    def run(foreach, steps):
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        optimizers = [
            torch.optim.AdamW(model.parameters(), foreach=foreach),
            torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5, foreach=foreach),
        ]
        live = attach(model, optimizers[0], extra={"other": other, "second": optimizers[1]})
        with CheckpointManager(store, policy=policy) as manager:
            manager.restore(live)
            for _ in range(steps):
                (model(torch.ones(2)) + other(torch.ones(2))).sum().backward()
                for each in optimizers:
                    each.step()
                live.advance(samples=1)
            manager.save(live)
        return [group["foreach"] for each in optimizers for group in each.param_groups]

    store = MemoryStore()
    run(None, 1)
    if policy == {"implementation": "refuse"}:
        with pytest.raises(ResumeRefused, match=r"implementation +attached\.second\.groups\['other\.bias'\]\.foreach"):
            run(False, 1)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run(False, 1) == [False, False]
    found = [str(each.message) for each in said if "optimizer.groups['bias'].foreach" in str(each.message)]
    assert len(found) == (policy is None)


def simple(make=torch.optim.SGD, schedule=None, store=None, **kwargs):
    """A run of two layers; with a store, it trains for two steps and saves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = make(model.parameters(), lr=0.1, **kwargs)
    scheduler = None if schedule is None else schedule(optimizer)
    live = attach(model, optimizer, scheduler=scheduler)
    if store is not None:
        go_on(live)
        with CheckpointManager(store) as manager:
            manager.save(live)
    return live


def go_on(live, steps=2):
    model, optimizer = live.modules[0], live.optimizers["optimizer"]
    for _ in range(steps):
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in live._objects.schedulers:
            each.step()
        live.advance(samples=1)


def restored(live, store, *, policy=None, reset=None):
    with CheckpointManager(store, policy=policy) as manager:
        manager.restore(live, reset=reset)
        go_on(live)
        manager.save(live)


def told(live, store, *, policy=None):
    with CheckpointManager(store, policy=policy) as manager, pytest.raises(ResumeRefused) as refusal:
        manager.restore(live)
    return refusal.value


def test_another_optimizer_is_one_reason_whose_fix_works():
    """3.4: nine lines of hyperparameters preceded the cause, and the suggested policy was refused next."""
    store = MemoryStore()
    simple(torch.optim.AdamW, store=store)
    error = told(simple(torch.optim.SGD), store)
    assert [reason.where for reason in error.refusal.reasons] == ["optimizer.kind"]
    assert 'reset={"optimizer": "why"}' in error.fix
    assert "policy" not in error.fix
    assert '"Change the optimizer"' in error.fix
    restored(simple(torch.optim.SGD), store, reset={"optimizer": "SGD from here on"})
    restored(simple(torch.optim.SGD), store)  # and the next start needs no policy


@pytest.mark.parametrize("is_new", [True, False])
def test_a_scheduler_that_is_new_or_gone_is_one_reason_whose_fix_works(is_new):
    """3.4: a missing scheduler was reported as base rates, and ``lr: saved 0.1, wanted live`` was not a sentence."""

    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    store = MemoryStore()
    before, after = (None, cosine) if is_new else (cosine, None)
    simple(schedule=before, store=store)
    error = told(simple(schedule=after), store)
    assert [reason.where for reason in error.refusal.reasons] == ["scheduler"]
    typed = {"missing_component": "adapt"} if is_new else {"scheduler": "adapt"}
    assert f"policy={typed}".replace("'", '"') in error.fix
    live = simple(schedule=after)
    restored(live, store, policy=typed)
    rate = live.optimizers["optimizer"].param_groups[0]["lr"]
    whole = cosine(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    whole.optimizer.step()
    whole.step()
    whole.step()
    assert rate == (whole.get_last_lr()[0] if is_new else 0.1)
    restored(simple(schedule=after), store)


def test_a_rate_that_a_scheduler_moves_is_told_in_words():
    drift = make_drift("hyperparameters", "optimizer.groups['w'].lr", saved=0.1, wanted="live", policy={})
    assert "saved 0.1, wanted one that a scheduler moves" in str(drift)


def test_a_pruned_model_is_told_to_be_pruned_before_it_is_attached_and_adapt_says_what_is_lost(caplog):
    """3.4: the suggested policy silently continued with a layer that is in no checkpoint."""
    store = MemoryStore()
    live = simple(store=store)
    torch.nn.utils.prune.l1_unstructured(live.modules[0][0], "weight", amount=0.3)
    with CheckpointManager(store) as manager:
        manager.restore(simple())
        go_on(live)
        manager.save(live)
    error = told(simple(), store)
    assert error.fix.startswith("change the model before attach as it was changed when it was saved (pruned,")
    assert "what is missing begins at the script's values, and what is unexpected is dropped" in error.fix
    assert '"Change the layers"' in error.fix
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        restored(simple(), store, policy={"missing": "adapt", "unexpected": "adapt"})
    assert "not saved, and so begins at what the script gave it: model.params['0.weight']" in caplog.text
    assert "saved, and dropped, because this run has no place for it: model.params['0.weight_orig']" in caplog.text


def test_a_group_that_was_added_as_the_run_went_is_to_be_added_before_attach(caplog):
    """B10: the suggested policy silently dropped the group of the unfrozen layer."""

    def build(added):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        model[0].requires_grad_(False)
        if added:
            unfreeze(model, optimizer)
        return model, optimizer, attach(model, optimizer)

    def unfreeze(model, optimizer):
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})

    store = MemoryStore()
    model, optimizer, live = build(added=False)
    go_on(live)
    unfreeze(model, optimizer)
    go_on(live)
    with CheckpointManager(store) as manager:
        manager.save(live)
    error = told(build(added=False)[2], store)
    assert error.fix.startswith("give the optimizer these parameters before attach, as with add_param_group, or pass")
    assert '"Unfreeze layers"' in error.fix
    live = build(added=True)[2]
    frozen = {"contract:attached.optimizer.frozen": "adapt"}
    restored(live, store, policy=frozen)  # the right fix: all moments are there
    assert all(live.capture().optimizer.slots.values())
    with caplog.at_level(logging.WARNING):
        restored(build(added=False)[2], store, policy={"unexpected": "adapt", **frozen})
    assert (
        "dropped, because this run has no place for it: optimizer.groups: 0.bias, optimizer.groups: 0.weight"
        in caplog.text
    )


def test_a_fix_is_told_once_and_no_older_checkpoint_where_there_is_none(tmp_path):
    """R09: the fix of a damaged run was printed twice, and named a missing checkpoint."""
    simple(store=tmp_path)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    error = told(simple(), tmp_path)
    assert str(error).count(error.fix) == 1
    assert "use an older checkpoint" not in str(error)


@pytest.mark.parametrize("own_group", [False, True])
def test_unfreezing_keeps_the_moments_of_the_others_and_begins_the_new_ones_without(own_group):
    """B10: with ``add_param_group``, and in the one group; the run continues, and its next resume is exact."""

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
    assert '"missing": "adapt"' in told.value.fix
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
    """3.3: the loop ran zero iterations without a message."""
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    live = attach(model, loader=torch.utils.data.DataLoader(data, batch_size=2))
    with caplog.at_level(logging.WARNING):
        for _ in live.batches(epochs=3):
            live.advance()
        assert not caplog.records
        assert list(live.batches(epochs=2)) == []
    assert "live.batches(epochs=2) has no batch left: the run has had 3 epochs" in caplog.text
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
    """3.3: each recipe is named by the refusal that needs it, and by no other one."""
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
    assert line in told.value.fix
    assert told.value.fix.endswith(f": {recipes} in {PAGE}")


def test_a_refusal_of_the_live_objects_says_nothing_of_policies():
    """3.4: no policy changes what objects can take; each reason has its own fix, and either plan or restore reports it."""
    live = attach(torch.nn.Linear(2, 1))
    with pytest.raises(RestoreRefused) as told:
        live.restore(attach(torch.nn.Linear(3, 1)).capture())
    assert "policy" not in str(told.value)
    store = MemoryStore()
    save(attach(torch.nn.Linear(3, 1)).capture(), store)
    with pytest.raises(ResumeRefused) as planned:
        load(store, like=live.capture())
    assert str(planned.value).count("model.params['weight']") == 2  # in the reason, and in its fix
    assert "policy" not in str(planned.value)
