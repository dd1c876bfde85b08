"""A run whose code has given its modules other names goes on bit by bit: the state of the optimizer and the average go with the names."""

import warnings
from copy import deepcopy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, ResumeRefused
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.shard import make_shard
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.core.transform.renamed_manifest import renaming_of
from trainfold.transforms import cast, compose, drop, merge, rename

OLD = {"body": "layers", "head": "head", "other": "other"}
RULES = {
    "prefix": ({"body": "blocks", "head": "out", "other": "other"}, compose(rename("layers.{p*}", "blocks.{p*}"), rename("head.{n}", "out.{n}"))),
    "deeper": ({"body": "net.layers", "head": "head", "other": "other"}, rename("layers.{p*}", "net.layers.{p*}")),
    "kept": ({"body": "module.layers", "head": "_orig_mod.head", "other": "other"}, None),  # older checkpoints left these parts out
    "one": ({"body": "layers", "head": "a", "other": "other"}, rename("head.{n}", "a.{n}")),
}  # fmt: skip


class Net(nn.Module):
    """A model with its parts under names of one's choice; a dropout has no tensor, an embedding is tied, and a layer is frozen."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        body = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), nn.BatchNorm1d(4)])
        head, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        other.weight = head.weight
        self._put(names["body"], body)
        self._put(names["head"], head)
        self._put(names["other"], other)
        body[0][0].bias.requires_grad_(False)

    def _put(self, path, module):
        first, _, rest = path.partition(".")
        if rest:
            self.add_module(first, nn.ModuleDict({rest: module}))
        else:
            self.add_module(first, module)

    def forward(self, x):
        body, head = self.get_submodule(self.names["body"]), self.get_submodule(self.names["head"])
        return head(body[1](body[0](x))) + self.get_submodule(self.names["other"])(x)


def started(names):
    torch.manual_seed(0)
    model = Net(names)
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    body = [each for name, each in model.named_parameters() if each.requires_grad and name.startswith(names["body"])]
    head = [model.get_submodule(names["head"]).weight]
    optimizer = torch.optim.AdamW([{"params": body, "lr": 0.1}, {"params": head, "lr": 0.01}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other = nn.ModuleDict({"layers": nn.Linear(4, 4)})  # has its own names, which the rules do not change
    loader = torch.utils.data.DataLoader(torch.arange(80.0).reshape(20, 4), batch_size=4, shuffle=True)
    live = attach(model, optimizer, scheduler=scheduler, loader=loader, extra={"ema": ema, "critic": other})
    return live, model, ema


def train(live, model, ema, manager, steps):
    (optimizer,) = live.optimizers.values()
    while live.progress.step < steps:
        for batch in live.batches():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            live.advance()
            manager.step(live)
            if live.progress.step == steps:
                break


def ran(steps, *, names, store=None, **options):
    """A run to some step, with the schedule inside the loop left out: its rates are in the groups."""
    live, model, ema = started(names)
    with CheckpointManager(MemoryStore() if store is None else store, every=1) as manager:
        restored = manager.restore(live, **options)
        train(live, model, ema, manager, steps)
    return fingerprint(live.capture()), restored


@settings(deadline=None, max_examples=6)
@given(st.sampled_from(sorted(RULES)), st.integers(1, 6), st.booleans())
def test_a_run_whose_modules_were_renamed_is_the_run_that_always_had_these_names(rules, killed_at, in_place):
    """V13, K01: model, slots, groups, average, ties, buffers, frozen parameters, position and streams; and the next start, with the same rules, finds the new names."""
    names, transform = RULES[rules]
    whole, _ = ran(8, names=names)
    store = MemoryStore()
    ran(killed_at, names=OLD, store=store)
    with warnings.catch_warnings():
        if rules == "deeper":  # of the module around the others, which was not there
            warnings.filterwarnings("ignore", "warn    settings  .*net: saved nothing", ResumeDrift)
        if rules == "kept":  # the same: its name was that of the root
            warnings.filterwarnings("ignore", "warn    settings  .*model.kind: saved nothing", ResumeDrift)
        _, restored = ran(killed_at + 1, names=names, store=store, transform=transform, in_place=in_place)
    assert (restored.is_fresh, restored.step) == (False, killed_at)
    again, _ = ran(8, names=names, store=store, transform=transform)
    assert again == whole
    assert ran(8, names=names, store=store)[0] == whole  # and without them


def test_the_plan_says_what_has_another_name_and_a_state_loads_so():
    """V02, V18: what a restore does is printed first."""
    names, transform = RULES["prefix"]
    store = MemoryStore()
    ran(2, names=OLD, store=store)
    live, *_ = started(names)
    assert isinstance(plan(store, like=live.capture()), Refusal)
    found = plan(store, like=live.capture(), transform=transform)
    assert isinstance(found, ResumePlan)
    assert "note         8 tensors of the model have other names here, by rename layers.{p*} -> blocks.{p*}" in str(
        found
    )
    state = load(store, like=live.capture(), transform=transform)
    before = read_manifest(store, "step-00000002")
    assert {*state.optimizer.slots} == {"blocks.0.0.weight", "blocks.1.weight", "blocks.1.bias", "out.weight"}
    assert len(before.component("optimizer").tensors[0]) == sum(len(each) for each in state.optimizer.slots.values())
    assert {*state.extra["critic"].params} == {"layers.weight", "layers.bias"}
    other = MemoryStore()
    save(state, other)
    assert isinstance(plan(other, like=load(store, like=live.capture(), transform=transform)), ResumePlan)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (merge(["layers.0.0.weight", "head.weight"], "both"), "rules of rename alone.*merge"),
        (compose(cast("bfloat16"), rename("head.{n}", "out.{n}")), "rules of rename alone.*cast"),
        (drop("head.{n}"), "rules of rename alone.*drop"),
        ("layers", "a transform, such as"),
    ],
)
def test_rules_that_do_more_than_give_names_are_refused_with_the_next_move(transform, said):
    """K09: an optimizer's state is never cast, and its slots are not put together."""
    store = MemoryStore()
    ran(1, names=OLD, store=store)
    live, *_ = started(OLD)
    for call in (lambda: plan(store, like=live.capture(), transform=transform), lambda: load(store, like=live.capture(), transform=transform)):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            call()
    with CheckpointManager(store) as manager, pytest.raises(InvalidArgument, match=said):
        manager.restore(live, transform=transform)


def test_names_that_would_change_again_or_meet_are_a_reason_against_the_checkpoint():
    """Modules that change places would change back at the next start."""
    swap = compose(rename("a.{n}", "t.{n}"), rename("b.{n}", "a.{n}"), rename("t.{n}", "b.{n}"))
    with pytest.raises(InvalidState, match="applied to them again"):
        renaming_of(swap, ["a.w", "b.w"])
    store = MemoryStore()
    ran(1, names=OLD, store=store)
    live, *_ = started(OLD)
    refused = plan(store, like=live.capture(), transform=rename("head.{n}", "other.{n}"))
    assert [each.error for each in refused.reasons] == ["InvalidState"]
    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused):
        manager.restore(live, transform=rename("head.{n}", "other.{n}"))


NAMES = st.lists(st.sampled_from(["a", "b", "module", "_orig_mod"]), min_size=1, max_size=3).map(".".join)


def state_with(names):
    slots = {name: {"m": torch.full((1,), float(index))} for index, name in enumerate(names)}
    groups = (ParamGroup({"lr": 0.1}, tuple(names)),)
    model = ModelState(Leaves({name: torch.full((1,), float(index)) for index, name in enumerate(names)}), Leaves())
    return TrainState(
        model=model, optimizer=OptimizerState("sgd", Leaves(slots), groups, None), trainer=Progress(step=1)
    )


@settings(deadline=None, max_examples=80)
@given(st.lists(NAMES, min_size=1, max_size=4, unique=True), st.booleans())
@example(["a.module.w", "a.w"], False)  # as two of one name: never one for the other
def test_names_of_older_checkpoints_are_given_back_where_each_has_one_and_never_guessed(names, is_short):
    """B17, R10: every tensor is found under the name that it has now, or the resume is refused."""
    store, saved = MemoryStore(), [canonical_name(name) for name in names] if is_short else [*names][::-1]
    if len(set(saved)) < len(saved):
        saved = list(dict.fromkeys(saved))
    save(state_with(saved), store)
    found = plan(store, like=state_with(names))
    if {*saved} == {*names} or ({*saved} == {*map(canonical_name, names)} and len(saved) == len(names)):
        state = load(store, like=state_with(names))
        assert [*state.model.params] == names
        held = {name: leaf.item() for name, leaf in state.model.params.items()}
        if {*saved} == {*names}:
            assert held == {name: float(saved.index(name)) for name in names}
        else:
            assert held == {name: float(saved.index(canonical_name(name))) for name in names}
            assert "have other names here: this checkpoint is from before" in str(found)
        assert {name: each["m"].item() for name, each in state.optimizer.slots.items()} == held
    else:
        assert isinstance(found, Refusal)


def test_a_model_keeps_its_names_beside_an_average_that_gets_another():
    """B17, R10: the groups of the optimizer of a plain model had the names of the average, and the resume was refused."""
    store = MemoryStore()

    def started_with(holder):
        model = nn.ModuleDict({"a": nn.Linear(2, 1)})
        model["a"].bias.requires_grad_(False)
        critic = nn.ModuleDict({"a": nn.Linear(2, 2)})
        extra = {
            "mean": holder(deepcopy(model)),
            "critic": holder(critic),
            "critic_optimizer": torch.optim.SGD(critic.parameters(), 0.1),
        }
        return attach(model, torch.optim.SGD(model.parameters(), 0.2), extra=extra)

    save(started_with(lambda each: each).capture(), store)  # as checkpoints had a `module` of the user's
    state = started_with(lambda each: nn.ModuleDict({"module": each})).capture()
    found = load(store, like=state)
    assert [*found.model.params] == ["a.weight", "a.bias"]
    assert [*found.extra["mean"].params] == ["module.a.weight", "module.a.bias"]
    assert found.optimizer.groups == state.optimizer.groups
    assert found.extra["critic_optimizer"].groups == state.extra["critic_optimizer"].groups


@pytest.mark.parametrize(
    "given", ["trained", "all", "all, before a step", "all, before a step, in an older checkpoint"]
)
@pytest.mark.parametrize(
    "transform", [None, compose(rename("base{i}.{n}", "module.base{i}.{n}"), rename("top.{n}", "module.top.{n}"))]
)
def test_the_many_frozen_parameters_of_a_base_go_with_their_names(given, transform):
    """B17, R10: of more than 64 what is compared has a digest, and each resume under other names was refused."""
    store = MemoryStore()

    def started_with(holder, *, is_trained=False):
        model = holder(
            nn.ModuleDict({**{f"base{index}": nn.Linear(1, 1) for index in range(40)}, "top": nn.Linear(1, 1)})
        )
        for name, each in model.named_parameters():
            each.requires_grad_("base" not in name)
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad or given != "trained"], 0.1
        )
        if is_trained:
            for each in model.parameters():
                each.grad = torch.ones_like(each) if each.requires_grad else None
            optimizer.step()
        return attach(model, optimizer).capture()

    saved = started_with(lambda each: each, is_trained=given == "all")
    is_older = given.endswith("older checkpoint")
    if is_older:
        saved = saved.evolve(contract={key: each for key, each in saved.contract.items() if key != "frozen"})
    save(saved, store)
    state = started_with(lambda each: nn.ModuleDict({"module": each}))
    found = plan(store, like=state, transform=transform)
    if is_older:  # it does not have their names
        assert isinstance(found, Refusal)
        found = plan(store, like=state, transform=transform, policy={"contract": "adapt"})
    assert isinstance(found, ResumePlan)


def test_a_model_that_does_not_fit_is_refused_with_this_move():
    store = MemoryStore()
    save(attach(nn.ModuleDict({"a": nn.Linear(2, 1)})).capture(), store)
    with pytest.raises(ResumeRefused, match=r"transform=trainfold.transforms.rename\(old, new\)"):
        load(store, like=attach(nn.ModuleDict({"b": nn.Linear(2, 1)})).capture())


NEW = [("new", rename("old.{n}", "new.{n}")), ("old.module", None)]


@pytest.mark.parametrize(("new", "transform"), NEW)
@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 3), (3, 1)])
def test_each_rank_reads_its_part_under_the_new_name(before, now, new, transform):
    """K01: parts stay parts: nothing is gathered, whichever ranks saved; the slots of a parameter go with it."""
    store, whole = MemoryStore(), torch.arange(24.0).reshape(12, 2)

    def state_of(world, name, scale):
        rows = 12 // world.world_size
        part = whole[rows * world.rank : rows * (world.rank + 1)]

        def shard(factor):
            return make_shard(part * factor, shape=(12, 2), starts=(rows * world.rank, 0))

        model = ModelState(Leaves({f"{name}.w": shard(scale)}), Leaves())
        group = ParamGroup({"lr": 0.1}, (f"{name}.w",))
        optimizer = OptimizerState("sgd", Leaves({f"{name}.w": {"momentum": shard(2 * scale)}}), (group,), None)
        return TrainState(model=model, optimizer=optimizer, trainer=Progress(step=1))

    def loaded(world):
        found = load(store, like=state_of(world, new, 0.0), transform=transform, collectives=world)
        (weight,), (slots,) = found.model.params.values(), found.optimizer.slots.values()
        return weight.tensor.tolist(), slots["momentum"].tensor.tolist()

    run_threads(before, lambda world: save(state_of(world, "old", 1.0), store, collectives=world))
    parts = run_threads(now, loaded)
    assert [row for weight, _ in parts for row in weight] == whole.tolist()
    assert [row for _, slot in parts for row in slot] == (2 * whole).tolist()


def test_an_export_with_the_old_names_is_passed_over_for_what_can_be_resumed():
    """V06, T24: the newest checkpoint that can do what was asked, under the new names too; a request for weights alone takes the export."""
    names, transform = RULES["prefix"]
    store = MemoryStore()
    ran(2, names=OLD, store=store)
    live, *_ = started(OLD)
    with CheckpointManager(store) as manager:
        manager.restore(live)
    live.advance(samples=0)
    save(live.capture(), store, components=["model", "trainer"])
    new, *_ = started(names)
    full = plan(store, like=new.capture(), transform=transform)
    assert (full.step, [each.where.rpartition("/")[2] for each in full.passed_over]) == (2, ["step-00000003"])
    assert plan(store, like=new.capture(), transform=transform, components=["model"]).step == 3
    with CheckpointManager(store) as manager, pytest.warns(UserWarning, match="step-00000003"):
        assert manager.restore(new, transform=transform).step == 2
