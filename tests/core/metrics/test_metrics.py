"""Metrics compared with simple models in plain Python, over any values, dtypes, batches, orders and ranks."""

import functools
import math
from fractions import Fraction

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.core.metrics_cases import (
    each_metric,
    examples,
)

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core import tree
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts, laws
from trainfold.properties.metrics.accumulators import leafwise_sum


def product(one, other):
    if math.isfinite(one) and math.isfinite(other):
        return Fraction(one) * Fraction(other)
    return float(one) * float(other)


def cropped(outputs, spare):
    """A batch cropped to the positions in use, plus a few spare ones."""
    valid = outputs[-1]
    used = int((valid != 0).any(0).nonzero().max()) + 1 if bool((valid != 0).any()) else 0
    return tuple(output[:, : min(used + spare, output.shape[1])] for output in outputs)


def ranks_of(data, case, outputs):
    """The accumulators of 1 to 8 ranks: rows in any order, batches of any size, some of them empty."""
    size = len(outputs[0])
    order = torch.tensor(data.draw(st.permutations(range(size))), dtype=torch.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    ranks = [case.metric.zero() for _ in range(data.draw(st.integers(1, 8)))]
    for rows in order.tensor_split(cuts):
        batch = tuple(output[rows] for output in outputs)
        if case.is_ragged:
            batch = cropped(batch, data.draw(st.integers(0, 1)))
        rank = data.draw(st.integers(0, len(ranks) - 1))
        ranks[rank] = case.metric.observe(ranks[rank], *batch)
    return data.draw(st.permutations(ranks))


# --- laws ------------------------------------------------------------------------------------------------------------


@each_metric
@examples(60)
@given(data=st.data())
def test_a_metric_is_what_its_model_says_however_the_samples_are_dealt_out(case, data):
    """Q01, Q02, Q04: any batch sizes, order and lengths, empty ranks, and non-finite values."""
    outputs = data.draw(case.values)
    wanted = repr(case.model(*outputs))
    assert repr(case.metric.result(case.metric.observe(case.metric.zero(), *outputs))) == wanted
    ranks = ranks_of(data, case, outputs)
    merged = functools.reduce(case.metric.merge, ranks, case.metric.zero())
    assert repr(case.metric.result(merged)) == wanted
    if case.metric.additive:
        added = case.metric.merge(case.metric.zero(), leafwise_sum(ranks))
        assert repr(case.metric.result(added)) == wanted


@each_metric
@examples(6)
@given(data=st.data())
def test_ranks_that_evaluate_have_what_the_model_says(case, data):
    """Q04, Q09: additive or not, ragged or not, with empty ranks; every rank has the same result."""
    outputs = data.draw(case.values)
    shares = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for rows in torch.arange(len(outputs[0])).tensor_split(data.draw(st.integers(1, 5))):
        batch = tuple(output[rows] for output in outputs)
        batch = cropped(batch, data.draw(st.integers(0, 1))) if case.is_ragged else batch
        data.draw(st.sampled_from(shares)).append(batch)

    def on_rank(collectives):
        share = shares[collectives.rank]
        return trainfold.evaluate(lambda batch: {"it": batch}, share, {"it": case.metric}, collectives=collectives)

    wanted = case.model(*outputs)
    for found in run_threads(len(shares), on_rank):
        assert repr(found.get("it")) == repr(wanted)
        assert ("it" in found) == (wanted is not None)


@each_metric
@examples(4)
@given(data=st.data())
def test_a_metric_keeps_the_contract(case, data):
    samples = [data.draw(case.values) for _ in range(3)]
    largest = max(samples, key=lambda sample: len(sample[0]))
    assume(len(largest[0]) > 1)
    contracts.check_metric(lambda: case.metric, samples)
    laws.batch_invariant(case.metric, largest, max_examples=4)


@each_metric
def test_nothing_seen_is_absent(case):
    """S50, Q04: no metric invents a number."""
    assert case.metric.result(case.metric.zero()) is None


@each_metric
@examples(3)
@given(data=st.data())
def test_an_evaluation_can_be_saved_in_the_middle(case, data, tmp_path_factory):
    """An accumulator is an ordinary tree: a checkpoint stores it and restores it bit for bit."""
    run = tmp_path_factory.mktemp("run")
    first, second = data.draw(case.values), data.draw(case.values)
    half = case.metric.observe(case.metric.zero(), *first)
    state = TrainState(trainer=Progress(), extra={"evaluation": {"metric": half}})
    trainfold.save(state, run)
    back = trainfold.load(run, like=state).extra["evaluation"]["metric"]
    for mine, theirs in zip(tree.leaves(half), tree.leaves(back), strict=True):
        assert torch.equal(mine, theirs)
    one, other = (case.metric.result(case.metric.observe(acc, *second)) for acc in (half, back))
    assert repr(one) == repr(other)
