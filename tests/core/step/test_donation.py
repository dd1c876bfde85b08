"""Donation: the same bits, no copy, a clear error on use of a donated state, and no write to shared storage."""

import gc

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from trainfold.core import tree
from trainfold.core.errors import InvalidState, SharedStorage, StateDonated
from trainfold.core.state.components import select
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ParamGroup
from trainfold.core.step.bind import bind_model
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step

FUSED = optimizer(torch.optim.AdamW, lr=0.01, fused=True)


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def loss_fn(model, batch):
    return Loss(sum=model(batch).pow(2).sum(), weight=len(batch))


def make_batch(seed):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(left, right):
    left, right = tree.named_leaves(left), tree.named_leaves(right)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert same, path


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["AdamW", "SGD", "ASGD", "Adafactor", "NAdam"]),
    donations=st.lists(st.booleans(), min_size=1, max_size=5),
    rebinds=st.sets(st.integers(0, 4)),
)
def test_donating_gives_the_same_bits_as_not_donating(name, donations, rebinds):
    """For any mix of donating and pure steps, even if an equal state replaces the state between them."""
    opt = optimizer(getattr(torch.optim, name), lr=0.01)
    pure = make_step(make_model(), loss_fn, opt, clip_norm=0.5, accumulate=2)
    donating = make_step(make_model(), loss_fn, opt, clip_norm=0.5, accumulate=2, donate=True)
    expected = found = init_state(make_model(), opt)
    expected = tree.map_tensors(torch.clone, expected)
    for index, donate in enumerate(donations):
        expected, expected_metrics = pure(expected, make_batch(index))
        if index in rebinds:
            found = tree.map_tensors(torch.clone, found)
        found, metrics = (donating if donate else pure)(found, make_batch(index))
        assert metrics == expected_metrics
    assert_same_bits(expected, found)


NAMES = tuple(name for name, _ in make_model().named_parameters())
HYPER = {"lr": st.sampled_from([0.001, 0.1]), "weight_decay": st.sampled_from([0.0, 0.5])}


@st.composite
def regroupings(draw):
    """Any partition of the parameters in any order, with separate hyperparameters for each part."""
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, len(NAMES) - 1), max_size=3)))
    parts = [tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(NAMES)], strict=True)]
    return [(part, draw(st.fixed_dictionaries({}, optional=HYPER))) for part in parts]


def regroup(state, parts):
    hyper = state.optimizer.groups[0].hyper
    groups = tuple(ParamGroup({**hyper, **changed}, part) for part, changed in parts)
    return state.evolve(optimizer=attrs.evolve(state.optimizer, groups=groups))


def make_step_with_frozen(frozen, opt, *, donate, dtype):
    model = make_model().to(dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return make_step(model, loss_fn, opt, donate=donate)


@settings(max_examples=25, deadline=None)
@given(
    opt=st.sampled_from(
        [
            FUSED,
            optimizer(torch.optim.SGD, lr=0.01, momentum=0.9),
            optimizer(torch.optim.Adagrad, lr=0.01),
            optimizer(torch.optim.AdamW, lr=0.01, masters=True),
        ]
    ),
    changes=st.lists(st.none() | regroupings() | st.sets(st.sampled_from(NAMES[1:])), min_size=2, max_size=6),
)
def test_donating_gives_the_same_bits_however_groups_are_split_merged_and_unfrozen_on_the_way(opt, changes):
    dtype = torch.bfloat16 if opt.masters else torch.float32
    pure, donating = (make_step_with_frozen((), opt, donate=donate, dtype=dtype) for donate in (False, True))
    expected, found = (init_state(make_model().to(dtype), opt) for _ in range(2))
    for index, change in enumerate([None, *changes]):
        if isinstance(change, list):
            expected, found = regroup(expected, change), regroup(found, change)
        elif change is not None:
            pure, donating = (
                make_step_with_frozen(change, opt, donate=donate, dtype=dtype) for donate in (False, True)
            )
        batch = make_batch(index).to(dtype)
        expected, expected_metrics = pure(expected, batch)
        found, metrics = donating(found, batch)
        assert metrics == expected_metrics
        assert_same_bits(expected, found)


def test_a_group_that_is_split_in_the_middle_of_a_run_keeps_its_slots():
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    state = init_state(make_model(), FUSED)
    for index in range(8):
        if index == 4:
            state = regroup(state, [(NAMES[:2], {"lr": 0.001}), (NAMES[2:], {})])
        state, _ = step(state, make_batch(index))
    assert {name: slots["step"].item() for name, slots in state.optimizer.slots.items()} == dict.fromkeys(NAMES, 8.0)
    assert [group.params for group in state.optimizer.groups] == [NAMES[:2], NAMES[2:]]


@pytest.mark.parametrize("donate", [False, True])
def test_a_regrouping_that_loses_a_parameter_is_refused_and_the_state_is_alive(donate):
    step = make_step(make_model(), loss_fn, FUSED, donate=donate)
    state, _ = step(init_state(make_model(), FUSED), make_batch(0))
    before = tree.map_tensors(torch.clone, state)
    with pytest.raises(InvalidState, match=r"missing: \['2\.weight', '2\.bias'\]"):
        step(regroup(state, [(NAMES[:4], {})]), make_batch(1))
    assert_same_bits(before, state)
    expected, _ = make_step(make_model(), loss_fn, FUSED)(before, make_batch(1))
    assert_same_bits(expected, step(state, make_batch(1))[0])


@pytest.mark.parametrize("donate", [False, True])
def test_a_hyperparameter_that_a_state_leaves_out_is_that_of_the_optimizer_not_of_an_earlier_step(donate):
    opt = optimizer(torch.optim.SGD, lr=0.1)
    step = make_step(make_model(), loss_fn, opt, donate=donate)
    state = regroup(init_state(make_model(), opt), [(NAMES, {"weight_decay": 0.5})])
    state, _ = step(state, make_batch(0))
    state = state.evolve(optimizer=attrs.evolve(state.optimizer, groups=(ParamGroup({"lr": 0.1}, NAMES),)))
    expected, _ = make_step(make_model(), loss_fn, opt)(state, make_batch(1))
    assert_same_bits(expected, step(state, make_batch(1))[0])


def test_a_donated_state_is_dead_and_names_the_leaf_and_the_step():
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    state = init_state(make_model(), FUSED)
    for index in range(3):
        old, (state, _) = state, step(state, make_batch(index))
    assert old.trainer.step == 2
    assert old.rng == state.rng
    with pytest.raises(StateDonated, match=r"'0\.weight'.*step from 2"):
        old.model.params["0.weight"]
    for touch in (
        lambda: old.model.buffers["1.running_mean"],
        lambda: old.optimizer.slots["0.weight"],
        lambda: tree.leaves(old),
        lambda: step(old, make_batch(0)),
        lambda: select(old, ["model"]).model.params["0.weight"],
        lambda: dict(old.model.params),
    ):
        with pytest.raises(StateDonated):
            touch()
    assert old.model.params.is_donated
    assert not state.model.params.is_donated


def test_a_part_that_was_selected_before_dies_with_the_whole():
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    state, _ = step(init_state(make_model(), FUSED), make_batch(0))
    part = select(state, ["optimizer"])
    step(state, make_batch(1))
    with pytest.raises(StateDonated):
        tree.leaves(part)


def test_the_new_state_has_the_storage_of_the_old_one():
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    state, _ = step(init_state(make_model(), FUSED), make_batch(0))
    before = {path: leaf.data_ptr() for path, leaf in tree.named_leaves(state) if isinstance(leaf, torch.Tensor)}
    state, _ = step(state, make_batch(1))
    after = {path: leaf.data_ptr() for path, leaf in tree.named_leaves(state) if isinstance(leaf, torch.Tensor)}
    assert before == after


def test_a_pure_step_after_a_donating_one_does_not_write_into_its_state():
    donating = make_step(make_model(), loss_fn, FUSED, donate=True)
    pure = make_step(make_model(), loss_fn, FUSED)
    state, _ = donating(init_state(make_model(), FUSED), make_batch(0))
    before = tree.map_tensors(torch.clone, state)
    pure(state, make_batch(1))
    assert_same_bits(before, state)
    donating(state, make_batch(1))


def test_two_branches_of_one_run_do_not_disturb_each_other():
    """A worker bound to one state receives another: it must write only to the new one."""
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    trunk, _ = step(init_state(make_model(), FUSED), make_batch(0))
    branch = tree.map_tensors(torch.clone, trunk)
    kept = tree.map_tensors(torch.clone, trunk)
    for index in (1, 2):
        branch, _ = step(branch, make_batch(index))
    assert_same_bits(kept, trunk)
    for index in (1, 2):
        trunk, _ = step(trunk, make_batch(index))
    assert_same_bits(branch, trunk)


def test_a_state_assembled_from_parts_of_two_is_bound_as_what_it_is():
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    pure = make_step(make_model(), loss_fn, FUSED)
    first, _ = step(init_state(make_model(), FUSED), make_batch(0))
    other, _ = pure(init_state(make_model(), FUSED), make_batch(5))
    mixed = first.evolve(optimizer=other.optimizer)
    expected, _ = pure(mixed, make_batch(1))
    found, _ = step(mixed, make_batch(1))
    assert_same_bits(expected, found)


def _tie_params(state):
    params = dict(state.model.params)
    params["2.weight"] = params["0.weight"].flatten()[:8].view(2, 4)
    return state.evolve(model=type(state.model)(Leaves(params), state.model.buffers, state.model.ties)), "2.weight"


def _share_slot(state):
    slots = {name: dict(value) for name, value in state.optimizer.slots.items()}
    slots["0.weight"]["exp_avg"] = state.model.params["0.weight"]
    masked = type(state.optimizer)(state.optimizer.kind, Leaves(slots), state.optimizer.groups)
    return state.evolve(optimizer=masked), "exp_avg"


def _share_extra(state):
    return state.evolve(extra={"ema": {"w": state.model.params["0.weight"]}}), "ema"


@pytest.mark.parametrize("share", [_tie_params, _share_slot, _share_extra])
@pytest.mark.parametrize("warm", [False, True])
def test_leaves_that_share_storage_are_reported_before_the_step(share, warm):
    """B19: both leaves are named, nothing is written, and the state stays usable."""
    donating = make_step(make_model(), loss_fn, FUSED, donate=True)
    state, _ = make_step(make_model(), loss_fn, FUSED)(init_state(make_model(), FUSED), make_batch(0))
    if warm:
        state, _ = donating(state, make_batch(1))
    state, name = share(state)
    before = tree.map_tensors(torch.clone, state)
    with pytest.raises(SharedStorage) as caught:
        donating(state, make_batch(2))
    assert "0.weight" in str(caught.value)
    assert name in str(caught.value)
    assert_same_bits(before, state)


def test_a_graph_that_reads_a_donated_parameter_cannot_run_backward_unnoticed():
    """A fused optimizer on a CPU does not bump version counters itself."""
    step = make_step(make_model(), loss_fn, FUSED, donate=True)
    state, _ = step(init_state(make_model(), FUSED), make_batch(0))
    weight = state.model.params["0.weight"]
    x = torch.ones(3, requires_grad=True)
    product = (weight @ x).sum()
    step(state, make_batch(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_keeps_no_state_alive_that_nobody_has(donate):
    step = make_step(make_model(), loss_fn, FUSED, donate=donate)
    state, _ = step(init_state(make_model(), FUSED), make_batch(0))
    storages = [StorageWeakRef(leaf.untyped_storage()) for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    assert not any(storage.expired() for storage in storages)
    del state
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_a_bound_model_reads_the_state_writes_nothing_and_dies_with_it():
    """H05: evaluation leaves parameters, buffers and modes unchanged."""
    model = make_model()
    step = make_step(model, loss_fn, FUSED, donate=True)
    state, _ = step(init_state(model, FUSED), make_batch(0))
    before = tree.map_tensors(torch.clone, state)
    evaluate = bind_model(model, state)
    with torch.no_grad():
        first = evaluate(make_batch(1))
        second = evaluate(make_batch(1))
    assert torch.equal(first, second)
    assert model.training
    assert_same_bits(before, state)
    step(state, make_batch(1))
    with pytest.raises(StateDonated):
        evaluate(make_batch(1))
