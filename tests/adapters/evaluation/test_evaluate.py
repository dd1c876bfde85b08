"""Evaluations give the same bits for any split, run the same schedule on every rank, and have no side effects."""

import functools
import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.adapters.evaluate_cases import MANY, SUITE, batches_of, bits, floats, forward

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree


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
    """Q04, S50: never a 0.0 that was not measured."""
    assert trainfold.evaluate(forward, [], SUITE) == {}
    assert run_threads(3, lambda ranks: trainfold.evaluate(forward, [], SUITE, collectives=ranks)) == [{}] * 3
    found = trainfold.evaluate(lambda batch: {"loss": (batch.sum(), batch.numel())}, [torch.zeros(0)], SUITE)
    assert found == {}
    assert found.batches == 1


def test_a_metric_that_some_batches_say_nothing_of_is_of_the_others():
    """Q03, S50: a name is missing on one rank, in one batch, or everywhere."""

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
    """Q03: one gather of small values, one sum of integers; with steps, one more gather, and a batch for ranks without one."""

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
    """Q03, S50: no rank waits; the failed rank raises its own error."""

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
    """Q03: raised before anything is added up."""
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
    """Q05: uneven shards do not hang; a rank without a batch borrows one; repeated batches are not counted."""
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
    """Q05: the failure of a metric or a loader is raised at the end, that of a forward at once."""

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
    """Q12: one more batch is drawn to find out."""
    cut = batches_of(torch.arange(6.0), [2, 4])
    assert not trainfold.evaluate(forward, cut, SUITE, steps=2).complete
    assert trainfold.evaluate(forward, cut, SUITE, steps=3).complete
    assert trainfold.evaluate(forward, cut, SUITE, steps=5).complete
    assert not trainfold.evaluate(forward, iter(cut), SUITE, steps=2).complete
    assert trainfold.evaluate(forward, itertools.islice(cut, 2), SUITE, steps=2).complete


def test_a_limit_on_one_rank_makes_the_evaluation_partial_on_all():
    """Q12: the result is marked as partial on every rank."""

    class Limited(list):
        complete = False

    def work(ranks):
        cut = batches_of(torch.ones(3), [1])
        return trainfold.evaluate(forward, Limited(cut) if ranks.rank else cut, SUITE, collectives=ranks).complete

    assert run_threads(2, work) == [False, False]
