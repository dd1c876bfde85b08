"""The outer step: who contributes, and in which order, changes no bit; who is absent does not exist; and one worker alone trains as if there were none."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold.core.diloco.fragments import fragments_of
from trainfold.core.diloco.outer_step import (
    NESTEROV,
    Contribution,
    average,
    outer_state,
    outer_step,
    pseudo_gradient,
    trained_elements,
)
from trainfold.core.errors import InvalidArgument, InvalidState

PLAIN = trainfold.optimizer(torch.optim.SGD, lr=1.0)
OUTER = [
    NESTEROV,
    trainfold.optimizer(torch.optim.AdamW, lr=0.01, amsgrad=True),
    trainfold.optimizer(torch.optim.Adagrad, lr=0.1),
]


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def found(state, workers, *, seed=0, dtype=torch.float32):
    """What workers would contribute, all fragments."""
    generator = torch.Generator().manual_seed(seed)
    params = state.model.params
    return [
        Contribution(
            weight,
            {
                name: (each + torch.randn(each.shape, generator=generator).double() * 0.1).to(dtype)
                for name, each in params.items()
            },
        )
        for weight in workers
    ]


def bits(state):
    return trainfold.fingerprint(state)


@settings(max_examples=30)
@given(st.permutations(range(4)), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.sampled_from(OUTER))
def test_who_is_who_changes_nothing(order, weights, optimizer):
    state = outer_state(net(), optimizer=optimizer)
    plan = fragments_of(trained_elements(state))
    all_of_them = found(state, weights)
    for _ in range(2):
        one = outer_step(state, all_of_them, plan, optimizer=optimizer)
        other = outer_step(state, [all_of_them[index] for index in order], plan, optimizer=optimizer)
        assert bits(one) == bits(other)
        state = one


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=6).flatmap(
        lambda each: st.tuples(st.just(each), st.permutations(each))
    )
)
def test_the_mean_of_any_numbers_does_not_depend_on_their_order(pair):
    one, other = ([(1, torch.tensor([each])) for each in numbers] for numbers in pair)
    assert torch.equal(average(one), average(other))
    assert torch.equal(average(one), average([(0, torch.tensor([float("nan")])), *one]))


@given(st.integers(0, 3), st.lists(st.integers(1, 5), max_size=3))
def test_a_worker_that_is_absent_has_weight_zero(place, weights):
    """And its tensors do not matter: here they are NaN."""
    state = outer_state(net())
    plan = fragments_of(trained_elements(state), 2)
    present = found(state, weights)
    absent = Contribution(0, {name: each.float() * float("nan") for name, each in state.model.params.items()})
    with_absent = [*present[:place], absent, *present[place:]]
    assert bits(outer_step(state, with_absent, plan)) == bits(outer_step(state, present, plan))
    if not weights:
        assert outer_step(state, with_absent, plan) is state


@settings(max_examples=20)
@given(st.integers(0, 100), st.sampled_from([torch.optim.SGD, torch.optim.AdamW]), st.integers(1, 3))
def test_one_worker_one_step_and_plain_sgd_is_the_inner_optimizer(seed, inner, count):
    """Bit for bit, however the model is cut."""
    alone, worker = net(seed), net(seed)
    state = outer_state(alone, optimizer=PLAIN)
    plan = fragments_of(trained_elements(state), 1)
    optimizers = [inner(each.parameters(), lr=0.1) for each in (alone, worker)]
    for step in range(4):
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed + step))
        for model, optimizer in zip((alone, worker), optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        local = {name: each.detach() for name, each in worker.named_parameters()}
        state = outer_step(state, [Contribution(count, local)], plan, optimizer=PLAIN)
        with torch.no_grad():
            for name, each in worker.named_parameters():
                each.copy_(state.model.params[name])
    for name, each in alone.named_parameters():
        assert torch.equal(each, dict(worker.named_parameters())[name]), name
    assert state.trainer.samples == 4 * count


@given(
    st.lists(
        st.floats(2.0**-14, 2.0**14, width=32).flatmap(lambda x: st.sampled_from([x, -x, 0.0])), min_size=2, max_size=8
    )
)
def test_the_weights_of_one_worker_come_back_as_they_were(values):
    """The same law for any weights, where none shrinks to less than 2**-28 at once."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(values[0])
    state = outer_state(model, optimizer=PLAIN)
    plan = fragments_of(trained_elements(state))
    for value in values[1:]:
        local = torch.tensor([[value]])
        state = outer_step(state, [Contribution(1, {"weight": local})], plan, optimizer=PLAIN)
        assert torch.equal(state.model.params["weight"].float(), local)


@given(st.integers(1, 4), st.sampled_from(OUTER))
def test_fragments_one_after_the_other_are_all_at_once(count, optimizer):
    """If nothing else differs: the same weights contribute to each."""
    state = outer_state(net(), optimizer=optimizer)
    sizes = trained_elements(state)
    whole, cut = state, state
    for turn in range(2):
        each_round = found(state, [1, 2], seed=turn)
        whole = outer_step(whole, each_round, fragments_of(sizes), optimizer=optimizer)
        for _ in range(count):
            cut = outer_step(cut, each_round, fragments_of(sizes, count), optimizer=optimizer)
    one, other = bits(whole), bits(cut)
    assert (one["model"], one["optimizer"]) == (other["model"], other["optimizer"])


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 12))
def test_fragments_are_a_partition(sizes, count):
    """None is empty, and no fragment is larger than a fair share and the largest tensor."""
    if count > len(sizes):
        with pytest.raises(InvalidArgument, match="fragments"):
            fragments_of(sizes, count)
        return
    plan = fragments_of(sizes, count)
    assert sorted(name for names in plan.names for name in names) == sorted(sizes)
    assert all(plan.names)
    assert plan.elements == tuple(sum(sizes[name] for name in names) for names in plan.names)
    assert max(plan.elements) <= sum(sizes.values()) / count + max(sizes.values())
    assert [plan.due(number) for number in range(count)] == list(plan.names)


@pytest.mark.parametrize("optimizer", OUTER)
def test_a_state_that_was_saved_goes_on_exactly(optimizer, tmp_path):
    """In the middle of a turn of fragments."""
    state = outer_state(net(), optimizer=optimizer)
    plan = fragments_of(trained_elements(state), 2)
    fresh = state
    for number in range(3):
        state = outer_step(state, found(state, [1, 2], seed=number), plan, optimizer=optimizer)
    trainfold.save(state, tmp_path)
    loaded = trainfold.load(tmp_path, like=fresh)
    for number in range(3, 6):
        state = outer_step(state, found(state, [1, 2], seed=number), plan, optimizer=optimizer)
        loaded = outer_step(loaded, found(loaded, [1, 2], seed=number), plan, optimizer=optimizer)
    assert bits(state) == bits(loaded)


def test_what_rounding_takes_away_is_no_work():
    """Workers in bfloat16 that do nothing move nothing, although their weights are not those of the state."""
    state = outer_state(net())
    plan = fragments_of(trained_elements(state))
    state = outer_step(state, found(state, [1]), plan)
    idle = Contribution(1, {name: each.bfloat16() for name, each in state.model.params.items()})
    assert not any(pseudo_gradient(each, idle.tensors[name]).any() for name, each in state.model.params.items())


def test_the_default_is_torchs_nesterov():
    """A step of it by hand."""
    model = net()
    state = outer_state(model)
    mine = copy.deepcopy(model).double()
    outer = torch.optim.SGD(mine.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    plan = fragments_of(trained_elements(state))
    for number in range(3):
        contributions = found(state, [1, 1], seed=number)
        for name, each in mine.named_parameters():
            local = [one.tensors[name].double() for one in contributions]
            each.grad = each.detach().float().double() - (local[0] + local[1]) / 2
        outer.step()
        state = outer_step(state, contributions, plan)
    for name, each in mine.named_parameters():
        assert torch.allclose(each, state.model.params[name], rtol=1e-12)


def test_frozen_parameters_and_buffers_are_not_stepped():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    state = outer_state(model)
    assert list(trained_elements(state)) == ["0.weight", "1.weight", "1.bias"]
    assert state.model.params["0.bias"].dtype == torch.float32
    with pytest.raises(InvalidState, match="parameters that are trained"):
        outer_state(model.requires_grad_(False))
    with pytest.raises(InvalidState, match="outer_state"):
        trained_elements(trainfold.TrainState())
