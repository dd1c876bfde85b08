"""Splitting a window into microbatches and ranks changes no bit; windows without weight and bad losses are handled."""

import itertools
import threading

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core.step_cases import adamw, assert_same_bits, make_batch, make_net, net_loss

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.data.cursor import make_cursor
from trainfold.core.errors import (
    InvalidArgument,
    InvalidBatch,
    NonFinite,
    RankFailed,
    ScheduleMismatch,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.optim import schedule as schedules
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.microbatch import split
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step


def linear_state(opt, values=(1.0, 2.0), extra=None):
    model = torch.nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    return model, init_state(model, opt, extra=extra)


def linear_loss(model, batch):
    """The gradient of the weight is the sum of the masked rows of x, exact in integers."""
    out = model(batch["x"])[:, 0] * batch["mask"]
    return Loss(sum=out.sum(), weight=batch["mask"].sum(), metrics={"rows": batch["mask"].sum()})


# --- purity ----------------------------------------------------------------------------------------------------------


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
    """A01: unequal valid counts and microbatches of weight 0; exact, since values are integers and powers of two."""
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
    """A01: for any split, N microbatches give the parameters of one batch, to float tolerance."""
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
    """A02: the denominator counts all ranks and microbatches, including ranks with fewer rows or no weight."""
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


@settings(max_examples=12, deadline=None)
@given(
    terms=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=6, max_size=6),
    orders=st.lists(st.permutations(["hits", "rows", "top5"]), min_size=6, max_size=6),
)
def test_ratios_are_sums_over_the_window_and_the_ranks_and_cost_no_call_of_their_own(terms, orders):
    """A10: three ranks of two microbatches, each of which lists its metrics in another order. Not a mean of means."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)

    def rank(ranks):
        def loss_fn(model, batch):
            index = int(batch)
            num, den = terms[index]
            found = {"hits": (num, den), "rows": (1, 1), "top5": (torch.tensor(2 * num), torch.tensor(den))}
            return Loss(
                sum=model(torch.ones(1, 2)).sum(), weight=1, metrics={name: found[name] for name in orders[index]}
            )

        step = make_step(model, loss_fn, sgd, accumulate=2, collectives=ranks)
        batch = torch.tensor([2 * ranks.rank, 2 * ranks.rank + 1])
        return step(state, batch)[1], [call.kind for call in ranks.schedule]

    num, den = (sum(each) for each in zip(*terms, strict=True))
    for metrics, calls in run_threads(3, rank):
        assert calls == ["all_sum"]
        assert metrics["rows"] == 1.0
        if den:
            assert (metrics["hits"], metrics["top5"]) == (num / den, 2 * num / den)


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
    """A09: no parameter, buffer or optimizer state changes; a skipped step advances only the data."""
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
    """A09: a skipped step advances the data position too, even past the end of an epoch."""
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
    with pytest.raises(NonFinite, match=r"continue from error\.skipped") as caught:
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

    def loss_fn(model, batch):
        loss = linear_loss(model, batch)
        return Loss(sum=cut(loss.sum), weight=loss.weight)

    def rank(ranks):
        batch = {"x": torch.full((2, 2), 1.0 + (ranks.rank if ranks else 0)), "mask": torch.ones(2)}
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
        x = torch.ones(2, 2) * (float("nan") if ranks.rank == bad_rank else 1.0 + ranks.rank)
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
    """A02: a denominator of 0 raises on every rank; a rank without weight is fine if others have some."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)

    def rank(ranks):
        step = make_step(model, linear_loss, sgd, collectives=ranks)
        nothing = {"x": torch.full((2, 2), 1.0 + ranks.rank), "mask": torch.zeros(2)}
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
    """A05, A06: any reader, log or save inside a window of k microbatches sees the state before it, bit for bit.

    The loss function stands for every hook: it is called inside windows and reads the run there.
    """
    sgd = optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)
    run, store = {}, MemoryStore()
    boundaries, inside, logged = [], [], []

    def loss_fn(model, batch):
        loss = linear_loss(model, batch)  # a forward updates its batch statistics
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
    """B14: counters are Python ints; a fractional weight is rounded to the nearest token."""
    sgd = optimizer(torch.optim.SGD, lr=0.5)
    model, state = linear_state(sgd)
    big = 2**60
    state = state.evolve(trainer=attrs.evolve(state.trainer, samples=big, tokens=big))

    def loss_fn(model, batch):
        return Loss(sum=model(batch).sum(), weight=2.6)

    after, _ = make_step(model, loss_fn, sgd)(state, torch.ones(1, 2))
    assert (after.trainer.samples, after.trainer.tokens) == (big + 1, big + 3)


def test_the_schedule_of_a_state_is_kept_and_compared():
    """A13, B12: the state persists the horizon; a different one is refused, and the error names both."""
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
