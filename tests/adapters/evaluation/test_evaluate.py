"""Evaluations: the same bits however they are cut, the same schedule on every rank, and nothing moved by them."""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import itertools
import math
import os
import random
import re
import subprocess
import sys
import threading
import types
import weakref
from collections import UserDict, deque
from fractions import Fraction
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed, RanksDisagree
from trainfold.core.evaluate.evaluation import Evaluation
from trainfold.core.exact.sum import exact_add, exact_zero
from trainfold.core.metrics.text import text_of

MANY = settings(deadline=None, max_examples=40)
SUITE = {
    "loss": M.Ratio(),
    "ppl": M.Perplexity(),
    "largest": M.Max(),
    "spread": M.Variance(),
    "positions": M.PositionAccuracy(),
    "acc_len": M.AcceptanceLength(),
}


def forward(batch):
    """Per-sample values that do not depend on the batch: what a model's kernels cannot promise."""
    values = batch["values"]
    hits = values[:, None] > torch.arange(batch["positions"])
    return {
        "loss": (values, len(values)),
        "ppl": (values, len(values)),
        "largest": values,
        "spread": values,
        "positions": (hits, torch.ones_like(hits)),
        "acc_len": (hits, torch.ones_like(hits)),
    }


def batches_of(values, cuts, positions=3):
    return [{"values": part, "positions": positions} for part in values.tensor_split(cuts) if len(part)]


def bits(evaluation):
    return {
        name: [x if x is None else x.hex() for x in value] if isinstance(value, list) else value.hex()
        for name, value in evaluation.items()
    }


floats = st.floats(-100, 100, width=32)


@MANY
@given(st.lists(floats, min_size=1, max_size=30), st.data())
def test_no_batch_size_order_or_number_of_ranks_changes_a_bit(values, data):
    """Q01, Q09, P16: remainders and empty ranks included; every rank has the result of one process with one batch."""
    values = torch.tensor(values)
    whole = trainfold.evaluate(forward, batches_of(values, []), SUITE)
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    world = data.draw(st.integers(1, 5))
    bounds = st.lists(st.integers(0, len(values)), min_size=world - 1, max_size=world - 1).map(sorted)
    shares = values[order].tensor_split(data.draw(bounds))
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(share)), max_size=3))) for share in shares]

    def work(ranks):
        mine = batches_of(shares[ranks.rank], cuts[ranks.rank])
        return trainfold.evaluate(forward, mine, SUITE, collectives=ranks)

    for found in run_threads(world, work):
        assert bits(found) == bits(whole)
        assert found.complete
    loss = sum(map(Fraction, values.tolist())) / len(values)
    assert whole["loss"] == float(loss)


def test_nothing_seen_anywhere_is_no_result():
    """Q04, S50: no 0.0 that nobody measured."""
    assert trainfold.evaluate(forward, [], SUITE) == {}
    assert run_threads(3, lambda ranks: trainfold.evaluate(forward, [], SUITE, collectives=ranks)) == [{}] * 3
    found = trainfold.evaluate(lambda batch: {"loss": (batch.sum(), batch.numel())}, [torch.zeros(0)], SUITE)
    assert found == {}
    assert found.batches == 1


def test_a_metric_that_some_batches_say_nothing_of_is_of_the_others():
    """Q03, S50: a name missing on one rank, or in one batch, or everywhere."""

    def some(batch):
        return {"loss": (batch, 1)} if batch > 1 else {"largest": batch}

    whole = {"loss": 2.5, "largest": 1.0}
    suite = {"loss": M.Ratio(), "largest": M.Max(), "never": M.Mean()}
    batches = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    assert trainfold.evaluate(some, batches, suite) == whole
    found = run_threads(3, lambda ranks: trainfold.evaluate(some, [batches[ranks.rank]], suite, collectives=ranks))
    assert found == [whole] * 3


def test_ranks_may_have_other_lengths():
    """Q03: lengths are agreed on before anything is added up."""

    def work(ranks):
        batch = {"values": torch.tensor([1.5, 2.5]), "positions": ranks.rank * 2}
        suite = {"positions": M.PositionAccuracy()}
        return trainfold.evaluate(lambda b: {"positions": forward(b)["positions"]}, [batch], suite, collectives=ranks)

    assert run_threads(3, work) == [{"positions": [1.0, 1.0, 0.5, 0.0]}] * 3


def test_every_rank_makes_the_same_calls_whatever_it_has():
    """Q03: one gather of small things, one sum of integers; with steps, one gather more, and a batch for who has none."""

    def work(ranks, steps):
        values = torch.arange(4.0 * ranks.rank)
        cut = batches_of(values, [4, 8], positions=ranks.rank)
        return trainfold.evaluate(forward, cut, SUITE, collectives=ranks, steps=steps)

    schedules = {tuple(map(str, o.schedule)) for o in thread_outcomes(4, lambda ranks: work(ranks, None))}
    (schedule,) = schedules
    assert [call.partition("(")[0] for call in schedule] == ["gather", "gather", "all_sum"]
    schedules = {tuple(map(str, o.schedule)) for o in thread_outcomes(4, lambda ranks: work(ranks, 3))}
    (schedule,) = schedules
    assert [call.partition("(")[0] for call in schedule] == ["gather", "broadcast", "gather", "all_sum"]


def test_ten_metrics_are_one_sum_of_less_than_64_kib():
    suite = {
        **SUITE,
        "mean": M.Mean(),
        "top": M.TopK(2),
        "f1": M.F1(5),
        "rate": M.AcceptanceRate(),
        "median": M.Quantiles(tuple(map(float, range(-100, 101))), (0.5,)),
    }

    def forward_all(batch):
        found = forward(batch)
        values = batch["values"]
        classes = torch.arange(len(values)) % 5
        return {
            **found,
            "mean": -values,
            "top": (torch.outer(values, torch.arange(5.0)), classes),
            "f1": (classes, classes),
            "rate": found["acc_len"],
            "median": values,
        }

    def work(ranks):
        batch = {"values": torch.randn(64) * 50, "positions": 16}
        trainfold.evaluate(forward_all, [batch], suite, collectives=ranks)
        return str(ranks.schedule[-1])

    for call in run_threads(4, work):
        assert call.startswith("all_sum(int64[")
        assert 8 * int(call.removeprefix("all_sum(int64[").rstrip("])")) <= 64 * 1024


def test_a_rank_that_fails_midway_fails_all_and_is_named():
    """Q03, S50: nobody waits; the failed rank raises what it raised."""

    def bad(batch):
        if batch["positions"] == 2:
            raise KeyError("no such token")
        return forward(batch)

    def work(ranks):
        cut = batches_of(torch.ones(9), [3, 6], positions=3 if ranks.rank else 2)
        return trainfold.evaluate(bad, cut, SUITE, collectives=ranks)

    outcomes = thread_outcomes(3, work)
    assert isinstance(outcomes[0].error, KeyError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, RankFailed)
        assert "rank 0: KeyError: 'no such token'" in str(outcome.error)
    assert len({tuple(map(str, outcome.schedule)) for outcome in outcomes}) == 1


@pytest.mark.parametrize("steps", [None, 2])
def test_a_loader_or_a_suite_that_fails_on_one_rank_fails_all(steps):
    def loader(rank, fails_at):
        for index in range(3):
            if rank == 1 and index == fails_at:
                raise OSError("disk gone")
            yield {"values": torch.ones(2), "positions": 2}

    for fails_at in (0, 1):
        outcomes = thread_outcomes(
            3,
            lambda ranks, at=fails_at: trainfold.evaluate(
                forward, loader(ranks.rank, at), SUITE, collectives=ranks, steps=steps
            ),
        )
        kinds = [type(outcome.error) for outcome in outcomes]
        assert kinds == [RankFailed, OSError, RankFailed]
        assert "rank 1: OSError: disk gone" in str(outcomes[0].error)

    def work(ranks):
        suite = SUITE if ranks.rank else {"loss": M.Ratio}
        return trainfold.evaluate(forward, [], suite, collectives=ranks, steps=steps)

    outcomes = thread_outcomes(2, work)
    assert [type(outcome.error) for outcome in outcomes] == [InvalidArgument, RankFailed]


def test_ranks_that_measure_other_things_disagree_on_every_rank():
    """Q03: told before anything is added up."""
    suites = [{"loss": M.Ratio()}, {"loss": M.Ratio(), "more": M.Max()}]
    outcomes = thread_outcomes(2, lambda ranks: trainfold.evaluate(forward, [], suites[ranks.rank], collectives=ranks))
    for outcome in outcomes:
        assert isinstance(outcome.error, RanksDisagree)
        assert "more: " in str(outcome.error)
    suites = [{"top": M.TopK(1)}, {"top": M.TopK(2)}]
    outcomes = thread_outcomes(2, lambda ranks: trainfold.evaluate(forward, [], suites[ranks.rank], collectives=ranks))
    assert all(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)
    assert "k=2" in str(outcomes[0].error)


def test_a_forward_that_communicates_is_called_as_often_on_every_rank_and_counted_once():
    """Q05: uneven shards do not hang; a rank without a batch is lent one; what is repeated is not counted."""
    counts = [0, 3, 1]

    def work(ranks):
        calls = []

        def together(batch):
            calls.append(1)
            ranks.all_sum([batch["values"].sum()])
            return forward(batch)

        cut = [{"values": torch.full((2,), float(i + ranks.rank)), "positions": 2} for i in range(counts[ranks.rank])]
        found = trainfold.evaluate(together, cut, SUITE, collectives=ranks, steps=3)
        assert len(calls) == 3
        return found

    alone = [
        {"values": torch.full((2,), float(i + rank)), "positions": 2} for rank in range(3) for i in range(counts[rank])
    ]
    for found in run_threads(3, work):
        assert bits(found) == bits(trainfold.evaluate(forward, alone, SUITE))
        assert found.batches == 4
        assert found.complete


def test_in_step_a_failing_rank_leaves_nobody_waiting():
    """Q05: a metric or a loader that fails is told at the end; a forward that fails, at once."""

    def work(ranks, fault):
        def together(batch):
            if fault == "forward" and ranks.rank == 1:
                raise ArithmeticError("lost")
            ranks.all_sum([batch["values"].sum()])
            return {"unknown": 1} if fault == "metric" and ranks.rank == 1 else forward(batch)

        def loader():
            yield {"values": torch.ones(2), "positions": 2}
            if fault == "loader" and ranks.rank == 1:
                raise OSError("gone")
            yield {"values": torch.ones(2), "positions": 2}

        return trainfold.evaluate(together, loader(), SUITE, collectives=ranks, steps=2)

    for fault, kind in {"forward": ArithmeticError, "metric": InvalidArgument, "loader": OSError}.items():
        outcomes = thread_outcomes(3, functools.partial(work, fault=fault), timeout_secs=10)
        assert [type(outcome.error) for outcome in outcomes] == [RankFailed, kind, RankFailed], fault
        assert "rank 1" in str(outcomes[0].error)


def test_steps_that_ranks_do_not_agree_on_are_refused_on_every_rank():
    outcomes = thread_outcomes(
        2,
        lambda ranks: trainfold.evaluate(
            forward, batches_of(torch.ones(2), []), SUITE, collectives=ranks, steps=1 + ranks.rank
        ),
    )
    assert all(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)
    assert "rank 1: 2" in str(outcomes[0].error)
    for steps in (0, -1, True, "3"):
        with pytest.raises(InvalidArgument, match="steps"):
            trainfold.evaluate(forward, [], SUITE, steps=steps)


def test_fewer_steps_than_batches_are_a_partial_evaluation():
    """Q12: one more batch is taken to know."""
    cut = batches_of(torch.arange(6.0), [2, 4])
    assert not trainfold.evaluate(forward, cut, SUITE, steps=2).complete
    assert trainfold.evaluate(forward, cut, SUITE, steps=3).complete
    assert trainfold.evaluate(forward, cut, SUITE, steps=5).complete
    assert not trainfold.evaluate(forward, iter(cut), SUITE, steps=2).complete
    assert trainfold.evaluate(forward, itertools.islice(cut, 2), SUITE, steps=2).complete


def test_a_limit_on_one_rank_makes_the_evaluation_partial_on_all():
    """Q12: it says so on every rank."""

    class Limited(list):
        complete = False

    def work(ranks):
        cut = batches_of(torch.ones(3), [1])
        return trainfold.evaluate(forward, Limited(cut) if ranks.rank else cut, SUITE, collectives=ranks).complete

    assert run_threads(2, work) == [False, False]


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(1))
        self.seen = []

    def forward(self, batch):
        self.seen.append((self.training, self.inner[1].training, torch.is_grad_enabled()))
        return self.inner(batch["values"][:, None])[:, 0]


GLOBAL_MODEL = Counting()


def of_global(batch):
    return {"loss": (GLOBAL_MODEL(batch), 1)}


def held_by(kind, model):
    class Trainer:
        def __init__(self):
            self.parts = {"model": model}

        def measure(self, batch):
            return {"loss": (self.parts["model"](batch), 1)}

        __call__ = measure

    return {
        "closure": lambda batch: {"loss": (model(batch), 1)},
        "partial": functools.partial(lambda m, batch: {"loss": (m(batch), 1)}, model),
        "method": Trainer().measure,
        "object": Trainer(),
        "default": lambda batch, m=model: {"loss": (m(batch), 1)},
        "inner function": lambda batch: {"loss": next((model(each), 1) for each in [batch])},
    }[kind]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["closure", "partial", "method", "object", "default", "inner function"])
def test_modules_are_in_evaluation_mode_and_come_back_as_they_were(kind, fails):
    """Q06, T61, M68: each submodule its own mode, also when it raises."""
    model = Counting()
    model.inner[1].eval()
    batches = batches_of(torch.arange(4.0), [2])
    if fails:
        with pytest.raises(KeyError):
            trainfold.evaluate(held_by(kind, model), [*batches, {}], {"loss": M.Ratio()})
    else:
        trainfold.evaluate(held_by(kind, model), batches, {"loss": M.Ratio()})
    assert set(model.seen) == {(False, False, False)}
    assert model.training
    assert model.inner[0].training
    assert not model.inner[1].training
    assert torch.is_grad_enabled()


def test_a_module_that_a_function_names_is_found_and_one_that_cannot_be_is_given():
    GLOBAL_MODEL.seen.clear()
    trainfold.evaluate(of_global, batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert GLOBAL_MODEL.seen == [(False, False, False)]
    assert GLOBAL_MODEL.training
    model, hidden = Counting(), [[[[[[None]]]]]]
    hidden[0][0][0][0][0][0] = model

    def deep(batch):
        return {"loss": (hidden[0][0][0][0][0][0](batch), 1)}

    trainfold.evaluate(deep, batches_of(torch.ones(2), []), {"loss": M.Ratio()}, modules=[model])
    assert model.seen == [(False, False, False)]
    assert model.training


def noisy(batch):
    random.random()
    np.random.rand(2)  # noqa: NPY002 the same
    return {"loss": (torch.rand(3), 1)}


@pytest.mark.parametrize("fails", [False, True])
def test_random_streams_and_grad_mode_are_put_back(fails):
    """Q06: a run that evaluates is the run that does not."""

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002 the same

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 the stream that user code draws from
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()

    def switching(batch):
        torch.set_grad_enabled(True)
        return noisy(batch) if not fails else {"nothing": noisy(batch)}

    with torch.no_grad():
        if fails:
            with pytest.raises(InvalidArgument):
                trainfold.evaluate(switching, [0], {"loss": M.Ratio()})
        else:
            trainfold.evaluate(switching, [0, 1], {"loss": M.Ratio()})
        assert not torch.is_grad_enabled()
    assert drawn() == expected


def test_a_loader_stands_where_it_stood():
    """Q06, P30: the order of the next epoch, and a position that a loader keeps, are not moved by an evaluation."""
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=4, shuffle=True, generator=generator)
    before = generator.get_state()
    trainfold.evaluate(lambda batch: {"loss": (batch, len(batch))}, loader, {"loss": M.Ratio()})
    assert torch.equal(generator.get_state(), before)

    class Positioned:
        def __init__(self):
            self.position = 2

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

        def __iter__(self):
            while self.position < 5:
                self.position += 1
                yield torch.tensor(float(self.position))

    positioned = Positioned()

    def sometimes(batch):
        if batch == 4:
            raise ArithmeticError
        return {"loss": (batch, 1)}

    with pytest.raises(ArithmeticError):
        trainfold.evaluate(sometimes, positioned, {"loss": M.Ratio()})
    assert positioned.position == 2
    assert trainfold.evaluate(lambda batch: {"loss": (batch, 1)}, positioned, {"loss": M.Ratio()}) == {"loss": 4.0}
    assert positioned.position == 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_torchdata_loader_gives_each_evaluation_all_of_its_data():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        loader = stateful.StatefulDataLoader(list(range(10)), batch_size=3, num_workers=workers)
        for _ in range(2):
            found = trainfold.evaluate(lambda batch: {"sum": batch}, loader, {"sum": M.Sum()})
            assert found == {"sum": 45.0}
            assert found.batches == 4


@MANY
@given(st.lists(floats, min_size=2, max_size=20), st.integers(1, 19), st.integers(1, 3), st.integers(1, 3))
def test_an_evaluation_goes_on_from_a_saved_tally(tmp_path_factory, values, cut, before, after):
    """Q01, P30: interrupted, saved in a checkpoint, loaded, gone on with on other ranks: the same bits."""
    values = torch.tensor(values)
    first, rest = values[:cut], values[cut:]

    def part(ranks, share, start=None):
        mine = share.tensor_split(ranks.world_size)[ranks.rank]
        return trainfold.evaluate(forward, batches_of(mine, [2, 5]), SUITE, collectives=ranks, start=start)

    half = run_threads(before, lambda ranks: part(ranks, first))[0]
    state = trainfold.TrainState(
        **dict.fromkeys(["model", "optimizer", "scheduler", "dataset", "rng"]),
        trainer=trainfold.states.make_progress(step=1),
        extra={"evaluation": half.tally},
    )
    run = str(tmp_path_factory.mktemp("run"))
    trainfold.save(state, run)
    like = tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, state)
    tally = trainfold.load(run, like=like).extra["evaluation"]
    for found in run_threads(after, lambda ranks: part(ranks, rest, tally)):
        assert bits(found) == bits(trainfold.evaluate(forward, batches_of(values, []), SUITE))


def test_a_start_that_is_not_of_this_suite_or_not_the_same_everywhere_is_refused():
    one = trainfold.evaluate(forward, batches_of(torch.ones(2), []), SUITE).tally
    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(forward, [], {"loss": M.Ratio()}, start=one)
    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(forward, [], SUITE, start={"loss": 1})
    other = trainfold.evaluate(forward, batches_of(torch.zeros(2), []), SUITE).tally
    outcomes = thread_outcomes(
        2, lambda ranks: trainfold.evaluate(forward, [], SUITE, collectives=ranks, start=[one, other][ranks.rank])
    )
    assert all(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)


def test_what_is_not_finite_is_counted_by_metric():
    """Q02: NaN and infinities are in the result and in the report."""
    batch = {"values": torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf]), "positions": 1}
    found = trainfold.evaluate(forward, [batch], SUITE)
    assert math.isnan(found["loss"])
    assert found.nonfinite["loss"] == {"nan": 1, "inf": 2, "-inf": 1}
    assert found.nonfinite["largest"] == {"nan": 1, "inf": 2, "-inf": 1}
    assert "positions" not in found.nonfinite


@pytest.mark.parametrize("suite", [None, {}, [], {1: M.Ratio()}, {"loss": M.Ratio}, {"loss": 3}])
def test_a_suite_that_is_none_is_refused(suite):
    with pytest.raises(InvalidArgument, match="suite"):
        trainfold.evaluate(forward, [], suite)


@pytest.mark.parametrize("outputs", [None, torch.ones(2), {"los": (1, 1)}, {"loss": (1, 1, 1)}])
def test_what_forward_returns_must_be_for_the_suite(outputs):
    with pytest.raises((InvalidArgument, TypeError)) as caught:
        trainfold.evaluate(lambda _: outputs, [0], {"loss": M.Ratio()})
    assert "loss" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))


class FloatMetric:
    """Not a monoid of integers."""

    def zero(self):
        return torch.zeros(1)

    def observe(self, acc, values):
        return acc + values.sum()

    def merge(self, one, other):
        return one + other

    def result(self, acc):
        return acc.item()


class Careless(FloatMetric):
    additive = True

    def zero(self):
        return torch.zeros(1, dtype=torch.int64)

    def observe(self, acc, values):
        return acc + 2**62


def test_accumulators_that_cannot_be_added_up_are_refused():
    """Q02: floats, and integers about to overflow, name the leaf."""
    with pytest.raises(InvalidState, match=r"accumulators\['loss'\]"):
        trainfold.evaluate(lambda _: {"loss": torch.ones(1)}, [0], {"loss": FloatMetric()})
    outcomes = thread_outcomes(
        4,
        lambda ranks: trainfold.evaluate(
            lambda _: {"loss": torch.ones(1)}, [0], {"loss": Careless()}, collectives=ranks
        ),
    )
    assert all(isinstance(outcome.error, InvalidState) for outcome in outcomes)


def test_an_evaluation_is_a_dict_that_says_what_it_is():
    found = trainfold.evaluate(forward, batches_of(torch.ones(4), [2]), SUITE)
    assert isinstance(found, Evaluation)
    assert isinstance(found, dict)
    assert found.batches == 2
    assert {**found}["loss"] == 1.0


def test_the_loss_of_an_evaluation_knows_nothing_of_accumulation():
    """Q10, F53: a sum over its weight, whatever the step divides by."""
    model = torch.nn.Linear(2, 1)
    sgd = trainfold.optimizer(torch.optim.SGD, lr=0.0)

    def loss_fn(model, batch):
        return trainfold.Loss(sum=model(batch["x"]).square().sum(), weight=len(batch["x"]))

    batch = {"x": torch.arange(16.0).view(8, 2)}
    state = trainfold.init_state(model, sgd)
    losses = set()
    for accumulate in (1, 2, 4):
        step = trainfold.make_step(model, loss_fn, sgd, accumulate=accumulate)
        state = trainfold.init_state(model, sgd)
        state, _ = step(state, batch)
        bound = trainfold.bind_model(model, state)

        def measure(batch, bound=bound):
            loss = loss_fn(bound, batch)
            return {"loss": (loss.sum, loss.weight)}

        losses.add(trainfold.evaluate(measure, [batch], {"loss": M.Ratio()})["loss"])
    assert len(losses) == 1


def test_an_evaluation_sees_the_step_that_it_is_of_and_all_samples_in_batches_of_its_own_size():
    """Q08: a loss that depends on the schedule; the remainder is counted."""
    x = torch.arange(11.0)
    state = trainfold.TrainState(trainer=trainfold.states.make_progress(step=0))
    found = []
    for step in range(3):
        state = state.evolve(trainer=trainfold.states.make_progress(step=step))

        def measure(batch, state=state):
            return {"loss": (batch * state.trainer.step, len(batch))}

        found.append(trainfold.evaluate(measure, x.split(4), {"loss": M.Ratio()})["loss"])
    assert found == [0.0, 5.0, 10.0]


def test_whether_to_evaluate_is_said_by_one_rank():
    """Q07: ranks that are configured otherwise evaluate together, or none does."""
    every = [2, 3, 5]

    def work(ranks):
        return [
            (step, trainfold.evaluate(forward, [], SUITE, collectives=ranks))
            for step in range(1, 7)
            if ranks.broadcast(step % every[ranks.rank] == 0)
        ]

    assert run_threads(3, work) == [[(2, {}), (4, {}), (6, {})]] * 3


def test_a_process_that_never_imported_metrics_reads_a_checkpoint_that_has_a_tally(tmp_path):
    """P30: the classes of accumulators are known to whoever can read a checkpoint."""
    suite = {
        "f1": M.F1(2),
        "top": M.TopK(1),
        "median": M.Quantiles((0, 1), (0.5,)),
        "rate": M.AcceptanceRate(),
        **SUITE,
    }
    state = trainfold.TrainState(
        trainer=trainfold.states.make_progress(), extra={"evaluation": trainfold.evaluation.no_tally(suite)}
    )
    trainfold.save(state, tmp_path / "run")
    manifest = (tmp_path / "run" / "step-00000000" / "manifest.json").read_text()
    named = set(re.findall(r'"node": ?"(trainfold\.\w+)"', manifest))
    assert {"trainfold.Tally", "trainfold.Quotient", "trainfold.Bins"} <= named
    script = "from trainfold.core.format.rebuild import registered_classes; print(*registered_classes())"
    known = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert named <= set(known)


# --- what a hostile review found -------------------------------------------------------------------------------------


def numbers(count=20):
    return torch.arange(float(count))


def summed(batch):
    return {"sum": batch}


SUM = {"sum": M.Sum()}


def test_a_limit_of_time_around_a_part_does_not_make_it_whole():
    """Q12: complete is what both of them say; where a time limit stopped is no position."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=2)
    part = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=2)
    found = trainfold.evaluate(summed, trainfold.evaluation.time_limit(part, secs=3600), SUM)
    assert not found.complete
    ticks = itertools.count()
    cut = trainfold.evaluation.time_limit(
        trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop]),
        secs=3,
        clock=lambda: next(ticks),
    )
    assert not trainfold.evaluate(summed, cut, SUM).complete
    with pytest.raises(AttributeError, match="time was up"):
        _ = cut.after


def test_a_partial_result_stays_partial_in_copies_and_by_its_tally():
    """Q12: whatever is made of it."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=2)
    part = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=2)
    found = trainfold.evaluate(summed, part, SUM)
    record = trainfold.retention.make_best_record(metric="sum", direction="max")
    for each in (found, found.copy(), found | {"more": 1.0}, trainfold.evaluation.evaluation_of(SUM, found.tally)):
        assert not each.complete
        assert each["sum"] == 6.0
        assert not trainfold.retention.is_better(record, each)
    assert "partial" in repr(found)
    rest = trainfold.evaluation.eval_batches(part.after, lambda at: numbers()[at.start : at.stop])
    whole = trainfold.evaluate(summed, rest, SUM, start=found.tally)
    assert whole.complete
    assert repr(whole) == "{'sum': 190.0}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (M.TopK(1), M.TopK(5)),
        (M.Histogram((0, 1, 2)), M.Histogram((0, 10, 20))),
        (M.Mean(), M.Max()),
    ],
)
def test_a_start_of_another_metric_of_the_same_name_is_refused(before, after):
    """P30: its accumulator would be merged, and mean something else."""
    tally = trainfold.evaluation.no_tally({"m": before})
    with pytest.raises(InvalidArgument, match="start") as caught:
        trainfold.evaluate(summed, [], {"m": after}, start=tally)
    assert type(before).__name__ in str(caught.value)
    assert type(after).__name__ in str(caught.value)


def test_batches_of_other_ranks_or_of_another_position_are_refused():
    """Q01: nothing is counted twice because a cursor was made twice, or without the ranks."""

    def work(ranks, kind):
        size = 4 + ranks.rank if kind == "batch size" else 4
        at = 4 * ranks.rank if kind == "position" else 0
        cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=size, next_index=at)
        of = None if kind == "without ranks" else ranks
        batches = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], collectives=of)
        return trainfold.evaluate(summed, batches, SUM, collectives=None if kind == "alone" else ranks)

    for kind in ("batch size", "position", "without ranks"):
        errors = [type(outcome.error) for outcome in thread_outcomes(2, functools.partial(work, kind=kind))]
        assert errors in ([RanksDisagree] * 2, [InvalidArgument] * 2), kind
    assert [type(outcome.error) for outcome in thread_outcomes(2, functools.partial(work, kind="alone"))] == [
        InvalidArgument
    ] * 2


def test_an_evaluation_that_begins_late_and_has_no_start_is_partial():
    """P30: half of the data is not all of it."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4, next_index=8)
    batches = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop])
    assert not trainfold.evaluate(summed, batches, SUM).complete
    assert not trainfold.evaluate(summed, batches, SUM, start=trainfold.evaluation.no_tally(SUM)).complete


def test_steps_on_some_ranks_only_are_a_disagreement_on_every_rank():
    outcomes = thread_outcomes(
        2,
        lambda ranks: trainfold.evaluate(summed, [numbers()], SUM, collectives=ranks, steps=2 if ranks.rank else None),
    )
    assert [type(outcome.error) for outcome in outcomes] == [RanksDisagree] * 2


class Exit(BaseException):
    pass


@pytest.mark.parametrize("where", ["forward", "loader", "metric"])
@pytest.mark.parametrize("steps", [None, 3])
def test_an_interrupt_on_one_rank_is_told_to_the_others(where, steps):
    """Q03: KeyboardInterrupt and its like, wherever they come."""

    class Interrupting(M.Sum().__class__.__base__):
        def __init__(self):
            self.sum = M.Sum()

        def __getattr__(self, name):
            return getattr(self.sum, name)

        def observe(self, acc, values):
            if values[0] == 99:
                raise Exit
            return self.sum.observe(acc, values)

    def work(ranks):
        def loader():
            for index in range(3):
                if (ranks.rank, index, where) == (1, 1, "loader"):
                    raise Exit
                yield torch.full((2,), 99.0 if (ranks.rank, index, where) == (1, 1, "metric") else 1.0)

        def forward(batch):
            if (ranks.rank, where) == (1, "forward"):
                raise Exit
            if steps:
                ranks.all_sum([batch])
            return {"sum": batch}

        return trainfold.evaluate(forward, loader(), {"sum": Interrupting()}, collectives=ranks, steps=steps)

    outcomes = thread_outcomes(2, work, timeout_secs=10)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, Exit]


class Merging(torch.nn.Linear):
    """As LoRA layers do it: evaluation mode merges two weights into one, training mode takes them apart."""

    merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.weight += -1.0 if mode else 1.0
            self.merged = not mode
        return self


def test_a_module_with_a_train_of_its_own_is_put_back_by_it():
    """Q06: what it did for the evaluation it undoes."""
    model = torch.nn.Sequential(Merging(1, 1), Merging(1, 1))
    model[1].eval()
    before = [part.weight.item() for part in model]
    inside = []

    def forward(batch):
        inside.append([part.merged for part in model])
        return {"sum": model(batch)}

    trainfold.evaluate(forward, [torch.ones(1, 1)], SUM)
    assert inside == [[True, True]]
    assert [part.merged for part in model] == [False, True]
    assert [part.training for part in model] == [True, False]
    assert [part.weight.item() for part in model] == before


class Chain:
    def __init__(self, inner):
        self.inner = inner


class Shelf:
    model = None


def deep(model, kind):
    if kind == "attributes":
        held = Chain(Chain(Chain(Chain(Chain(model)))))
        return lambda batch: {"loss": (held.inner.inner.inner.inner.inner(batch), 1)}
    if kind == "dicts":
        held = {"a": {"b": {"c": {"d": [{"e": model}]}}}}
        return lambda batch: {"loss": (held["a"]["b"]["c"]["d"][0]["e"](batch), 1)}
    if kind == "class":
        Shelf.model = model
        return lambda batch: {"loss": (Shelf.model(batch), 1)}
    if kind == "weakref":
        held = weakref.ref(model)
        return lambda batch: {"loss": (held()(batch), 1)}
    if kind == "module":
        held = sys.modules[__name__]
        held.MODEL = model
        return lambda batch: {"loss": (held.MODEL(batch), 1)}
    if kind == "deque":
        held = deque([model])
        return lambda batch: {"loss": (held[0](batch), 1)}
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["attributes", "dicts", "class", "weakref", "module", "deque"])
def test_modules_are_found_however_deep_they_are_held(kind):
    """Q06: dropout is off in an evaluation."""
    model = Counting()
    trainfold.evaluate(deep(model, kind), batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert model.seen == [(False, False, False)]
    assert model.training


def test_a_generator_behind_a_generator_is_put_back():
    """Q06: what can be seen through is."""
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=4, shuffle=True, generator=generator)
    batches = (batch for batch in loader)
    before = generator.get_state()
    trainfold.evaluate(lambda batch: {"sum": batch}, batches, SUM)
    assert torch.equal(generator.get_state(), before)


class Fielded:
    """A metric of a user's, whose text has an address and a set in it."""

    def __init__(self):
        self.inner, self.tags = M.Sum(), frozenset({"b", "a"})

    def __repr__(self):
        return f"Fielded({object.__repr__(self)})"

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_metrics_that_are_equal_are_equal_on_every_rank_whatever_their_repr():
    found = run_threads(
        2, lambda ranks: trainfold.evaluate(summed, [numbers(3)], {"sum": Fielded()}, collectives=ranks)
    )
    assert found == [{"sum": 6.0}] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"forward": None}, "forward"),
        ({"batches": None}, "batches"),
        ({"modules": 3}, "modules"),
        ({"modules": [None]}, "modules"),
    ],
)
def test_arguments_that_cannot_be_are_named(changes, named):
    given = {"forward": summed, "batches": [numbers()], "suite": SUM, **changes}
    with pytest.raises(InvalidArgument, match=named):
        trainfold.evaluate(given.pop("forward"), given.pop("batches"), given.pop("suite"), **given)


def test_what_cannot_go_on_is_refused_before_anything_is_evaluated():
    """Nobody waits hours to hear that the suites differ."""
    called = []

    def counting(batch):
        called.append(batch)
        return {"m": batch}

    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(counting, [numbers()], {"m": M.Max()}, start=trainfold.evaluation.no_tally({"m": M.Min()}))
    suites = [{"m": M.Max()}, {"m": M.Min()}]
    outcomes = thread_outcomes(
        2, lambda ranks: trainfold.evaluate(counting, [numbers()], suites[ranks.rank], collectives=ranks)
    )
    assert [type(outcome.error) for outcome in outcomes] == [RanksDisagree] * 2
    assert called == []


class OldSequence:
    """Iterated over by index, as datasets are."""

    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.tensor(float(index))


def test_batches_may_be_anything_that_can_be_iterated_over():
    assert trainfold.evaluate(summed, OldSequence(), SUM) == {"sum": 3.0}


def part_of(cursor, limit=None):
    return trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=limit)


def test_a_start_has_to_end_where_the_batches_begin():
    """P30: neither a gap nor a sample twice."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4)
    half = trainfold.evaluate(summed, part_of(cursor, limit=2), SUM)
    for at in (0, 12):
        other = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4, next_index=at)
        with pytest.raises(InvalidArgument, match="sample 8"):
            trainfold.evaluate(summed, part_of(other), SUM, start=half.tally)
    assert not trainfold.evaluate(summed, [], SUM, start=half.tally).complete
    assert trainfold.evaluate(summed, part_of(cursor.advance(2)), SUM, start=half.tally).complete


def enumerate_less(part):
    yield from part


class Bar:
    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        return iter(self.iterable)


@pytest.mark.parametrize(
    "wrapped",
    [
        functools.partial(map, torch.clone),
        iter,
        lambda part: (batch for batch in part),
        enumerate_less,
        Bar,
    ],
)
def test_a_part_behind_a_wrapper_is_still_a_part(wrapped):
    """Q12: what a progress bar or a map hides."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4)
    assert not trainfold.evaluate(summed, wrapped(part_of(cursor, limit=2)), SUM).complete
    assert trainfold.evaluate(summed, wrapped(part_of(cursor)), SUM).complete
    ticks = itertools.count()
    cut = trainfold.evaluation.time_limit([numbers()] * 9, secs=3, clock=lambda: next(ticks))
    assert not trainfold.evaluate(summed, wrapped(cut), SUM).complete


class Unspeakable(ValueError):
    def __str__(self):
        raise RuntimeError("nothing to say")


def test_an_error_that_cannot_be_shown_is_told_all_the_same():
    def work(ranks):
        def bad(batch):
            if ranks.rank == 1:
                raise Unspeakable
            return {"sum": batch}

        return trainfold.evaluate(bad, [numbers()], SUM, collectives=ranks)

    outcomes = thread_outcomes(2, work, timeout_secs=10)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, Unspeakable]
    assert "rank 1: Unspeakable" in str(outcomes[0].error)


def test_a_failure_to_put_things_back_is_told():
    """Q03, Q06: the other ranks do not wait for the sum."""

    class Stuck(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise OSError("stuck")

    caught = []

    def work(ranks):
        try:
            return trainfold.evaluate(summed, Stuck([numbers()]) if ranks.rank else [numbers()], SUM, collectives=ranks)
        except (OSError, RankFailed) as error:
            caught.append(type(error))
            return None  # and lives on

    run_threads(2, work, timeout_secs=10)
    assert sorted(kind.__name__ for kind in caught) == ["OSError", "RankFailed"]


def test_collectives_are_as_good_as_before_when_every_rank_knew():
    def work(ranks):
        with pytest.raises((InvalidArgument, RankFailed)):
            trainfold.evaluate(summed, [numbers()], SUM if ranks.rank else {}, collectives=ranks)
        return trainfold.evaluate(summed, [numbers(3)], SUM, collectives=ranks)

    assert run_threads(2, work) == [{"sum": 6.0}] * 2


def by_global_name(batch):
    return {"loss": (GLOBAL_MODEL(batch), 1)}


class Base:
    def helper(self, batch):
        return by_global_name(batch)


class Measuring(Base):
    def __call__(self, batch):
        return self.helper(batch)

    def measure(self, batch):
        return super().helper(batch)

    @property
    def model(self):
        return GLOBAL_MODEL

    @staticmethod
    def still(batch):
        return by_global_name(batch)


def by_import(batch):
    import tests_of_a_model_module

    return {"loss": (tests_of_a_model_module.sub.net(batch), 1)}


@pytest.mark.parametrize("kind", ["call", "super", "property", "static", "import"])
def test_modules_named_by_what_a_function_calls_are_found(kind, monkeypatch):
    """Q06: through methods, properties, base classes and modules."""
    module = types.ModuleType("tests_of_a_model_module")
    module.sub = types.ModuleType("sub")
    module.sub.net = GLOBAL_MODEL
    monkeypatch.setitem(sys.modules, "tests_of_a_model_module", module)
    it = Measuring()
    forward = {
        "call": it,
        "super": it.measure,
        "property": lambda batch: {"loss": (it.model(batch), 1)},
        "static": Measuring.still,
        "import": by_import,
    }[kind]
    GLOBAL_MODEL.seen.clear()
    trainfold.evaluate(forward, batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert GLOBAL_MODEL.seen == [(False, False, False)]
    assert GLOBAL_MODEL.training


class Haunted:
    """What a search must not touch."""

    def __init__(self, model):
        self.gone = weakref.proxy(torch.nn.Linear(1, 1))
        self.lazy = Lazy()
        self.words = [["word"] * 4000 for _ in range(30)]
        self.samples = [{"text": "x"} for _ in range(4000)]
        self.deep = Chain(Chain(Chain(model)))


class Lazy(dict):
    def values(self):
        raise AssertionError("computed")

    def __iter__(self):
        raise AssertionError("computed")

    @property
    def costly(self):
        raise AssertionError("computed")


def test_a_search_touches_nothing_and_is_not_stopped_by_data():
    model = Counting()
    it = Haunted(model)
    trainfold.evaluate(
        lambda batch: {"loss": (it.deep.inner.inner.inner(batch), 1)},
        batches_of(torch.ones(2), []),
        {"loss": M.Ratio()},
    )
    assert model.seen == [(False, False, False)]


def test_a_module_with_one_mode_is_evaluated_in_it():
    exported = torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)).module()
    found = trainfold.evaluate(lambda batch: {"sum": exported(batch)}, [torch.ones(1, 1)], SUM)
    assert len(found) == 1


def test_a_model_that_threads_share_is_put_back_when_the_last_one_is_done():
    """Q06: ranks as threads, as one tries things out."""
    for _ in range(10):
        model = Counting()
        model.inner[1].eval()

        def work(ranks, model=model):
            batches = batches_of(torch.ones(4), [1, 2])
            return trainfold.evaluate(lambda b: {"sum": model(b)}, batches, SUM, collectives=ranks)

        run_threads(3, work)
        assert (model.training, model.inner[0].training, model.inner[1].training) == (True, True, False)
        assert set(model.seen) == {(False, False, False)}


@attrs.frozen
class Weighted:
    weight: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Tagged:
    tags: frozenset


class Plain:
    def __init__(self, number):
        self.number = number


def scaled(factor):
    return lambda value: value * factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Weighted(torch.tensor([1.0] * 2000)), Weighted(torch.tensor([1.0] * 999 + [2.0] + [1.0] * 1000))),
        (Weighted(torch.tensor([1.00001])), Weighted(torch.tensor([1.00002]))),
        (Plain(1), Plain(5)),
        (Plain(scaled(2)), Plain(scaled(3))),
        (Tagged(frozenset("ab")), Tagged(frozenset("ac"))),
        (Plain(torch.float16), Plain(torch.float32)),
        (Plain(np.float32), Plain(np.float64)),
    ],
)
def test_metrics_that_differ_in_a_field_have_another_text(one, other):
    assert text_of(one) != text_of(other)
    assert text_of(one) == text_of(copy.deepcopy(one) if not callable(getattr(one, "number", None)) else one)


def test_the_text_of_a_metric_is_the_same_in_every_process():
    script = (
        "import dataclasses\nfrom trainfold.core.metrics.text import text_of\n"
        "T = dataclasses.make_dataclass('T', ['tags'])\n"
        "print(text_of(T(frozenset(['a', 'b', 'c', 'd', 'e']))))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }
    assert len(printed) == 1


# --- what a third review found ---------------------------------------------------------------------------------------


class Ordinary(torch.Tensor):
    """A subclass that is plain memory."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("count", [8, 100])
def test_tensors_that_are_not_plain_memory_are_refused(count):
    """Q02: what lies in their memory is another sum than theirs."""
    terms = torch.arange(float(count))
    for odd, named in (
        (torch.masked.masked_tensor(terms, terms < 3), "MaskedTensor"),
        (torch.nested.nested_tensor([terms, terms[:2]]), "nested"),
        (torch.nested.nested_tensor([terms, terms[:2]], layout=torch.jagged), "NestedTensor"),
        (terms.to_sparse(), "sparse"),
    ):
        for metric in (M.Mean(), Fielded()):
            with pytest.raises(InvalidArgument, match=f"forward returned for 'sum': .*{named}"):
                trainfold.evaluate(lambda _, odd=odd: {"sum": odd}, [0], {"sum": metric})
        with pytest.raises(InvalidArgument, match=named):
            M.Sum().observe(M.Sum().zero(), odd)
        with pytest.raises(InvalidArgument, match=named):
            exact_add(exact_zero(), odd)
    for plain in (torch.nn.Parameter(terms), terms.as_subclass(Ordinary)):
        assert trainfold.evaluate(summed, [plain], SUM) == {"sum": terms.sum().item()}


class BySource:
    """Hits of each source, by its name: the structure of its accumulators depends on the data."""

    def __init__(self, *, additive):
        self.additive = additive

    def zero(self):
        return {}

    def observe(self, acc, name, hits):
        return {**acc, name: acc.get(name, 0) + hits.sum()}

    def merge(self, one, other):
        none = torch.zeros((), dtype=torch.int64)
        return {key: one.get(key, none) + other.get(key, none) for key in sorted({**one, **other})}

    def result(self, acc):
        return {key: int(hits) for key, hits in sorted(acc.items())} or None


@pytest.mark.parametrize("additive", [False, True])
def test_accumulators_whose_structure_depends_on_the_data_keep_their_own(additive):
    """Q03: nobody's hits become another source's; a rank without data is none that disagrees."""
    hits = [
        ("wiki", torch.tensor([3])),
        ("code", torch.tensor([5])),
        ("web", torch.tensor([7])),
        ("wiki", torch.tensor([1])),
    ]
    suite = {"hits": BySource(additive=additive), "mean": M.Mean()}

    def work(ranks):
        mine = hits[ranks.rank :: ranks.world_size]
        return trainfold.evaluate(lambda batch: {"hits": batch, "mean": batch[1]}, mine, suite, collectives=ranks)

    for world in (1, 2, 3, 5):
        assert run_threads(world, work) == [{"hits": {"code": 5, "web": 7, "wiki": 4}, "mean": 4.0}] * world


@pytest.mark.parametrize("kind", [dict, set, deque])
def test_what_another_thread_changes_meanwhile_is_no_failure(kind):
    """A loader's thread that fills its queue."""

    class Loader(list):
        def __init__(self):
            super().__init__([numbers(3)])
            self.queue = kind()
            self.stop = False
            self.thread = threading.Thread(target=self.fill)
            self.thread.start()

        def fill(self):
            for index in itertools.count():
                if self.stop:
                    return
                {dict: dict.setdefault, set: set.add, deque: deque.append}[kind](self.queue, (index,))
                if len(self.queue) > 3000:
                    self.queue.clear()

    loader = Loader()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            assert trainfold.evaluate(summed, loader, SUM) == {"sum": 3.0}
    finally:
        sys.setswitchinterval(before)
        loader.stop = True
        loader.thread.join()


def without_gradients():
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(3):
            yield numbers(3)


class WithoutGradients:
    def __iter__(self):
        return without_gradients()


@pytest.mark.parametrize("made", [without_gradients, WithoutGradients])
@pytest.mark.parametrize("wrapped", [lambda batches: batches, functools.partial(map, torch.clone)])
@pytest.mark.parametrize("cut", ["steps", "time", "error"])
def test_a_generator_that_is_left_changes_nothing_afterwards(made, wrapped, cut):
    """Q06: what it puts back when it is closed, some time after the evaluation, is put back in the evaluation."""
    batches = wrapped(made())
    if cut == "steps":
        trainfold.evaluate(summed, batches, SUM, steps=1)
    elif cut == "time":
        ticks = itertools.count()
        trainfold.evaluate(summed, trainfold.evaluation.time_limit(batches, secs=2, clock=lambda: next(ticks)), SUM)
    else:
        with pytest.raises(ZeroDivisionError):
            trainfold.evaluate(lambda _: 1 / 0, batches, SUM)
    assert torch.is_grad_enabled()
    torch.manual_seed(77)
    state = torch.get_rng_state()
    del batches
    gc.collect()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2])
def test_a_result_that_no_rank_can_have_is_nobodys_failure(world):
    """Q03: every rank raises the same, and the collectives are as good as before."""

    def work(ranks):
        classes = torch.tensor([0, 5])
        with pytest.raises(InvalidArgument, match="Confusion"):
            trainfold.evaluate(lambda _: {"c": (classes, classes)}, [0], {"c": M.Confusion(2)}, collectives=ranks)
        return trainfold.evaluate(summed, [numbers(3)], SUM, collectives=ranks)

    assert run_threads(world, work) == [{"sum": 3.0 * world}] * world


def test_a_forward_that_takes_a_batch_apart_has_it_whole_when_it_is_repeated():
    """Q05: `labels = batch.pop("labels")` is how many write it."""

    def taking(batch):
        return {"sum": batch["x"] * batch.pop("y") + batch["more"].pop()}

    def work(ranks, kind):
        batches = [kind({"x": numbers(2), "y": numbers(2), "more": [numbers(2)]}) for _ in range(2 - ranks.rank)]
        return trainfold.evaluate(taking, batches, SUM, collectives=ranks, steps=3)

    assert run_threads(2, functools.partial(work, kind=dict)) == [{"sum": 6.0}] * 2
    batches = [UserDict({"x": numbers(2), "y": numbers(2), "more": [numbers(2)] * 3})]
    assert trainfold.evaluate(taking, batches, SUM, steps=3) == {"sum": 2.0}


INSTALLED = """
import torch
model = torch.nn.Dropout().train()
seen = []
def helper(batch):
    seen.append(model.training)
    return {"sum": model(batch)}
def forward(batch):
    return helper(batch)
"""


@pytest.mark.parametrize("folder", ["site-packages/mine", "dist-packages/mine", "trainfold_of_mine"])
@pytest.mark.parametrize("wrapped", [lambda f: f, functools.partial, torch.no_grad(), functools.lru_cache])
def test_a_function_of_an_installed_package_is_the_users_own_where_it_is_what_is_evaluated(tmp_path, folder, wrapped):
    """Q06: whoever installs a project evaluates it too."""
    module = types.ModuleType("mine.code")
    exec(compile(INSTALLED, tmp_path / folder / "code.py", "exec"), vars(module))
    trainfold.evaluate(wrapped(module.forward), [numbers(2)], SUM)
    assert module.seen == [False]
    assert module.model.training


def test_folders_beside_a_librarys_are_none_of_its():
    """Where the name of one is the beginning of the other's."""
    beside = Path(trainfold.__file__).parent.with_name("trainfold_experiments") / "train.py"
    for path in (beside, Path(os.__file__).parent.with_name("python3.99-mine") / "train.py"):
        module = types.ModuleType("train")
        exec(compile(INSTALLED, path, "exec"), vars(module))
        trainfold.evaluate(lambda batch, module=module: module.forward(batch), [numbers(2)], SUM)
        assert module.seen == [False]


@pytest.mark.parametrize("kind", ["cached", "cached property", "partial method", "context", "method of a dict"])
def test_modules_behind_what_functools_and_builtins_make_are_found(kind):
    """Q06."""
    model = Counting()

    class Holder:
        def __init__(self):
            variable.set(model)

        @functools.cached_property
        def cached(self):
            return GLOBAL_MODEL

        def run(self, which, batch):
            return {"loss": (which(batch), 1)}

        partly = functools.partialmethod(run, model)

    variable = contextvars.ContextVar("variable")
    holder, get = Holder(), {"model": model}.get
    forward = {
        "cached": functools.lru_cache(lambda batch: {"loss": (model(batch.batch), 1)}),
        "cached property": lambda batch: {"loss": (holder.cached(batch), 1)},
        "partial method": holder.partly,
        "context": lambda batch: {"loss": (variable.get()(batch), 1)},
        "method of a dict": lambda batch: {"loss": (get("model")(batch), 1)},
    }[kind]
    GLOBAL_MODEL.seen.clear()
    batch = batches_of(torch.ones(2), [])[0]
    trainfold.evaluate(forward, [Hashed(batch) if kind == "cached" else batch], {"loss": M.Ratio()})
    assert (GLOBAL_MODEL.seen if kind == "cached property" else model.seen) == [(False, False, False)]


class Hashed:
    def __init__(self, batch):
        self.batch = batch


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("where", ["forward", "loader", "metric"])
def test_an_error_keeps_nothing_alive_and_what_it_came_from(where, steps):
    """After an out-of-memory error, memory is what is needed."""
    gone = []

    def raising():
        activation = torch.ones(10)
        gone.append(weakref.ref(activation))
        try:
            {}["missing key"]
        except KeyError:
            raise MemoryError("CUDA out of memory")  # noqa: B904 this is what is tested

    class Raising(Fielded):
        def observe(self, acc, values):
            raising()

    def loader():
        yield numbers(2)
        if where == "loader":
            raising()

    def forward(batch):
        if where == "forward":
            raising()
        return {"sum": batch}

    def failing():
        with pytest.raises(MemoryError) as caught:
            trainfold.evaluate(forward, loader(), {"sum": Raising() if where == "metric" else M.Sum()}, steps=steps)
        return caught.value

    gc.disable()
    try:
        try:
            {}["handled meanwhile"]
        except LookupError:
            error = failing()
        assert error.__context__.args == ("missing key",)
        assert not error.__suppress_context__
        del error
        with contextlib.suppress(MemoryError):
            trainfold.evaluate(forward, loader(), {"sum": Raising() if where == "metric" else M.Sum()}, steps=steps)
        assert gone[1]() is None
    finally:
        gc.enable()


def test_batches_are_let_go_of_as_soon_as_they_were_evaluated():
    alive, seen = [], []

    def loader():
        for _ in range(3):
            batch = numbers(2)
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    def forward(batch):
        alive.append([ref() is not None for ref in seen])
        return {"sum": batch}

    trainfold.evaluate(forward, loader(), SUM)
    assert alive == [[True], [False, True], [False, False, True]]


def test_too_much_data_to_look_at_is_told_once_and_does_not_hide_a_sampler():
    """Q06: a generator that a sampler holds is found before the samples."""
    generator = torch.Generator().manual_seed(3)
    samples = [{f"k{key}": [index] for key in range(22)} for index in range(4900)]

    class Sampler:
        def __init__(self):
            self.samples = samples
            self.inner = Chain(Chain(Chain(generator)))

        def __len__(self):
            return 4

        def __iter__(self):
            return iter(torch.randperm(4, generator=generator).tolist())

    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=Sampler(), collate_fn=lambda _: numbers(2))
    before = generator.get_state()
    with pytest.warns(UserWarning, match="100,000 objects behind a DataLoader.*keep samples in arrays") as caught:
        trainfold.evaluate(summed, loader, SUM)
    assert len(caught) == 1
    assert torch.equal(generator.get_state(), before)


def test_a_position_that_a_loader_gives_by_reference_is_put_back():
    class Referring(list):
        def __init__(self):
            super().__init__([numbers(3)])
            self.state = {"position": 2}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

        def __iter__(self):
            self.state["position"] = 9
            return super().__iter__()

    loader = Referring()
    trainfold.evaluate(summed, loader, SUM)
    assert loader.state == {"position": 2}
