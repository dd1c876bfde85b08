"""A mutable run as a value: captured, restored into new objects, and the same bits afterwards."""

import copy
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainfold.adapters.components.component import copied
from trainfold.adapters.components.optimizer import _device_of
from trainfold.adapters.live.live import Live, attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.errors import (
    IncompleteWindow,
    InvalidArgument,
    InvalidState,
    RestoreRefused,
    SpecMismatch,
    UnknownComponent,
)
from trainfold.core.state.components import components_of, select
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Opaque, Progress, TrainState

SAMPLES = 22
BATCH = 4  # the last batch of an epoch is short: 6 steps an epoch


class Net(nn.Module):
    """Dropout, batch norm, a tied pair, a frozen layer, a parameter without a gradient, a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(8, 8)
        self.tied_again = nn.Linear(8, 8)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(8, 1)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        x = self.drop(self.norm(self.embed(x)))
        x = torch.relu(self.tied(x)) + self.tied_again(x)
        return self.head(self.frozen(x))


class Averaged:
    """A user's own object: a moving average of the loss, kept in python and in a tensor."""

    def __init__(self):
        self.value = torch.zeros(())
        self.seen = 0

    def update(self, loss):
        self.value = 0.9 * self.value + 0.1 * loss.detach()
        self.seen += 1

    def state_dict(self):
        return {"value": self.value, "seen": self.seen}

    def load_state_dict(self, state):
        self.value, self.seen = state["value"], state["seen"]


class Job:
    """Everything of one run, made anew each time, as a script does."""

    def __init__(self, seed, *, optimizer=torch.optim.AdamW, workers=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global stream is the subject)
        data = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 5, generator=data)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.97**step)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.average = Averaged()
        self.live = attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            extra={"ema": self.ema, "average": self.average},
        )

    def run(self, steps):
        """Go on until the run has had so many steps."""
        for x, y in self.live.batches(steps=steps):
            noise = random.random() + float(np.random.normal()) + torch.randn(())  # noqa: NPY002 (the global stream is the subject)
            loss = ((self.model(x) - y - 0.01 * noise) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.average.update(loss)
            self.live.advance(samples=len(x))
        return self


def bits(state: TrainState) -> dict[str, Any]:
    """Every leaf of a state in a form that compares by bits."""

    def form(leaf):
        if isinstance(leaf, torch.Tensor):
            return (
                str(leaf.dtype),
                tuple(leaf.shape),
                leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        if isinstance(leaf, np.ndarray):
            return (str(leaf.dtype), leaf.shape, leaf.tobytes())
        return repr(leaf)

    return {
        path: form(leaf)
        for name, component in components_of(state).items()
        for path, leaf in tree.named_leaves(component, name)
    }


def differing(one: TrainState, other: TrainState) -> list[str]:
    left, right = bits(one), bits(other)
    return [path for path in {**left, **right} if left.get(path) != right.get(path)]


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted():
    """The states after each of 14 steps of one run: two epochs of 6 and some."""
    job = Job(0)
    return [copied(job.run(step).live.capture()) for step in range(15)]


@given(k=st.integers(0, 14), n=st.integers(0, 6), other_seed=st.integers(1, 2**31))
@example(k=6, n=6, other_seed=1)
@example(k=12, n=2, other_seed=1)
@example(k=5, n=3, other_seed=1)
@example(k=0, n=1, other_seed=1)
@settings(deadline=None, max_examples=25)
def test_k_steps_then_new_objects_then_n_steps_are_k_plus_n_steps(uninterrupted, k, n, other_seed):
    """V13, G01, G03, H01, B12: dropout, batch norm, shuffling, three random streams, schedule and averages; every bit."""
    n = min(n, 14 - k)
    resumed = Job(other_seed)
    resumed.live.restore(uninterrupted[k])
    assert differing(resumed.live.capture(), uninterrupted[k]) == []
    resumed.run(k + n)
    assert differing(resumed.live.capture(), uninterrupted[k + n]) == []


def test_a_run_driven_by_trainfold_has_the_bits_of_the_plain_loop():
    """C14: attaching, drawing batches and capturing at each step change nothing of the training."""
    job = Job(3)
    for step in range(1, 9):
        job.run(step).live.capture()
    plain = Job(3)
    done = 0
    while done < 8:
        for x, y in plain.loader:
            noise = random.random() + float(np.random.normal()) + torch.randn(())  # noqa: NPY002 (the global stream is the subject)
            loss = ((plain.model(x) - y - 0.01 * noise) ** 2).mean()
            plain.optimizer.zero_grad()
            loss.backward()
            plain.optimizer.step()
            plain.scheduler.step()
            done += 1
            if done == 8:
                break
    ours, theirs = job.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adafactor,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.ASGD,
    ],
)
def test_the_law_holds_for_optimizers_with_other_slots(optimizer):
    """B10: slots of any names and shapes, also where dimensions decide which slots there are."""
    whole = copied(Job(0, optimizer=optimizer).run(9).live.capture())
    half = copied(Job(0, optimizer=optimizer).run(4).live.capture())
    resumed = Job(9, optimizer=optimizer)
    resumed.live.restore(half)
    assert differing(resumed.run(9).live.capture(), whole) == []


def test_capture_copies_no_tensor_and_moves_nothing():
    """C14, H05: random streams, gradients, buffers, modes and position are as they were."""
    job = Job(0).run(3)
    job.model.eval()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (the global stream is the subject)
    gradients = [None if p.grad is None else p.grad.clone() for p in job.model.parameters()]
    before = copied(job.live.capture())
    state = job.live.capture()
    assert state.model.params["head.weight"].data_ptr() == job.model.head.weight.data_ptr()
    held = job.optimizer.state[job.model.head.weight]["exp_avg"]
    assert state.optimizer.slots["head.weight"]["exp_avg"] is held
    assert differing(state, before) == []
    assert not job.model.training
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert np.array_equal(streams[2][1], np.random.get_state()[1])  # noqa: NPY002 (the global stream is the subject)
    for parameter, gradient in zip(job.model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_a_restored_run_does_not_write_into_the_state_that_it_came_from():
    state = copied(Job(0).run(3).live.capture())
    kept = copied(state)
    resumed = Job(1)
    resumed.live.restore(state)
    resumed.run(6)
    assert differing(state, kept) == []


# --- what is in it ---------------------------------------------------------------------------------------------------


def test_non_persistent_buffers_are_not_in_a_state_and_ties_are_in_it_once():
    """B17, B19."""
    model = Job(0).live.capture().model
    assert "scratch" not in model.buffers
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} == set(model.buffers)
    assert "tied_again.weight" not in model.params
    assert model.ties == (("tied_again.weight", "tied.weight"),)


def test_a_restore_keeps_ties_and_the_objects_that_others_hold_on_to():
    """B19: parameters are overwritten in place, so the tie, the optimizer and the param groups stay what they were."""
    job = Job(1)
    before = list(job.model.parameters()), job.optimizer.param_groups[0]
    job.live.restore(Job(0).run(3).live.capture())
    assert all(one is other for one, other in zip(job.model.parameters(), before[0], strict=True))
    assert job.model.tied_again.weight is job.model.tied.weight
    assert job.optimizer.param_groups[0] is before[1]
    assert job.scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.97**3)
    assert not any(parameter.grad.any() for parameter in job.model.parameters() if parameter.grad is not None)


class Wrapper(nn.Module):
    """What DDP does to names."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_wrappers_at_any_depth_leave_no_trace_in_names():
    """B11, P27: a plain run resumes a wrapped and compiled one, and the other way round."""

    def build(wrap):
        torch.manual_seed(0)
        inner = nn.Linear(3, 3)
        block = nn.Sequential(Wrapper(inner) if wrap else inner, nn.Linear(3, 1))
        model = Wrapper(torch.compile(block, backend="eager")) if wrap else block
        optimizer = torch.optim.Adam(model.parameters())
        block(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return attach(model, optimizer)

    wrapped, plain = build(wrap=True), build(wrap=False)
    wrapped.advance(samples=2)
    plain.advance(samples=2)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(wrapped.capture().model.params) == list(wrapped.capture().optimizer.slots) == names
    plain.restore(wrapped.capture())
    wrapped.restore(plain.capture())


def ddp(model):
    return DistributedDataParallel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    model[0] = checkpoint_wrapper(model[0])
    return checkpoint_wrapper(model)


@pytest.mark.parametrize("wrap", [ddp, compiled, checkpointed])
def test_the_wrappers_of_torch_itself_leave_no_trace_in_names(wrap):
    """B11, P27: DDP over a real process group, a compiled module, activation checkpointing."""

    def build(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        live = attach(model, optimizer)
        live.advance(samples=2)
        return live

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped, plain = build(wrap), build(lambda model: model)
        names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(wrapped.capture().model.params) == list(wrapped.capture().optimizer.slots) == names
        plain.restore(wrapped.capture())
        wrapped.restore(plain.capture())
    finally:
        torch.distributed.destroy_process_group()


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
    """B10: torch's own moments have the shape of their parameter, all of them."""
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
    """Somebody's optimizer that keeps more for a large parameter than for a small one, and as much as it likes."""

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
    """B10: legal states are taken."""

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


class OneMore(nn.Module):
    """A module with a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_state_of_modules_travels_apart_from_the_weights():
    """B18 (one process): get_extra_state is a component of its own."""
    model, other = nn.Sequential(nn.Linear(1, 1), OneMore()), nn.Sequential(nn.Linear(1, 1), OneMore())
    model[1].scale = 0.25
    attach(other).restore(attach(model).capture())
    assert other[1].scale == 0.25


# --- refusals --------------------------------------------------------------------------------------------------------


def test_every_reason_is_listed_at_once_and_nothing_is_changed():
    """V12, V10: a failing restore leaves the live state as it was."""
    good = Job(0).run(3).live.capture()
    params = dict(good.model.params)
    params["head.weight"] = torch.zeros(1, 9)
    params["embed.weight"] = params["embed.weight"].double()
    params["ghost"] = params.pop("head.bias")
    rng = copy.deepcopy(good.rng.value)
    del rng["numpy"]
    bad = good.evolve(
        model=type(good.model)(Leaves(params), good.model.buffers, good.model.ties),
        trainer=Progress(step=-1),
        scheduler=Opaque({"strange": 1}),
        rng=Opaque(rng),
        extra={"ema": good.extra["ema"]},
    )
    job = Job(1).run(2)
    before = copied(job.live.capture())
    with pytest.raises(RestoreRefused) as caught:
        job.live.restore(bad)
    text = str(caught.value)
    for part in (
        "head.weight",
        "embed.weight",
        "ghost",
        "head.bias",
        "trainer.step",
        "scheduler",
        "rng['numpy']",
        "average",
    ):
        assert part in text
    assert any(isinstance(reason, SpecMismatch) for reason in caught.value.reasons)
    assert differing(job.live.capture(), before) == []
    went_on = copied(job.run(4).live.capture())
    assert differing(went_on, Job(1).run(4).live.capture()) == []


class Refuses(Averaged):
    """Changes itself, and then says no."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.seen == 3:
            raise RuntimeError("not today")


def test_an_object_that_refuses_halfway_takes_everything_back():
    """V12: an object's own load_state_dict can fail at any moment, also after others have taken their states."""
    job = Job(1)
    extra = {"first": Averaged(), "stubborn": Refuses(), "last": Averaged()}
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra=extra)
    theirs = Job(0).run(3).live.capture()
    state = theirs.evolve(extra=dict.fromkeys(extra, theirs.extra["average"]))
    before = copied(live.capture())
    with pytest.raises(RestoreRefused, match="not today"):
        live.restore(state)
    assert differing(live.capture(), before) == []


def test_a_step_counter_goes_where_torch_keeps_it():
    """B09: on the CPU, unless the kernels read it."""
    parameter = torch.empty(2, device="meta")
    assert _device_of("step", parameter, {"fused": None, "capturable": False}).type == "cpu"
    assert _device_of("step", parameter, {"fused": True}).type == "meta"
    assert _device_of("step", parameter, {"capturable": True}).type == "meta"
    assert _device_of("exp_avg", parameter, {}).type == "meta"


def test_a_missing_component_is_an_error_unless_it_is_left_out_by_name():
    """H04, B02: a missing random state is never silent; leaving it out is spelled out."""
    state = Job(0).run(2).live.capture().evolve(rng=None)
    job = Job(1)
    with pytest.raises(RestoreRefused, match="rng"):
        job.live.restore(state)
    before = torch.get_rng_state()
    job.live.restore(state, components=["model", "optimizer", "scheduler", "trainer", "dataset", "ema", "average"])
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(UnknownComponent, match="weights"):
        job.live.restore(state, components=["weights"])


def test_a_scheduler_without_its_optimizer_and_a_position_without_its_counters_are_refused():
    """B04, G10."""
    state = Job(0).run(2).live.capture()
    with pytest.raises(RestoreRefused, match="B04"):
        Job(1).live.restore(state, components=["model", "scheduler", "trainer"])
    with pytest.raises(RestoreRefused, match="G10"):
        Job(1).live.restore(state, components=["model", "dataset"])


def test_the_model_alone_can_be_restored_and_the_rest_stays():
    state = Job(0).run(3).live.capture()
    job = Job(1)
    job.live.restore(state, components=["model"])
    assert torch.equal(job.model.head.weight, state.model.params["head.weight"])
    assert job.live.progress == Progress()


def test_the_state_of_another_optimizer_is_refused():
    with pytest.raises(RestoreRefused, match=r"torch\.optim\.adamw\.AdamW.*torch\.optim\.sgd\.SGD|SGD.*AdamW"):
        Job(0).live.restore(Job(1, optimizer=torch.optim.SGD).live.capture())


@pytest.mark.parametrize("target", [object(), 3, (1, 2)])
def test_an_object_without_a_state_cannot_be_attached(target):
    with pytest.raises(InvalidArgument, match=r"extra\['thing'\]"):
        attach(nn.Linear(1, 1), extra={"thing": target})


def test_a_name_that_cannot_be_a_component_is_refused():
    with pytest.raises(InvalidArgument, match="optimizer"):
        attach(nn.Linear(1, 1), extra={"optimizer": Averaged()})


# --- later registration ----------------------------------------------------------------------------------------------


def test_a_component_registered_after_the_restore_gets_its_state(caplog):
    """B15: by stable name; what is left over is reported."""
    state = Job(0).run(3).live.capture()
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"ema": job.ema})
    live.restore(state)
    assert live.pending == ("average",)
    assert "average" in caplog.text
    late = Averaged()
    live.register("average", late)
    assert live.pending == ()
    assert late.seen == 3
    assert torch.equal(late.value, state.extra["average"].value["value"])
    with pytest.raises(InvalidArgument, match="new name"):
        live.register("average", Averaged())


def test_a_component_that_nothing_is_registered_for_yet_is_saved_through():
    """B15: what is kept until `register` is in every state that is captured until then, unchanged."""
    state = copied(Job(0).run(3).live.capture())
    expected = bits(state)
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"ema": job.ema})
    live.restore(state)
    state.extra["average"].value["value"].fill_(7)  # the caller goes on with its own
    state.extra["average"].value["seen"] = 7
    assert bits(live.capture()) == expected
    live.restore(copied(live.capture()), components=["model"])
    assert bits(live.capture()) == expected
    once_more = Job(2)
    once_more.live.restore(live.capture())
    assert once_more.average.seen == 3


def test_a_component_that_is_still_pending_outlives_the_checkpoints_before_it():
    """B15, E01: retention deletes the checkpoint that it came from."""
    store = MemoryStore()
    with CheckpointManager(store, keep_last=1) as manager:
        manager.save(Job(0).run(3).live)
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"average": job.average})
    with CheckpointManager(store, keep_last=1) as manager:
        manager.restore(live)
        for x, _y in live.batches(steps=4):
            live.advance(samples=len(x))
        manager.save(live)
    whole = Job(2)
    with CheckpointManager(store) as manager:
        assert manager.restore(whole.live).step == 4
    assert torch.equal(whole.ema.module.head.weight, Job(0).run(3).ema.module.head.weight)


def test_a_component_that_is_still_pending_does_not_keep_a_run_from_an_earlier_checkpoint():
    """B15: nothing in the run wants it, so a checkpoint without it, or with another one, is whole."""

    def build(**extra):
        model = nn.Linear(1, 1)
        return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), extra=extra)

    with CheckpointManager(MemoryStore()) as manager:
        for step, extra in enumerate(({}, {"ema": nn.Linear(1, 2)}, {"ema": nn.Linear(1, 3)}), 1):
            live = build(**extra)
            live.advance(samples=1, steps=step)
            manager.save(live)
        live = build()
        pending = [(manager.restore(live, step=step).step, live.pending) for step in (3, 2, 1)]
    assert pending == [(3, ("ema",)), (2, ("ema",)), (1, ())]


def test_a_component_that_this_run_has_no_object_for_is_ignored_and_said_so(caplog):
    """B02: a known component that this run does not produce, such as the position of a loop without a loader."""
    state = Job(0).run(3).live.capture()
    job = Job(1)
    live = attach(job.model, extra={"ema": job.ema, "average": job.average})
    live.restore(state)
    assert live.pending == ()
    assert "'dataset'" in caplog.text
    assert live.progress.step == 3


def test_a_tree_behind_two_functions_is_a_component():
    held = {"box": {"best": 0.5, "history": [1, 2]}}
    live = attach(nn.Linear(1, 1), extra={"notes": (lambda: held["box"], lambda value: held.update(box=value))})
    state = copied(live.capture())
    held["box"] = {"best": 0.1, "history": []}
    live.restore(state)
    assert held["box"] == {"best": 0.5, "history": [1, 2]}


# --- boundaries ------------------------------------------------------------------------------------------------------


def one_backward(job):
    x, y = next(iter(job.live.batches()))
    ((job.model(x) - y) ** 2).mean().backward()


def test_a_batch_handed_out_and_not_counted_is_an_open_window():
    """A06."""
    job = Job(0)
    next(job.live.batches())
    with pytest.raises(IncompleteWindow, match="batches handed out"):
        job.live.capture()


def test_gradients_of_half_a_window_are_seen():
    """A06."""
    job = Job(0)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler)
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()
    job.optimizer.step()
    with pytest.raises(IncompleteWindow, match="optimizer steps"):
        live.capture()
    live.advance(samples=4)
    live.capture()  # gradients are left, as before a zero_grad at the top of a loop
    job.optimizer.zero_grad(set_to_none=False)
    live.capture()  # zeros are no gradient
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()


def test_a_window_that_was_declared_open_is_open():
    """A06: advance(steps=0) inside the window; the boundary closes it."""
    live = Job(0).live
    batches = live.batches()
    x, _ = next(batches)
    live.advance(samples=len(x), steps=0)
    assert live.is_in_window
    with pytest.raises(IncompleteWindow, match="4 samples"):
        live.capture()
    x, _ = next(batches)
    assert live.advance(samples=len(x)) == Progress(step=1, samples=8)
    live.capture()


def test_a_window_left_open_by_the_end_of_the_data_is_given_up_whole():
    """A07: nothing partial is committed, no gradient leaks into what follows, and the samples count as consumed."""
    job = Job(0)
    for _x, _y in job.live.batches(epochs=1):
        pass
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow):
        job.live.capture()
    assert job.live.drop_window() == Progress(step=0, epoch=1, samples=SAMPLES)
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert job.live.capture().dataset.value["epoch"] == 1


def test_accumulation_over_the_end_of_an_epoch_resumes_exactly():
    """A07, A08: a window of four batches spans two epochs of six."""

    def run(job, until):
        window = []
        for batch in job.live.batches(steps=until):
            window.append(batch)
            if len(window) < 4:
                continue
            job.optimizer.zero_grad()
            for x, y in window:
                ((job.model(x) - y) ** 2).mean().backward()
            job.optimizer.step()
            job.scheduler.step()
            job.live.advance(samples=sum(len(x) for x, _ in window))
            window = []
        return job

    whole, half = copied(run(Job(0), 5).live.capture()), copied(run(Job(0), 2).live.capture())
    resumed = Job(7)
    resumed.live.restore(half)
    assert differing(run(resumed, 5).live.capture(), whole) == []


def test_a_finished_run_draws_nothing_when_it_is_started_again():
    """A11: not even an iterator is made."""
    job = Job(0).run(6)
    again = Job(0)
    again.live.restore(job.live.capture())
    streams = torch.get_rng_state()
    assert list(again.live.batches(steps=6)) == []
    assert list(again.live.batches(epochs=1)) == []
    assert torch.equal(streams, torch.get_rng_state())


@pytest.mark.parametrize("counts", [{"samples": -1}, {"steps": -1}, {"tokens": 1.5}, {"steps": True}])
def test_counters_only_go_up(counts):
    with pytest.raises(InvalidArgument, match="advance"):
        attach(nn.Linear(1, 1)).advance(**counts)


def test_the_contract_names_what_must_be_equal_and_leaves_out_what_moves():
    """V08: batch size, dataset, scheduler; the learning rate is the scheduler's."""
    contract = Job(0).live.contract()
    assert contract["batch_size"] == BATCH
    assert contract["dataset_size"] == SAMPLES
    assert contract["scheduler.kind"] == ["torch.optim.lr_scheduler.LambdaLR"]
    assert contract["optimizer.groups['embed.weight'].lr"] == "live"
    assert Job(0).run(3).live.contract() == contract


def test_an_optimizer_does_not_keep_a_run_alive():
    import gc
    import weakref

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    gone = weakref.ref(live._boundary)
    del live
    gc.collect()
    assert gone() is None
    optimizer.step()


def test_live_is_what_attach_returns():
    assert isinstance(attach(nn.Linear(1, 1)), Live)


def test_a_model_whose_shapes_are_not_known_yet_is_refused_with_what_to_do():
    """V12: before anything is read."""
    with pytest.raises(InvalidState, match=r"0\.weight.*run the model once"):
        attach(torch.nn.Sequential(torch.nn.LazyLinear(3)))
    with pytest.raises(InvalidState, match="meta device"):
        attach(torch.nn.Linear(2, 2, device="meta"))


class Answering(torch.nn.Linear):
    """A module that says itself what its parameters are: one more than are registered, and one of them not."""

    def __init__(self):
        super().__init__(2, 1)
        self.held = [torch.nn.Parameter(torch.full((3,), 7.0))]

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        yield "weight", self.weight
        yield "held", self.held[0]


def test_a_module_that_answers_for_its_parameters_is_asked():
    """B17: what it names is saved, and what it hides is not."""
    model = Answering()
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(live.capture().model.params) == ["weight", "held"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_with_its_last_reference_and_its_loaders_workers_with_it(tmp_path, workers):
    """G06: a run in a cycle of references would keep workers, and their pipes, until some later collection."""
    gc.collect()
    gc.disable()
    try:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
        live = attach(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1), loader=loader)
        with CheckpointManager(tmp_path / "run", every=1) as manager:
            manager.restore(live)
            for batch in live.batches(steps=2):
                live.advance(samples=len(batch))
                manager.step(live)
            live.restore(live.capture())
        held = [weakref.ref(live), weakref.ref(live._feed), weakref.ref(loader if workers else live)]
        del live, manager, loader
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()
