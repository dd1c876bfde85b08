"""The state of optimizers and schedulers in a live run is keyed by name, may have any layout, and is checked by kind."""

import pytest
import torch
from kit.adapters.live.live_cases import Job, differing
from torch import nn

import trainfold
from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import (
    InvalidState,
    RestoreRefused,
)
from trainfold.core.state.components import select
from trainfold.core.state.leaves import Leaves


def test_optimizer_state_is_keyed_by_name_and_survives_another_order():
    """B10: groups and parameters in another order get their own slots and hyperparameters."""

    def build(order, *, train):
        torch.manual_seed(train)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [
            {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0},
        ]
        if order == "other":
            groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        live = attach(model, optimizer)
        if train:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            live.advance(samples=1)
        return model, optimizer, live

    model, optimizer, live = build("one", train=True)
    other_model, other_optimizer, other = build("other", train=False)
    other.restore(live.capture())
    for name, parameter in model.named_parameters():
        held, theirs = optimizer.state[parameter], other_optimizer.state[other_model.get_parameter(name)]
        assert all(torch.equal(held[key], theirs[key]) for key in held)
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.0, 0.1]


def test_slots_keep_their_dtype_and_step_counters_their_device():
    """B09: torch's load_state_dict would cast fp32 moments of a bfloat16 parameter to bfloat16."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    live = attach(model, optimizer)
    slots = {
        name: {
            "step": torch.tensor(16_777_217.0, dtype=torch.float64),
            "exp_avg": torch.full(shape, 1.0 + 2**-20),
            "exp_avg_sq": torch.full(shape, 1e-30, dtype=torch.float32),
        }
        for name, shape in (("weight", (2, 2)), ("bias", (2,)))
    }
    state = live.capture()
    live.restore(
        state.evolve(optimizer=type(state.optimizer)(state.optimizer.kind, Leaves(slots), state.optimizer.groups))
    )
    held = optimizer.state[model.weight]
    assert held["step"].dtype == torch.float64
    assert held["step"].item() == 16_777_217.0
    assert held["exp_avg"].dtype == torch.float32
    assert held["exp_avg"][0, 0].item() == 1.0 + 2**-20


def test_a_parameter_without_slots_is_legal_and_one_with_some_of_them_is_not():
    """B10: lazy state is legal, partial state is damage."""
    state = Job(0).run(3).live.capture()
    assert "unused" not in state.optimizer.slots
    assert "frozen.weight" not in state.optimizer.slots
    broken = {name: dict(held) for name, held in state.optimizer.slots.items()}
    del broken["head.weight"]["exp_avg_sq"]
    partial = state.evolve(
        optimizer=type(state.optimizer)(state.optimizer.kind, Leaves(broken), state.optimizer.groups)
    )
    with pytest.raises(RestoreRefused, match=r"slots\['head.weight'\].*exp_avg_sq"):
        Job(1).live.restore(partial)


def factored(heads):
    torch.manual_seed(heads)
    model = nn.ModuleList([nn.Linear(4, 8), *(nn.Linear(8, 1) for _ in range(heads))])
    optimizer = torch.optim.Adafactor(model.parameters())
    return model, optimizer, attach(model, optimizer)


def heads_step(model, optimizer, live):
    trunk, *heads = model
    optimizer.zero_grad()
    sum(head(trunk(torch.ones(2, 4))).square().sum() for head in heads).backward()
    optimizer.step()
    live.advance(samples=2)


@pytest.mark.parametrize("heads", [1, 3])
def test_slots_shaped_like_their_parameters_by_chance_are_no_rule(heads):
    """B10: the factored slots of a matrix with one row have its shape; those of the others never do."""
    run = factored(heads)
    heads_step(*run)
    state = copied(run[2].capture())
    resumed = factored(heads)
    resumed[2].restore(state)
    heads_step(*run)
    heads_step(*resumed)
    assert differing(run[2].capture(), resumed[2].capture()) == []


def test_a_slot_that_cannot_be_its_parameters_is_refused():
    """B10: all of torch's own moments have the shape of their parameter."""
    state = Job(0).run(3).live.capture()
    broken = {name: dict(held) for name, held in state.optimizer.slots.items()}
    for held in broken.values():
        held["exp_avg"] = torch.zeros(17)
    bad = state.evolve(optimizer=type(state.optimizer)(state.optimizer.kind, Leaves(broken), state.optimizer.groups))
    with pytest.raises(RestoreRefused, match=r"slots\['head.weight'\]\['exp_avg'\].*\[17\]"):
        Job(1).live.restore(bad)


def test_an_optimizer_that_torch_names_without_its_module_is_torchs_too():
    """B10: half of the factored slots is damage, also among matrices of different shapes."""
    run = factored(2)
    heads_step(*run)
    state = run[2].capture()
    broken = {name: dict(held) for name, held in state.optimizer.slots.items()}
    del broken["0.weight"]["row_var"]
    bad = state.evolve(optimizer=type(state.optimizer)(state.optimizer.kind, Leaves(broken), state.optimizer.groups))
    with pytest.raises(RestoreRefused, match=r"slots\['0.weight'\].*row_var"):
        factored(2)[2].restore(bad)


class BySize(torch.optim.Optimizer):
    """A user's optimizer that keeps more state for a large parameter than for a small one, in any amount."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter]
            held["seen"] = torch.cat([held.get("seen", torch.zeros(0)), torch.ones(1)])
            if parameter.numel() > 8:
                held["scale"] = torch.ones(2)


def test_what_an_optimizer_of_somebody_else_keeps_is_not_judged_by_the_size_of_a_parameter():
    """B10: legal states are accepted."""

    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = BySize(model.parameters())
        return optimizer, attach(model, optimizer)

    optimizer, live = build()
    for _ in range(2):
        optimizer.step()
    live.advance(samples=1, steps=2)
    _, resumed = build()
    resumed.restore(copied(live.capture()))
    assert differing(resumed.capture(), live.capture()) == []


def test_slots_of_a_run_that_had_gone_on_disappear_when_the_state_has_none():
    job = Job(0)
    fresh = copied(job.live.capture())
    job.run(2)
    job.live.restore(fresh)
    assert not job.optimizer.state
    assert differing(job.live.capture(), fresh) == []


def test_a_tensor_that_the_model_does_not_have_is_named():
    model = nn.Linear(2, 1)
    with pytest.raises(InvalidState, match=r"shape \[7\] that the model does not have"):
        attach(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=0.1))


def test_several_schedulers_keep_their_arrangement():
    """B12: several schedulers; ReduceLROnPlateau, SequentialLR and MultiStepLR hold more than numbers."""

    def build():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        steps = torch.optim.lr_scheduler
        chain = steps.SequentialLR(
            optimizer, [steps.ConstantLR(optimizer, 0.5), steps.MultiStepLR(optimizer, [2, 3])], milestones=[2]
        )
        plateau = steps.ReduceLROnPlateau(optimizer, patience=0)
        return (
            model,
            optimizer,
            chain,
            plateau,
            attach(model, optimizer, scheduler={"chain": chain, "plateau": plateau}),
        )

    def step(model, optimizer, chain, plateau, live):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        chain.step()
        plateau.step(1.0)
        live.advance(samples=1)

    whole, half, resumed = build(), build(), build()
    whole[0].load_state_dict(half[0].state_dict())
    for _ in range(5):
        step(*whole)
    for _ in range(2):
        step(*half)
    resumed[-1].restore(half[-1].capture())
    for _ in range(3):
        step(*resumed)
    assert (
        differing(
            select(resumed[-1].capture(), ["model", "optimizer", "scheduler"]),
            select(whole[-1].capture(), ["model", "optimizer", "scheduler"]),
        )
        == []
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_a_state_of_an_older_torch_resumes(momentum, tmp_path):
    """W20: a buffer that is None, of before the first use of momentum, was saved, and its restore was refused."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: {"momentum_buffer": None}, 1: {"momentum_buffer": None}}, "param_groups": groups})  # fmt: skip
    trainfold.save(trainfold.attach(model, optimizer).capture(), tmp_path)
    other = torch.nn.Linear(3, 2)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=momentum)
    live = trainfold.attach(other, theirs)
    live.restore(trainfold.load(tmp_path, like=live.capture()))
    for one, steps in ((model, optimizer), (other, theirs)):
        for number in (1, 2):
            for parameter in one.parameters():
                parameter.grad = torch.full_like(parameter, number)
            steps.step()
    assert theirs.state_dict()["state"].keys() == {0, 1}
    for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, saved)
