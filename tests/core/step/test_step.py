"""The step as a pure function: purity, equivalence with the hand-written loop, accumulation, ranks, and its refusals."""

import copy
import itertools
import math
import threading

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.data.cursor import make_cursor
from trainfold.core.errors import (
    InvalidArgument,
    InvalidBatch,
    InvalidState,
    NonFinite,
    RankFailed,
    ScheduleMismatch,
    SharedStorage,
    SpecMismatch,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.optim import schedule as schedules
from trainfold.core.optim.optimizer import optimizer
from trainfold.core.rng import fold_in, forked_rng, make_key
from trainfold.core.state.fqn import canonical_name
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.microbatch import split
from trainfold.core.step.step import make_step


class Net(torch.nn.Module):
    """Everything that a step could leave a trace of: batch statistics, dropout, a tie, a frozen part, a cache."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.cache += 1
        assert self.cache[0] <= 3, "the cache of an earlier step is still there"
        hidden = self.drop(self.norm(self.embed(x)))
        return self.head(self.frozen(hidden) + hidden)


def net_loss(model, batch):
    nll = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return Loss(sum=nll, weight=batch["y"].numel(), metrics={"half": (1, 2)})


def make_net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def make_batch(seed, samples=6):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(7, (2, samples), generator=generator)
    return {"x": x, "y": y}


def bits(value):
    return [(path, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in tree.named_leaves(value)]


def assert_same_bits(left, right):
    left, right = bits(left), bits(right)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, path
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), path
        else:
            assert a == b, path


def adamw(**hyper):
    return optimizer(torch.optim.AdamW, lr=0.01, **hyper)


def linear_state(opt, values=(1.0, 2.0), extra=None):
    model = torch.nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    return model, init_state(model, opt, extra=extra)


def linear_loss(model, batch):
    """The gradient of the weight is the sum of the masked rows of x: exact in integers."""
    out = model(batch["x"])[:, 0] * batch["mask"]
    return Loss(sum=out.sum(), weight=batch["mask"].sum(), metrics={"rows": batch["mask"].sum()})


# --- purity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_leaves_the_model_and_the_global_random_state_as_they_were(donate):
    model = make_net().eval()
    before = copy.deepcopy(model.state_dict())
    state = init_state(model, adamw())
    random = torch.get_rng_state()
    step = make_step(model, net_loss, adamw(), donate=donate)
    for index in range(3):
        state, _ = step(state, make_batch(index))
    assert torch.equal(random, torch.get_rng_state())
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.cache.tolist() == [0, 0]
    assert all(param.grad is None for param in model.parameters())


@settings(max_examples=15, deadline=None)
@given(steps=st.integers(0, 3), accumulate=st.integers(1, 3), clip=st.sampled_from([None, 0.1]))
def test_a_pure_step_leaves_its_input_and_gives_the_same_twice(steps, accumulate, clip):
    model = make_net()
    step = make_step(model, net_loss, adamw(), accumulate=accumulate, clip_norm=clip)
    state = init_state(model, adamw())
    for index in range(steps):
        state, _ = step(state, make_batch(index))
    before = tree.map_tensors(torch.clone, state)
    first, first_metrics = step(state, make_batch(9))
    second, second_metrics = step(state, make_batch(9))
    assert_same_bits(before, state)
    assert_same_bits(first, second)
    assert first_metrics == second_metrics


def test_dropout_is_a_function_of_the_state_and_not_of_the_global_seed():
    model = make_net()
    step = make_step(model, net_loss, adamw())
    state = init_state(model, adamw(), seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, _ = step(state, make_batch(0))
        torch.manual_seed(2)
        second, _ = step(state, make_batch(0))
    assert_same_bits(first, second)
    other, _ = step(init_state(model, adamw(), seed=4), make_batch(0))
    assert not torch.equal(first.model.params["embed.weight"], other.model.params["embed.weight"])


def test_a_failing_loss_function_leaves_a_donated_state_as_it_was():
    model = make_net()
    fail = []

    def loss_fn(model, batch):
        loss = net_loss(model, batch)
        if fail:
            raise RuntimeError("boom")
        return loss

    step = make_step(model, loss_fn, adamw(), donate=True)
    state, _ = step(init_state(model, adamw()), make_batch(0))
    before = tree.map_tensors(torch.clone, state)
    random = torch.get_rng_state()
    fail.append(1)
    with pytest.raises(RuntimeError, match="boom"):
        step(state, make_batch(1))
    assert torch.equal(random, torch.get_rng_state())
    assert_same_bits(before, state)
    fail.clear()
    after, _ = step(state, make_batch(1))
    assert after.trainer.step == 2


# --- mutable equivalence ---------------------------------------------------------------------------------------------

OPTIMIZERS = [
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Adagrad", {}),
    ("Adam", {"amsgrad": True}),
    ("Adamax", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("ASGD", {}),
    ("Muon", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9}),
]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("name", "hyper"), OPTIMIZERS, ids=[f"{n}-{h}" for n, h in OPTIMIZERS])
def test_pure_steps_give_the_bits_of_the_hand_written_loop(name, hyper, donate):
    """A04: accumulation of one is the plain backward of the mean; then clip, step, schedule, with the same bits."""
    cls = getattr(torch.optim, name)
    model = make_net()
    if name == "Muon":  # takes matrices only
        model.norm = torch.nn.BatchNorm1d(4, affine=False)
        model.frozen = torch.nn.Identity()
    opt = optimizer(cls, lr=0.01, **hyper)
    decay = schedules.linear(8)
    step = make_step(model, net_loss, opt, schedule=decay, clip_norm=0.5, donate=donate)
    state = init_state(model, opt)

    theirs = copy.deepcopy(model).train()
    inner = cls(theirs.parameters(), lr=0.01, **hyper)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, decay)
    for index in range(4):
        batch = make_batch(index)
        theirs.cache.zero_()
        key = fold_in(state.rng, f"step {index} microbatch 0 rank 0")
        with forked_rng(key):
            loss = net_loss(theirs, batch)
            (loss.sum / loss.weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        rate = inner.param_groups[0]["lr"]
        inner.step()
        inner.zero_grad()
        scheduler.step()
        state, metrics = step(state, batch)
        assert metrics["grad_norm"] == norm.item()
        assert metrics["lr"] == rate
        assert metrics["half"] == 0.5
    expected = theirs.state_dict()
    found = {**state.model.params, **state.model.buffers}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for key, param in theirs.named_parameters():
        assert state.optimizer.slots.get(key, {}).keys() == inner.state.get(param, {}).keys()
    assert state.trainer == attrs.evolve(state.trainer, step=4, samples=24, tokens=24)


def test_accumulation_is_the_sum_of_the_sums_divided_once():
    model = make_net()
    opt = optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    step = make_step(model, net_loss, opt, accumulate=3)
    state = init_state(model, opt)
    theirs = copy.deepcopy(model).train()
    inner = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    for index in range(3):
        micro, _ = split(make_batch(index, samples=8), 3)
        assert [len(part["x"]) for part in micro] == [3, 3, 2]
        theirs.cache.zero_()
        for position, part in enumerate(micro):
            with forked_rng(fold_in(state.rng, f"step {index} microbatch {position} rank 0")):
                net_loss(theirs, part).sum.backward()
        for param in theirs.parameters():
            if param.grad is not None:
                param.grad.div_(8)
        inner.step()
        inner.zero_grad()
        ready = micro if index == 1 else make_batch(index, samples=8)
        state, _ = step(state, ready)
    assert torch.equal(state.model.params["embed.weight"], theirs.embed.weight.detach())


def test_masters_in_a_step_are_those_of_the_pure_update():
    """B08: the gradient of each microbatch goes to fp32 before it is added."""
    model = torch.nn.Linear(3, 2).bfloat16()

    def loss_fn(model, batch):
        return Loss(sum=model(batch).float().pow(2).sum(), weight=len(batch))

    opt = adamw(masters=True)
    state = init_state(model, opt)
    step = make_step(model, loss_fn, opt, accumulate=2, donate=True)
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    params, opt_state = dict(init_state(model, opt).model.params), opt.init(state.model.params)
    for batch in batches:
        grads = {name: torch.zeros(value.shape) for name, value in params.items()}
        for part in batch.split(2):
            leafs = {name: value.clone().requires_grad_() for name, value in params.items()}
            loss_fn(lambda x, leafs=leafs: torch.func.functional_call(model, leafs, (x,)), part).sum.backward()
            for name, leaf in leafs.items():
                grads[name] += leaf.grad.float()
        params, opt_state = opt.update({name: grad / 4 for name, grad in grads.items()}, opt_state, params)
        state, _ = step(state, batch)
    assert_same_bits(dict(state.model.params), params)
    assert_same_bits(state.optimizer, opt_state)


def test_any_pair_of_pure_functions_is_an_optimizer():
    def init(params):
        return {"count": 0}

    def update(grads, opt_state, params, *, lr_factor=1.0):
        new = {
            name: value - 0.5 * lr_factor * grads[name] if name in grads else value for name, value in params.items()
        }
        return new, {"count": opt_state["count"] + 1}

    model = make_net()
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    decay = schedules.linear(4)
    mine, theirs = init_state(model, (init, update)), init_state(model, sgd)
    my_step = make_step(model, net_loss, (init, update), schedule=decay, clip_norm=1.0)
    their_step = make_step(model, net_loss, sgd, schedule=decay, clip_norm=1.0)
    for index in range(3):
        before = tree.map_tensors(torch.clone, mine)
        kept = mine
        mine, metrics = my_step(mine, make_batch(index))
        assert_same_bits(before, kept)
        theirs, _ = their_step(theirs, make_batch(index))
    assert metrics["lr_factor"] == 0.5
    assert mine.optimizer == {"count": 3}
    assert_same_bits(mine.model.buffers, theirs.model.buffers)
    torch.testing.assert_close(dict(mine.model.params), dict(theirs.model.params))


# --- accumulation ----------------------------------------------------------------------------------------------------

ROWS = 16


@st.composite
def windows_of_rows(draw):
    """Rows of small integers, a mask whose weight is a power of two, and a split with empty and weightless parts."""
    x = draw(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=ROWS, max_size=ROWS))
    count = draw(st.sampled_from([1, 2, 4, 8, 16]))
    on = draw(st.permutations(range(ROWS)))[:count]
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1), max_size=5)))
    mask = torch.zeros(ROWS)
    mask[on] = 1
    return {"x": torch.tensor(x, dtype=torch.float32), "mask": mask}, cuts


def _parts(batch, cuts):
    edges = [0, *cuts, ROWS]
    return [{name: value[start:stop] for name, value in batch.items()} for start, stop in itertools.pairwise(edges)]


@settings(max_examples=40, deadline=None)
@given(windows_of_rows())
def test_any_split_of_a_window_gives_the_same_step(window):
    """A01: unequal valid counts and microbatches of weight 0; exact, because integers and powers of two are."""
    batch, cuts = window
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    whole, whole_metrics = make_step(model, linear_loss, sgd)(state, batch)
    parts, parts_metrics = make_step(model, linear_loss, sgd, accumulate=6)(state, _parts(batch, cuts))
    assert_same_bits(whole, parts)
    assert whole_metrics == parts_metrics
    assert whole_metrics["weight"] == batch["mask"].sum()
    assert whole_metrics["rows"] == 1.0


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 11), max_size=6), seed=st.integers(0, 99))
def test_any_split_gives_the_same_gradient_to_float_tolerance(cuts, seed):
    """A01: N microbatches give the parameters of one batch, to float tolerance, for any split."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
    batch = (torch.randn(12, 3, generator=generator), torch.randint(-1, 4, (12,), generator=generator))
    batch[1][0] = 1

    def loss_fn(model, batch):
        nll = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-1, reduction="sum")
        return Loss(sum=nll, weight=(batch[1] >= 0).sum())

    sgd = optimizer(torch.optim.SGD, lr=1.0)
    state = init_state(model, sgd)
    edges = [0, *sorted(cuts), 12]
    parts = [tuple(t[a:b] for t in batch) for a, b in itertools.pairwise(edges)]
    whole, _ = make_step(model, loss_fn, sgd)(state, batch)
    split_up, _ = make_step(model, loss_fn, sgd, accumulate=7)(state, parts)
    torch.testing.assert_close(dict(whole.model.params), dict(split_up.model.params), rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(window=windows_of_rows(), world_size=st.integers(1, 8), accumulate=st.integers(1, 2))
def test_ranks_divide_by_the_global_weight_and_hold_the_same_bits(window, world_size, accumulate):
    """A02: the denominator is that of all ranks and all microbatches; ranks with fewer rows or no weight included."""
    batch, _ = window
    sgd = optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    model, state = linear_state(sgd)
    whole, whole_metrics = make_step(model, linear_loss, sgd)(state, batch)

    def rank(ranks):
        step = make_step(model, linear_loss, sgd, accumulate=accumulate, collectives=ranks)
        share, _ = split(batch, world_size)
        return step(state, share[ranks.rank])

    for after, metrics in run_threads(world_size, rank):
        assert_same_bits(whole, after)
        assert metrics == whole_metrics


def test_a_parameter_that_only_some_ranks_used_has_one_gradient_on_all():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(2))
            self.b = torch.nn.Parameter(torch.ones(2))
            self.never = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * (self.a if x.sum() > 0 else self.b)

    def loss_fn(model, x):
        return Loss(sum=model(x).sum(), weight=len(x))

    adam = optimizer(torch.optim.Adam, lr=0.1)
    state = init_state(Two(), adam)

    def rank(ranks):
        step = make_step(Two(), loss_fn, adam, collectives=ranks)
        return step(state, torch.full((1, 2), 1.0 if ranks.rank == 0 else -1.0))[0]

    first, second = run_threads(2, rank)
    assert_same_bits(first, second)
    assert set(first.optimizer.slots) == {"a", "b"}


# --- the guard -------------------------------------------------------------------------------------------------------


def bad_loss(model, batch):
    loss = net_loss(model, {"x": batch["x"], "y": batch["y"]})
    return Loss(sum=loss.sum * batch["scale"].sum(), weight=loss.weight)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_anything_changed(donate, scale, accumulate):
    """A09: no parameter, buffer or optimizer state changed; a skipped step advances the data and nothing else."""
    model = make_net()
    decay = schedules.linear(9)
    step = make_step(model, bad_loss, adamw(), schedule=decay, accumulate=accumulate, donate=donate)
    good = {**make_batch(0), "scale": torch.ones(6) / 6}
    state, _ = step(init_state(model, adamw()), good)
    before = tree.map_tensors(torch.clone, state)
    with pytest.raises(NonFinite) as caught:
        step(state, {**make_batch(1), "scale": torch.tensor([0, 0, 0, 0, 0, scale])})
    assert_same_bits(before, state)
    skipped = caught.value.skipped
    assert skipped.trainer == attrs.evolve(state.trainer, samples=12)
    after, metrics = step(skipped, good)
    assert metrics["lr"] == 0.01 * decay(1)
    assert (after.trainer.step, after.trainer.samples) == (2, 18)
    reference, _ = make_step(model, bad_loss, adamw(), schedule=decay, accumulate=accumulate)(before, good)
    assert_same_bits(after.model, reference.model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("donate", [False, True])
def test_a_loop_gets_past_a_bad_batch_and_reads_every_other_sample_once(donate, accumulate):
    """A09: a step that was skipped has advanced the data position too, over the end of an epoch as well."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    length, size, epochs = 20, 4, 3
    x = torch.ones(length, 2)
    x[7] = float("nan")
    step = make_step(model, linear_loss, sgd, accumulate=accumulate, donate=donate)
    state = state.evolve(dataset=make_cursor(length, seed=3))
    read, bad = [], []
    for _ in range(epochs * length // size):  # the shape of examples/functional_loop.py
        cursor = state.dataset
        chosen = cursor.batch_across(size)
        try:
            state, _ = step(state, {"x": x[torch.from_numpy(chosen)], "mask": torch.ones(size)})
        except NonFinite as error:
            state = error.skipped
            bad.append(chosen)
            continue
        state = state.evolve(dataset=cursor.advance(size))
        read.extend(chosen.tolist())
    assert len(bad) == epochs
    assert all(7 in chosen for chosen in bad)
    everything = sorted(read + [index for chosen in bad for index in chosen.tolist()])
    assert everything == sorted(list(range(length)) * epochs)
    assert state.dataset == make_cursor(length, seed=3, epoch=epochs)
    assert (state.trainer.step, state.trainer.samples) == (epochs * (length // size - 1), epochs * length)


def test_a_skipped_step_leaves_a_position_of_another_kind_to_the_caller():
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    state = state.evolve(dataset={"shard": 3})
    with pytest.raises(NonFinite, match=r"go on from error\.skipped") as caught:
        make_step(model, linear_loss, sgd)(state, {"x": torch.full((2, 2), float("nan")), "mask": torch.ones(2)})
    assert caught.value.skipped.dataset == {"shard": 3}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [None, 1, 2])
@pytest.mark.parametrize(
    "cut", [torch.detach, lambda total: torch.zeros(()), lambda total: torch.ones(()).requires_grad_()]
)
def test_a_loss_that_depends_on_no_parameter_is_named_before_anything_changed(donate, accumulate, world_size, cut):
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    batch = {"x": torch.ones(2, 2), "mask": torch.ones(2)}

    def loss_fn(model, batch):
        loss = linear_loss(model, batch)
        return Loss(sum=cut(loss.sum), weight=loss.weight)

    def rank(ranks):
        mine = tree.map_tensors(torch.clone, state)
        step = make_step(model, loss_fn, sgd, donate=donate, accumulate=accumulate, collectives=ranks)
        with pytest.raises(InvalidArgument, match=r"loss_fn: .* does not depend on any parameter"):
            step(mine, batch)
        assert_same_bits(mine, state)

    rank(None) if world_size is None else run_threads(world_size, rank)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_constant_loss_without_a_weight_is_a_window_without_a_valid_token(accumulate):
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    step = make_step(model, lambda model, batch: Loss(sum=torch.zeros(()), weight=0), sgd, accumulate=accumulate)
    with pytest.raises(InvalidBatch, match="loss weights"):
        step(state, {"x": torch.ones(2, 2), "mask": torch.ones(2)})


def test_a_gradient_that_is_not_finite_stops_although_the_loss_is():
    def loss_fn(model, batch):
        return Loss(sum=(model(batch) * 0).abs().sqrt().sum(), weight=len(batch))

    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    with pytest.raises(NonFinite, match="gradient norm nan"):
        make_step(model, loss_fn, sgd)(state, torch.ones(2, 2))


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_bad_loss_on_one_rank_stops_all_ranks_and_is_named(bad_rank):
    """A09: a non-finite loss on any rank stops all ranks before anything changes."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)

    def rank(ranks):
        step = make_step(model, linear_loss, sgd, donate=True, collectives=ranks)
        mine = tree.map_tensors(torch.clone, state).evolve(dataset=make_cursor(100, next_index=97))
        x = torch.ones(2, 2) * (float("nan") if ranks.rank == bad_rank else 1.0)
        with pytest.raises(NonFinite) as caught:
            step(mine, {"x": x, "mask": torch.ones(2)})
        assert_same_bits(mine.model, state.model)
        assert_same_bits(mine.optimizer, state.optimizer)
        assert caught.value.skipped.trainer.samples == 6
        assert caught.value.skipped.dataset == make_cursor(100, epoch=1, next_index=3)
        return str(caught.value)

    messages = run_threads(3, rank)
    assert all(f"not finite on ranks [{bad_rank}]" in message for message in messages)


def test_no_weight_on_any_rank_raises_on_every_rank():
    """A02: a denominator of 0 raises everywhere, and a rank without weight is fine where others have some."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)

    def rank(ranks):
        step = make_step(model, linear_loss, sgd, collectives=ranks)
        nothing = {"x": torch.ones(2, 2), "mask": torch.zeros(2)}
        with pytest.raises(InvalidBatch, match="weights"):
            step(state, nothing)
        some = {**nothing, "mask": torch.full((2,), float(ranks.rank))}
        return step(state, some)[1]["weight"]

    assert run_threads(3, rank) == [6.0, 6.0, 6.0]
    with pytest.raises(InvalidBatch, match="weights"):
        make_step(model, linear_loss, sgd)(state, {"x": torch.ones(2, 2), "mask": torch.zeros(2)})


def test_a_rank_that_fails_in_its_forward_does_not_leave_the_others_waiting():
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)

    def rank(ranks):
        def loss_fn(model, batch):
            if ranks.rank == 1:
                raise RuntimeError("boom")
            return linear_loss(model, batch)

        step = make_step(model, loss_fn, sgd, collectives=ranks)
        with pytest.raises((RankFailed, RuntimeError)):
            step(state, {"x": torch.ones(2, 2), "mask": torch.ones(2)})
        return True

    assert run_threads(3, rank) == [True] * 3


# --- boundaries, schedules and counters ------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [False, True])
def test_a_state_exists_only_at_a_boundary(donate):
    """A05, A06: whoever looks, logs or saves inside a window of k microbatches finds the state before it, bit for bit.

    The loss function stands for every hook: it is called in the middle of windows, and looks at the run from there.
    """
    sgd = optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    run, store = {}, MemoryStore()
    boundaries, inside, logged = [], [], []

    def loss_fn(model, batch):
        loss = linear_loss(model, batch)  # a forward writes the statistics of its batch
        inside.append((len(batch["x"]), run["state"].trainer.step, fingerprint(run["state"])))
        save(run["state"], store)
        return loss

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    run["state"] = init_state(model, sgd)
    step = make_step(model, loss_fn, sgd, accumulate=3, donate=donate)
    for index in range(4):
        boundaries.append((index, fingerprint(run["state"])))
        run["state"], metrics = step(run["state"], {"x": torch.ones(6, 2), "mask": torch.ones(6)})
        logged.append((run["state"].trainer.step, metrics["weight"]))
    assert inside == [(2, *boundary) for boundary in boundaries for _ in range(3)]
    assert logged == [(1, 6.0), (2, 6.0), (3, 6.0), (4, 6.0)]
    assert [entry.head.step for entry in read_inventory(store).entries] == [0, 1, 2, 3]
    for index, digests in boundaries:
        assert fingerprint(load(store, like=run["state"], step=index)) == digests
    assert (run["state"].trainer.samples, run["state"].trainer.tokens) == (24, 24)


def test_counters_stay_exact_past_two_to_the_fifty():
    """B14: counters are Python ints; a weight that is not whole is rounded to the nearest token."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    big = 2**60
    state = state.evolve(trainer=attrs.evolve(state.trainer, samples=big, tokens=big))

    def loss_fn(model, batch):
        return Loss(sum=model(batch).sum(), weight=2.6)

    after, _ = make_step(model, loss_fn, sgd)(state, torch.ones(1, 2))
    assert (after.trainer.samples, after.trainer.tokens) == (big + 1, big + 3)


def test_the_schedule_of_a_state_is_kept_and_compared():
    """A13, B12: the horizon is persisted with the state, and another one is refused, naming both."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    batch = {"x": torch.ones(1, 2), "mask": torch.ones(1)}
    state, _ = make_step(model, linear_loss, sgd, schedule=schedules.cosine(100))(state, batch)
    assert state.scheduler == schedules.cosine(100).describe()
    assert state.scheduler["total_steps"] == 100
    with pytest.raises(ScheduleMismatch, match=r"200.*100"):
        make_step(model, linear_loss, sgd, schedule=schedules.cosine(200))(state, batch)
    with pytest.raises(ScheduleMismatch):
        make_step(model, linear_loss, sgd)(state, batch)
    changed = state.evolve(scheduler=None)
    after, _ = make_step(model, linear_loss, sgd, schedule=schedules.cosine(200))(changed, batch)
    assert after.scheduler["total_steps"] == 200


def test_other_components_pass_through_untouched():
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    ema = {"w": torch.ones(2)}
    model, state = linear_state(sgd, extra={"ema": ema})
    state = state.evolve(dataset={"epoch": 3})
    after, _ = make_step(model, linear_loss, sgd, donate=True)(state, {"x": torch.ones(1, 2), "mask": torch.ones(1)})
    assert after.extra["ema"] is ema
    assert after.dataset is state.dataset
    assert after.rng is state.rng


def test_steps_in_flight_in_threads_do_not_share_a_template():
    model = make_net()
    step = make_step(model, net_loss, adamw(), donate=True)
    expected = []
    for seed in range(4):
        state = init_state(model, adamw(), seed=seed)
        for index in range(3):
            state, _ = step(state, make_batch(index))
        expected.append(state)
    found = [None] * 4

    def work(seed):
        state = init_state(model, adamw(), seed=seed)
        for index in range(3):
            state, _ = step(state, make_batch(index))
        found[seed] = state

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)


# --- names, ties and refusals ----------------------------------------------------------------------------------------


def make_mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
        model.add_module("head", torch.nn.Linear(3, 1))
        return model


def mlp_loss(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner

    def forward(self, x):
        return self._orig_mod(x)


def test_wrappers_do_not_show_in_a_state():
    """B11: the same names with a wrapper and without it, at any depth."""
    plain, wrapped = make_net(), make_net()
    wrapped.head = Wrapper(wrapped.head)
    wrapped = Wrapper(wrapped)
    assert_same_bits(init_state(plain, adamw()), init_state(wrapped, adamw()))
    state, _ = make_step(wrapped, net_loss, adamw())(init_state(plain, adamw()), make_batch(0))
    assert "embed.weight" in state.model.params


@pytest.fixture
def process_group():
    """A world of one process, for wrappers that ask for one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    model.head = checkpoint_wrapper(model.head)
    return checkpoint_wrapper(model)


@pytest.mark.parametrize("wrap", [compiled, checkpointed])
def test_the_wrappers_of_torch_leave_no_trace_in_a_state_nor_in_its_steps(wrap):
    """B11: the same names, and the same bits of a step where the wrapper does not change the arithmetic."""
    plain, wrapped = make_mlp(), wrap(make_mlp())
    assert any(name.startswith(("_orig_mod.", "_checkpoint_wrapped")) for name, _ in wrapped.named_modules())
    state = init_state(plain, adamw())
    assert_same_bits(state, init_state(wrapped, adamw()))
    batch = torch.ones(3, 2)
    assert_same_bits(
        make_step(plain, mlp_loss, adamw())(state, batch)[0], make_step(wrapped, mlp_loss, adamw())(state, batch)[0]
    )


@pytest.mark.usefixtures("process_group")
def test_a_model_that_communicates_is_named_and_refused_while_its_weights_are_welcome():
    """B11: a step of DDP would average over the ranks a second time; its names are canonical all the same."""
    plain, wrapped = make_mlp(), DistributedDataParallel(make_mlp())
    state = init_state(wrapped, adamw())
    assert_same_bits(init_state(plain, adamw()), state)
    with pytest.raises(InvalidArgument, match=r"^model: .*DistributedDataParallel; pass the module inside"):
        make_step(wrapped, mlp_loss, adamw())
    inside = torch.nn.Sequential(plain, DistributedDataParallel(make_mlp()))
    with pytest.raises(InvalidArgument, match=r"^model\.1: "):
        make_step(inside, mlp_loss, adamw())
    make_step(wrapped.module, mlp_loss, adamw())(state, torch.ones(3, 2))


@pytest.mark.usefixtures("process_group")
def test_a_model_that_fsdp_sharded_is_refused():
    sharded = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InvalidArgument, match=r"FSDPLinear; pass the module inside"):
        make_step(sharded, mlp_loss, adamw())


@given(st.lists(st.sampled_from(["module", "_orig_mod", "h", "0", "_checkpoint_wrapped_module"]), min_size=1))
def test_a_canonical_name_is_canonical(parts):
    name = canonical_name(".".join(parts))
    assert canonical_name(name) == name


def test_tied_parameters_are_one_leaf_and_stay_tied():
    """B19: a tie is stored once, trained as one, and compared when a state meets a model."""
    model = make_net()
    state = init_state(model, adamw())
    assert state.model.ties == (("head.weight", "embed.weight"),)
    assert "head.weight" not in state.model.params
    untied = make_net()
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(SpecMismatch, match=r"head\.weight"):
        make_step(untied, net_loss, adamw())(state, make_batch(0))


def test_parameters_that_share_storage_without_being_tied_are_reported():
    """B19: storage that a state cannot share is found at the start."""
    model = make_net()
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach())
    with pytest.raises(SharedStorage, match=r"embed\.weight"):
        init_state(model, adamw())


def test_non_persistent_buffers_are_no_state():
    """B17: they are not in the state, and are pristine in each step (the model asserts it)."""
    assert list(init_state(make_net(), adamw()).model.buffers) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_a_buffer_that_the_forward_assigns_anew_is_carried_on():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.w

    def loss_fn(model, x):
        return Loss(sum=model(x).sum(), weight=len(x))

    sgd = optimizer(torch.optim.SGD, lr=0.5)
    for donate in (False, True):
        step = make_step(Counter(), loss_fn, sgd, donate=donate)
        state = init_state(Counter(), sgd)
        for index in range(3):
            before = state if not donate else None
            state, _ = step(state, torch.ones(2))
            assert state.model.buffers["count"] == index + 1
            assert before is None or before.model.buffers["count"] == index


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m, o: make_step(m, net_loss, o, accumulate=0), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, o, clip_norm=0.0), InvalidArgument),
        (lambda m, o: make_step(net_loss, net_loss, o), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, (o.init, o.update), donate=True), InvalidArgument),
        (lambda m, o: make_step(copy.deepcopy(m).to("meta"), net_loss, o), InvalidState),
        (lambda m, o: make_step(torch.nn.LazyLinear(2), net_loss, o), InvalidState),
        (lambda m, o: make_step(m, lambda *_: 1.0, o)(init_state(m, o), make_batch(0)), InvalidArgument),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(optimizer=None), make_batch(0)), InvalidState),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(optimizer={}), make_batch(0)), InvalidState),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o).evolve(rng={}), make_batch(0)), InvalidState),
        (
            lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": torch.ones(2), "y": torch.ones(3)}),
            InvalidBatch,
        ),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": torch.ones(0)}), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), {"x": 3}), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o)(init_state(m, o), [torch.ones(2), torch.ones(2)]), InvalidBatch),
        (lambda m, o: make_step(m, net_loss, o, accumulate=7)(init_state(m, o), make_batch(0)), InvalidBatch),
        (lambda m, o: make_step(torch.nn.Linear(2, 2), net_loss, o)(init_state(m, o), make_batch(0)), SpecMismatch),
    ],
)
def test_what_cannot_work_has_a_named_error(call, error):
    with pytest.raises(error):
        call(make_net(), adamw())


def test_the_contract_is_plain_scalars():
    contract = make_step(make_net(), net_loss, adamw(), accumulate=2, clip_norm=1).contract
    assert contract == {"step.accumulate": 2, "step.clip_norm": 1.0}


def test_states_that_were_rebuilt_from_leaves_go_on_with_the_same_bits():
    """What a load gives: equal leaves in new containers; the worker binds them anew."""
    model = make_net()
    step = make_step(model, net_loss, adamw(), donate=True)
    straight, resumed = init_state(model, adamw()), init_state(model, adamw())
    for index in range(3):
        straight, _ = step(straight, make_batch(index))
        resumed, _ = step(tree.map_tensors(torch.clone, resumed), make_batch(index))
    assert isinstance(resumed.optimizer, OptimizerState)
    assert isinstance(resumed.model.params, Leaves)
    assert_same_bits(straight, resumed)


def test_a_model_that_cannot_be_copied_is_refused_with_the_attribute_that_is_in_the_way():
    with pytest.warns(FutureWarning):
        normed = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"model\.0\.weight: .*parametrizations"):
        make_step(torch.nn.Sequential(normed), net_loss, adamw())
    locked = make_net()
    locked.guard = threading.Lock()
    with pytest.raises(InvalidArgument, match=r"model\.guard: .*lock"):
        make_step(locked, net_loss, adamw())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_step_computes_in_the_modes_of_a_model_in_training(donate, frozen, in_eval):
    """The loop that puts a normalisation into eval mode after ``model.train()`` is matched bit for bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model.train(not in_eval)
    if frozen:
        model[1].eval()
    sgd = optimizer(torch.optim.SGD, lr=0.1)

    def loss_fn(module, batch):
        return Loss(sum=module(batch).square().sum(), weight=len(batch))

    state = init_state(model, sgd)
    x = torch.randn(8, 3)
    after, _ = make_step(model, loss_fn, sgd, donate=donate)(state, x)
    loop = copy.deepcopy(model)
    if in_eval:
        loop.train()
    loss = loss_fn(loop, x)
    (loss.sum / loss.weight).backward()
    torch.optim.SGD(loop.parameters(), lr=0.1).step()
    for name, value in loop.state_dict().items():
        mine = after.model.params[name] if name in after.model.params else after.model.buffers[name]
        assert torch.equal(mine, value), name
    assert model[1].training is not (frozen or in_eval)


def test_a_loss_function_that_finds_its_own_loss_not_finite_is_skipped_like_any_other():
    """A09."""

    def loss_fn(model, batch):
        raise NonFinite("my loss", expected="a finite one", found="inf", fix="look at the batch")

    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(NonFinite) as caught:
        make_step(model, loss_fn, sgd)(init_state(model, sgd), torch.ones(5, 2))
    assert caught.value.skipped.trainer.samples == 5


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("frozen_masters", [False, True])
def test_a_step_that_failed_has_not_happened_wherever_it_failed(donate, frozen_masters):
    """A09: a schedule that raises once leaves no gradient, no buffer and no binding behind."""
    calls = []

    def schedule(step):
        calls.append(step)
        if len(calls) == 2:
            raise RuntimeError("the schedule failed")
        return 0.5

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = model.bfloat16() if frozen_masters else model
    adamw = optimizer(torch.optim.AdamW, lr=0.1, masters=frozen_masters)

    def loss_fn(module, batch):
        return Loss(sum=module(batch).square().sum(), weight=len(batch))

    step = make_step(model, loss_fn, adamw, schedule=schedule, donate=donate)
    x = torch.randn(8, 3, dtype=model[0].weight.dtype)
    state, _ = step(init_state(model, adamw), x)
    before = fingerprint(state)
    with pytest.raises(RuntimeError, match="the schedule failed"):
        step(state, x)
    assert fingerprint(state) == before
    wanted, said = make_step(model, loss_fn, adamw, schedule=schedule)(state, x)
    after, metrics = step(state, x)
    assert metrics == said
    assert fingerprint(after) == fingerprint(wanted)


def test_an_update_that_failed_leaves_no_gradient_behind():
    """A09, and the same arguments give the same bits: a user's function raises once, after the backward."""
    failures = [ValueError("the update failed")]

    def update(grads, opt_state, params):
        if failures:
            raise failures.pop()
        return {name: params[name] - 0.1 * grads[name] for name in params}, opt_state

    pair = (lambda _: {}, update)
    model = torch.nn.Linear(2, 1)
    state = init_state(model, pair)
    step = make_step(model, lambda m, b: Loss(sum=m(b).square().sum(), weight=len(b)), pair, clip_norm=0.1)
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match="the update failed"):
        step(state, x)
    first, said = step(state, x)
    second, again = step(state, x)
    assert said == again
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize("factor", [math.nan, math.inf, "0.5", None, torch.ones(2)])
def test_a_schedule_that_gives_no_finite_number_is_refused_before_anything_is_updated(factor):
    """A09: the guard against numbers that are not finite sees the factor too."""
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    state = init_state(model, sgd)
    step = make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=len(b)), sgd, schedule=lambda _: factor)
    with pytest.raises(InvalidArgument, match=r"schedule\(0\)"):
        step(state, torch.ones(2, 2))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_weight_that_is_a_mask_or_has_a_graph_counts_as_its_sum(accumulate):
    """A01, A02: the normaliser is a number, and no gradient flows through it, however the window is split."""
    torch.manual_seed(0)
    model, sgd = torch.nn.Linear(2, 1), optimizer(torch.optim.SGD, lr=0.1)
    batch = {"x": torch.randn(8, 2), "mask": (torch.arange(8) % 3 > 0).float()}
    state = init_state(model, sgd)

    def by_mask(module, part):
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=part["mask"])

    def by_number(module, part):
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=int(part["mask"].sum()))

    def by_graph(module, part):
        weight = part["mask"].sum() + 0 * module(part["x"]).sum()
        return Loss(sum=(module(part["x"]).squeeze(1) * part["mask"]).sum(), weight=weight)

    found = [make_step(model, fn, sgd, accumulate=accumulate)(state, batch)[1] for fn in (by_mask, by_number, by_graph)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("weight", [None, "8", [8]])
def test_a_weight_that_is_no_number_is_refused(weight):
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidArgument, match="weight"):
        make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=weight), sgd)(
            init_state(model, sgd), torch.ones(2, 2)
        )


@pytest.mark.parametrize("name", ["loss", "grad_norm", "lr", "weight"])
def test_a_metric_with_a_name_that_the_step_reports_under_is_refused(name):
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    model = torch.nn.Linear(2, 1)
    step = make_step(model, lambda m, b: Loss(sum=m(b).sum(), weight=len(b), metrics={name: (1, 1)}), sgd)
    with pytest.raises(InvalidArgument, match=name):
        step(init_state(model, sgd), torch.ones(2, 2))


def test_ranks_draw_from_keys_of_their_own():
    """H03: a step draws from (seed, step, microbatch, rank), so two ranks with the same rows have other masks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    sgd = optimizer(torch.optim.SGD, lr=0.1)
    x = torch.ones(2, 4)

    def loss_fn(module, batch):
        drawn.append(module(batch).detach())
        return Loss(sum=module(batch).sum(), weight=len(batch))

    def on_rank(collectives):
        return make_step(model, loss_fn, sgd, collectives=collectives)(init_state(model, sgd), x)[1]

    drawn = []
    run_threads(2, on_rank)
    assert not torch.equal(drawn[0], drawn[1])
    wanted = []
    for rank in range(2):
        with forked_rng(fold_in(make_key(0), f"step 0 microbatch 0 rank {rank}")):
            wanted.append(copy.deepcopy(model).train()(x).detach())
    assert all(any(torch.equal(one, other) for other in drawn) for one in wanted)
