"""The step as a pure function: purity, equivalence with the hand-written loop, accumulation, ranks and refusals."""

import copy

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core.step_cases import adamw, assert_same_bits, make_batch, make_net, net_loss

from trainfold.core import tree
from trainfold.core.optim import schedule as schedules
from trainfold.core.rng import fold_in, forked_rng
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.microbatch import split
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step


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
    """B08: the gradient of each microbatch is converted to fp32 before it is added."""
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
