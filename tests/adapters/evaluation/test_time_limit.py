"""A time limit ends the batches of an evaluation."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.adapters.evaluation.time_limit import time_limit
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.moments import Sum


class Clock:
    def __init__(self):
        self.secs = 100.0

    def __call__(self):
        return self.secs


@given(costs=st.lists(st.integers(0, 5), max_size=12), secs=st.integers(1, 20))
def test_it_gives_what_begins_in_time_and_at_least_one_and_knows_whether_there_was_more(costs, secs):
    clock, given_ = Clock(), []
    limited = time_limit(costs, secs=secs, clock=clock)
    for cost in limited:
        given_.append(cost)
        clock.secs += cost
    begins = [sum(costs[:index]) for index in range(len(costs))]
    expected = list(itertools.takewhile(lambda index: index == 0 or begins[index] < secs, range(len(costs))))
    assert given_ == costs[: len(expected)]
    assert limited.complete == (len(expected) == len(costs))


def test_the_first_batch_is_given_however_long_it_takes_to_load():
    clock = Clock()

    def slowly():
        for batch in range(3):
            clock.secs += 7
            yield batch

    limited = time_limit(slowly(), secs=5, clock=clock)
    assert list(limited) == [0]
    assert not limited.complete


def test_it_can_be_iterated_again_with_all_of_its_time():
    clock = Clock()
    limited = time_limit([1, 2, 3], secs=1, clock=clock)
    assert limited.complete is False
    assert list(limited) == [1, 2, 3]
    assert limited.complete
    for _ in limited:
        clock.secs += 1
        assert limited.complete is False
    assert limited.complete is False
    assert list(limited) == [1, 2, 3]
    assert limited.complete


def test_who_breaks_off_has_not_seen_all():
    limited = time_limit([1, 2, 3], secs=1, clock=Clock())
    assert next(iter(limited)) == 1
    assert not limited.complete


def test_time_that_is_none_is_refused_and_what_batches_have_is_there():
    for secs in (0, -1, float("nan")):
        with pytest.raises(InvalidArgument, match="secs"):
            time_limit([], secs=secs)
    assert time_limit([3, 3], secs=1).count(3) == 2
    with pytest.raises(AttributeError):
        time_limit([], secs=1).nothing_like_it  # noqa: B018  # to ask is what is tested


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_a_limit_on_one_rank_makes_the_evaluation_partial_on_all(steps, slow):
    """Q12: a partial evaluation is marked as partial on every rank."""

    def work(collectives):
        clock = Clock()

        def forward(batch):
            if collectives.rank == slow:
                clock.secs += 4
            return {"sum": batch}

        batches = time_limit([1, 2, 3], secs=5, clock=clock)
        return evaluate(forward, batches, {"sum": Sum()}, collectives=collectives, steps=steps)

    for found in run_threads(2, work):
        assert found.complete == (slow is None)
        assert found == {"sum": 12 if slow is None else 9}
