"""Optimizers that define their own state, hold other optimizers, or write outside their slots (W05, W06, W20)."""

import copy
from collections import deque
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.components.component import copied
from trainfold.adapters.components.held_optimizers import held_optimizers, nest_of
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.contents import RunContents
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.own_state.remembered import remember
from trainfold.adapters.watch.update_hooks import UpdateHooks
from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidState, RestoreRefused, ResumeRefused, TrainfoldError, UnsupportedOptimizer
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState, OwnOptimizerState

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


class Several(torch.optim.Optimizer):
    """Several optimizers behind one, as loops write it: its own state contains none of theirs."""

    def __init__(self, *inner):
        self.inner = list(inner)
        super().__init__([group for each in inner for group in each.param_groups], {})

    def step(self, closure=None):
        for each in self.inner:
            each.step()


class Counting(SGD):
    """Keeps a count where only its own ``state_dict`` finds it."""

    def __init__(self, params, **kwargs):
        super().__init__(params, lr=0.1, momentum=0.9, **kwargs)
        self._count = torch.zeros(())

    def step(self, closure=None):
        self._count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self._count)
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state_dict):
        self._count = state_dict["count"].clone()
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


class Forgetful(Counting):
    """Takes the count back, and one more."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._count += 1


class ById(Counting):
    """Names its parameters by their ids, as old code does."""

    def state_dict(self):
        return {"seen": {id(p): i for i, p in enumerate(self.param_groups[0]["params"])}, "base": super().state_dict()}

    def load_state_dict(self, state_dict):
        assert set(state_dict["seen"]) == set(map(id, self.param_groups[0]["params"]))
        super().load_state_dict(state_dict["base"])


class Writing(torch.optim.Optimizer):
    """Writes into its groups, into its state under a name, and into an attribute, as many of others do."""

    def __init__(self, params):
        self.last = None
        super().__init__(params, {"lr": 0.1, "scale": None})

    @torch.no_grad()
    def step(self, closure=None):
        counts = self.state["counts"]
        counts["steps"] = counts.get("steps", 0) + 1
        for group in self.param_groups:
            group["norm"] = torch.stack([p.grad.norm() for p in group["params"]]).sum()
            group["scale"] = [group["scale"], None] if group["scale"] is None else [1.5, [counts["steps"], None]]
            for p in group["params"]:
                held = self.state[p].setdefault("queue", deque(maxlen=2))
                held.append(p.grad.clone())
                p.sub_(sum(held) * group["lr"] / (1 + group["norm"] + counts["steps"] + (self.last or 0.0)))
        self.last = float(group["norm"])


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def several(model):
    first, second = model[0].parameters(), model[2].parameters()
    return Several(AdamW(first, lr=0.02), SGD(second, lr=0.05, momentum=0.9))


def hooked(model):
    optimizer = AdamW(model.parameters(), lr=0.02)
    notes = {"seen": 0}

    def count(*_):
        notes["seen"] += 1

    optimizer.register_step_post_hook(count)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "notes": dict(notes)})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: (notes.update(state["notes"]), state)[1])
    return optimizer


MAKERS = {
    "several": several,
    "own": lambda model: Counting(model.parameters()),
    "ids": lambda model: ById(model.parameters()),
    "hooks": hooked,
    "writing": lambda model: Writing(model.parameters()),
}


class Run:
    """A run, made from scratch as a script makes it."""

    def __init__(self, make, seed, **kwargs):
        self.model = model_of(seed)
        self.optimizer = make(self.model)
        self.live = attach(self.model, self.optimizer, **kwargs)

    def train(self, steps):
        for _ in range(steps):
            x = torch.full((2, 3), 0.1 + self.live.progress.step)
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.live.advance(samples=2)
        return self

    def bits(self):
        return trainfold.fingerprint(self.live.capture())


def saved(make, steps=3):
    store = MemoryStore()
    run = Run(make, 0)
    with CheckpointManager(store) as manager:
        run.train(steps)
        manager.save(run.live)
    return store, run


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_an_optimizer_keeps_in_its_own_way_comes_back(make):
    """W05, W06: k steps, save, new objects, restore, n steps are k+n steps."""
    store, run = saved(make)
    run.train(3)
    resumed = Run(make, 1)
    with CheckpointManager(store) as manager:
        manager.restore(resumed.live)
    assert resumed.train(3).bits() == run.bits()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_run_that_went_on_goes_back_to_an_earlier_state(make):
    """W06: keys of groups, keys of the state and attributes that were added since are removed."""
    run = Run(make, 0)
    early = copied(run.live.capture())
    run.train(4)
    run.live.restore(early)
    assert run.bits() == trainfold.fingerprint(early)
    assert run.train(4).bits() == Run(make, 0).train(4).bits()


def test_a_plain_optimizer_of_torch_is_stored_as_it_was():
    """W05: nothing changes for classes without their own state methods."""
    run = Run(lambda model: AdamW(model.parameters()), 0).train(2)
    assert type(run.live.capture().optimizer) is OptimizerState


def test_a_class_whose_own_way_does_not_come_back_is_refused_by_name_and_nothing_is_changed():
    """W05, V12: the restored state is captured again and compared."""
    store, _ = saved(lambda model: Forgetful(model.parameters()))
    other = Run(lambda model: Forgetful(model.parameters()), 1).train(1)
    other.optimizer.zero_grad()
    group = other.optimizer.param_groups[0]
    before, held = other.bits(), copy.deepcopy(other.optimizer.state_dict())
    with (
        CheckpointManager(store) as manager,
        pytest.raises(RestoreRefused, match=r"\['own'\]\['count'\].*3\.0.*Forgetful"),
    ):
        manager.restore(other.live)
    assert other.bits() == before
    assert other.optimizer.param_groups[0] is group
    assert str(other.optimizer.state_dict()) == str(held)


def test_an_own_way_that_fails_is_refused_when_it_is_attached():
    """W05: not at the first save."""

    class Broken(Counting):
        def state_dict(self):
            raise AttributeError("_optimizer_state_dict_pre_hooks")

    with pytest.raises(InvalidState, match=r"Broken.state_dict\(\).*_optimizer_state_dict_pre_hooks"):
        Run(lambda model: Broken(model.parameters()), 0)


def test_parameters_in_another_order_are_refused_where_the_own_way_counts_them():
    """W05, B10: torch's state_dict names parameters by their position."""
    store, _ = saved(MAKERS["own"])
    turned = Run(lambda model: Counting(list(model.parameters())[::-1]), 1)
    with CheckpointManager(store) as manager, pytest.raises(RestoreRefused, match="in the order of the saved ones"):
        manager.restore(turned.live)


def test_an_optimizer_around_other_optimizers_is_refused():
    """W05: the inner class is part of its identity."""
    store, _ = saved(several)

    def other(model):
        return Several(AdamW(model[0].parameters(), lr=0.02), AdamW(model[2].parameters(), lr=0.05))

    with CheckpointManager(store) as manager, pytest.raises(TrainfoldError, match="momentum"):
        manager.restore(Run(other, 1).live)


def test_a_setting_of_a_held_optimizer_is_compared_and_adapted():
    """W05: the script sets its learning rate too."""
    store, _ = saved(several)

    def slower(model):
        return Several(AdamW(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.05, momentum=0.9))

    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused, match=r"lr: saved 0\.02, wanted 0\.01"):
        manager.restore(Run(slower, 1).live)
    run = Run(slower, 1)
    with CheckpointManager(store, policy={"hyperparameters": "adapt"}) as manager:
        manager.restore(run.live)
    assert [group["lr"] for group in run.optimizer.inner[0].param_groups] == [0.01]


def test_an_adapted_rate_passes_the_reading_back():
    """W05: a policy changes a setting of a class with its own state; the class has not failed because of that."""
    store, _ = saved(MAKERS["hooks"])

    def slower(model):
        optimizer = hooked(model)
        optimizer.param_groups[0]["lr"] = 0.01
        return optimizer

    run = Run(slower, 1)
    with CheckpointManager(store, policy={"hyperparameters": "adapt"}) as manager:
        manager.restore(run.live)
    assert run.optimizer.param_groups[0]["lr"] == 0.01


def test_what_stands_in_a_group_at_attach_is_a_setting_and_what_appears_later_is_state():
    """W06: a changed setting is refused; values that a step writes are never compared."""
    store, _ = saved(MAKERS["writing"])

    def faster(model):
        optimizer = Writing(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.2
        return optimizer

    with CheckpointManager(store) as manager, pytest.raises(ResumeRefused) as refused:
        manager.restore(Run(faster, 1).live)
    assert "1 reason against" in str(refused.value)
    assert "groups['0.bias'].lr: saved 0.1, wanted 0.2" in str(refused.value)


def test_a_tensor_in_a_group_is_a_setting_by_its_values():
    """W06: refused if it differs, accepted otherwise."""

    def weighted(value):
        return lambda model: SGD([{"params": list(model.parameters()), "weights": torch.tensor([1.0, value])}], lr=0.1)

    store, _ = saved(weighted(2.0))
    with CheckpointManager(store) as manager:
        manager.restore(Run(weighted(2.0), 1).live)
        with pytest.raises(ResumeRefused, match="weights"):
            manager.restore(Run(weighted(3.0), 1).live)


class Ahead(torch.optim.Optimizer):
    """Shares its groups with the optimizer that it holds, and loads both, which makes two of each group in torch."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return {"outer": super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["outer"])
        self.inner.load_state_dict(state_dict["inner"])


def test_schedulers_go_on_working_on_the_groups_that_they_hold():
    """W05: torch's load makes new group dicts; ours keeps the old ones, also between an optimizer and the one that it holds."""

    def ahead(model):
        return Ahead(AdamW(model.parameters(), lr=0.02))

    store, _ = saved(ahead)
    run = Run(ahead, 1)
    group = run.optimizer.param_groups[0]
    with CheckpointManager(store) as manager:
        manager.restore(run.live)
    assert run.optimizer.param_groups[0] is group
    assert run.optimizer.inner.param_groups[0] is group


class Updates:
    def announced(self):
        pass


UPDATES = Updates()


def contents_of_all():
    hooks = UpdateHooks(UPDATES.announced)
    return RunContents(SingleProcess(), hooks, components=None, contract={}, check_replicas="none")


def test_what_an_own_way_writes_at_any_moment_is_copied_in_the_call():
    """W05, D02: a hook before the step protects only tensors that nothing else writes to."""
    for make, is_copied in ((several, True), (MAKERS["own"], True), (MAKERS["writing"], False)):
        run = Run(make, 0).train(1)
        lent = run.live.read(view=True)
        contents = contents_of_all()
        snapshot = contents.snapshot(run.live, lent)
        leaves = {name: leaf for name, leaf in snapshot.named().items() if name[0] in ("model", "optimizer")}
        changing = contents.unannounced(run.live, lent, snapshot, leaves)
        held = {name for name in leaves if name not in changing}
        assert (("model", "model.params['0.weight']") in changing) is is_copied
        assert any(component == "optimizer" for component, _ in held) is not is_copied


def test_an_async_save_of_a_wrapper_has_the_bytes_of_a_sync_one():
    """W05, D01: also if the loop continues at once."""
    found = []
    for mode in ("sync", "async"):
        store, run = MemoryStore(), Run(several, 0)
        with CheckpointManager(store, mode=mode) as manager:
            run.train(2)
            manager.save(run.live)
            run.train(2)
        found.append(trainfold.fingerprint(trainfold.load(store, like=Run(several, 0).live.capture())))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [Counting, Writing])
def test_a_pure_step_refuses_an_optimizer_with_more_than_slots_and_groups(kind):
    """W05: a pure step of a class that keeps state elsewhere would lose that state at the first resume."""

    def loss_fn(model, batch):
        loss = model(batch).square()
        return trainfold.Loss(sum=loss.sum(), weight=len(loss))

    def train():
        pure, model = trainfold.optimizer(kind), nn.Linear(3, 1)
        trainfold.make_step(model, loss_fn, pure)(trainfold.init_state(model, pure, seed=0), torch.ones(2, 3))

    with pytest.raises(UnsupportedOptimizer, match=rf"{kind.__name__}.*trainfold\.attach"):
        train()


# --- W20: what a restore is given is checked before anything is written ----------------------------------------------


def with_slot(state, key, value):
    slots = {name: {**held, key: value(held[key])} for name, held in state.optimizer.slots.items()}
    return state.evolve(optimizer=attrs.evolve(state.optimizer, slots=Leaves(slots)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg", lambda held: held.long()),
        ("exp_avg", lambda held: held.double()),
        ("exp_avg", lambda held: 5),
        ("exp_avg", lambda held: {"a": held}),
        ("exp_avg_sq", lambda held: "text"),
        ("exp_avg_sq", lambda held: held.flatten()),
        ("step", lambda held: "text"),
        ("step", lambda held: torch.tensor(float("nan"))),
        ("step", lambda held: torch.tensor(-1.0)),
        ("step", lambda held: torch.zeros(2)),
        ("step", lambda held: None),
    ],
)
def test_a_slot_of_another_type_dtype_or_shape_is_refused_before_anything_is_written(key, value):
    """W20: a manifest is changed and sealed again."""
    state = Run(lambda model: AdamW(model.parameters()), 0).train(2).live.capture()
    run = Run(lambda model: AdamW(model.parameters()), 1)
    before = run.bits()
    with pytest.raises(RestoreRefused, match=rf"slots\['0.weight'\]\['{key}'\]"):
        run.live.restore(with_slot(state, key, value))
    assert run.bits() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "fast"), ("betas", 0.9), ("betas", ("a", "b")), ("params", []), ("fused", "yes"), ("amsgrad", 3)],
)
def test_a_hyperparameter_of_another_type_is_refused_before_anything_is_written(key, value):
    """W20: the group itself would be overwritten."""
    make = lambda model: AdamW(model.parameters(), fused=False)
    state = Run(make, 0).train(1).live.capture()
    groups = tuple(attrs.evolve(group, hyper={**group.hyper, key: value}) for group in state.optimizer.groups)
    run = Run(make, 1)
    before = run.bits()
    with pytest.raises(RestoreRefused, match=rf"groups.*\.{key}"):
        run.live.restore(state.evolve(optimizer=attrs.evolve(state.optimizer, groups=groups)))
    assert run.bits() == before


@pytest.mark.parametrize(
    "change",
    [{"attributes": {"step": 3}}, {"attributes": {"_secret": 3}}, {"attributes": {"last": "text"}}, {"held": {"x": 1}}],
)
def test_what_an_optimizer_cannot_have_is_refused_before_anything_is_written(change):
    """W20: an attribute that would hide a method, or a held optimizer of a type that is not an optimizer."""
    run = Run(MAKERS["writing"], 0).train(2)
    state = run.live.capture()
    assert isinstance(state.optimizer, OwnOptimizerState)
    before = run.bits()
    with pytest.raises(RestoreRefused):
        run.live.restore(state.evolve(optimizer=attrs.evolve(state.optimizer, **change)))
    assert run.bits() == before


# --- the parts -------------------------------------------------------------------------------------------------------


def test_what_was_remembered_comes_back_into_the_same_objects():
    """V12: the undo of a load that failed halfway."""
    optimizer = several(model_of(0))
    inner = optimizer.inner[0]
    group, parameter = inner.param_groups[0], inner.param_groups[0]["params"][0]
    values = parameter.detach().clone()
    undo = remember(nest_of(optimizer))
    inner.load_state_dict(SGD(model_of(1)[0].parameters(), lr=7.0).state_dict())
    with torch.no_grad():
        parameter.fill_(9.0)
    optimizer.inner = [inner]
    optimizer.later = 3
    undo()
    assert inner.param_groups[0] is group
    assert group["lr"] == 0.02
    assert torch.equal(parameter, values)
    assert len(optimizer.inner) == 2
    assert not hasattr(optimizer, "later")


def test_an_inner_optimizer_that_knows_the_outer_one_is_found_once():
    optimizer = several(model_of(0))
    optimizer.inner[0].outer = optimizer
    assert list(held_optimizers(optimizer)) == ["inner[0]", "inner[1]"]
    assert len(nest_of(optimizer)) == 3
    attach(nn.Linear(1, 1))
    run = Run(lambda model: _knowing(several(model)), 0).train(2)
    assert sorted(run.live.capture().optimizer.held) == ["inner[0]", "inner[1]"]


class Behind(torch.optim.Optimizer):
    """Holds an optimizer inside of a helper object."""

    def __init__(self, inner):
        self.helper = SimpleNamespace(engines=[inner], schedule=SGD([nn.Parameter(torch.ones(1))], lr=1.0))
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.helper.engines[0].step()


def test_an_optimizer_inside_of_a_helper_object_is_found_by_its_parameters():
    """W05: a schedule that uses an optimizer of torch on a number of its own is not the run's."""

    def behind(model):
        return Behind(AdamW(model.parameters(), lr=0.02))

    store, run = saved(behind)
    run.train(3)
    resumed = Run(behind, 1)
    with CheckpointManager(store) as manager:
        manager.restore(resumed.live)
    assert list(held_optimizers(resumed.optimizer)) == ["helper.engines[0]"]
    assert resumed.train(3).bits() == run.bits()


def _knowing(optimizer):
    optimizer.inner[0].outer = optimizer
    return optimizer
