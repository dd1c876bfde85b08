"""Rank 0 decides on the best, and every rank acts on its decision."""

import attrs

from trainfold.backends.ranks.decide_best import decide_best, decide_best_n
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import InvalidArgument, RankFailed


def test_every_rank_acts_on_the_verdict_of_rank_0_whatever_it_measured_itself():
    """E08: rank 0 decides once and shares the verdict, even if results and records differ between ranks."""
    record = make_best_record(metric="m", direction="min")

    def work(world):
        mine = updated(record, {"m": 0.4 if world.rank == 2 else 0.6}, step=1)
        return decide_best(mine, {"m": (0.5, 0.9, 0.1)[world.rank]}, step=7, collectives=world)

    outcomes = thread_outcomes(3, work)
    assert [outcome.value for outcome in outcomes] == [(attrs.evolve(record, score=0.5, step=7), True)] * 3
    assert {outcome.schedule for outcome in outcomes} == {outcomes[0].schedule}
    assert len(outcomes[0].schedule) == 1


def test_ranks_agree_that_nothing_won():
    record = updated(make_best_record(metric="m", direction="max"), {"m": 0.5}, step=0)
    assert (
        run_threads(2, lambda world: decide_best(record, {"m": world.rank}, step=3, collectives=world))
        == [(record, False)] * 2
    )


def test_an_error_on_rank_0_is_raised_on_every_rank():
    record = make_best_record(metric="m", direction="min")
    result = {"m": [1.0]}
    outcomes = thread_outcomes(2, lambda world: decide_best(record, result, step=1, collectives=world))
    assert [type(outcome.error) for outcome in outcomes] == [InvalidArgument, RankFailed]
    assert "one number" in str(outcomes[1].error)


def test_every_rank_has_the_n_best_of_rank_0():
    """E08: one collective, even if rank 0 fails to decide."""
    record = make_best_record(metric="m", direction="min")

    def work(world, n=2):
        mine = (BestEntry(0.1 * (world.rank + 1), 1),)
        return decide_best_n(record, mine, {"m": 0.5 - world.rank}, step=7, n=n, collectives=world)

    outcomes = thread_outcomes(3, work)
    assert {outcome.value[1].kept for outcome in outcomes} == {(BestEntry(0.1, 1), BestEntry(0.5, 7))}
    assert {outcome.value[0].score for outcome in outcomes} == {0.5}
    assert [len(outcome.schedule) for outcome in outcomes] == [1, 1, 1]
    failed = thread_outcomes(2, lambda world: work(world, n=0))
    assert [type(outcome.error) for outcome in failed] == [InvalidArgument, RankFailed]
