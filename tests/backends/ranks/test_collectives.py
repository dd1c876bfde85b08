"""Collectives: equal results, equal schedules, and no rank left waiting."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.call import Call
from trainfold.backends.ranks.in_process import (
    InjectedFailure,
    RankFault,
    SingleProcess,
    run_threads,
    thread_outcomes,
)
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree
from trainfold.core.layout.world import Collectives


def test_both_kinds_of_collectives_keep_the_protocol():
    assert isinstance(SingleProcess(), Collectives)
    assert run_threads(2, lambda collectives: isinstance(collectives, Collectives)) == [True, True]


@settings(max_examples=25, deadline=None)
@given(
    terms=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
)
def test_a_sum_has_the_same_bits_on_every_rank_and_is_the_fold_in_rank_order(terms):
    def work(collectives):
        return collectives.all_sum([torch.tensor([terms[collectives.rank]]), torch.tensor(1)])

    expected = torch.tensor([terms[0]])
    for term in terms[1:]:
        expected = expected + torch.tensor([term])
    for total, count in run_threads(len(terms), work):
        assert total.view(torch.int32).equal(expected.view(torch.int32))
        assert int(count) == len(terms)


def test_a_sum_leaves_its_inputs_alone_and_belongs_to_its_rank():
    def work(collectives):
        mine = torch.ones(3)
        (total,) = collectives.all_sum([mine])
        total += collectives.rank
        collectives.barrier(timeout_secs=5)
        return mine.tolist(), total.tolist()

    assert run_threads(2, work) == [([1.0] * 3, [2.0] * 3), ([1.0] * 3, [3.0] * 3)]


def test_broadcast_and_gather_give_each_rank_its_own_copy():
    def work(collectives):
        shared = collectives.broadcast({"ranks": []} if collectives.rank == 1 else None, source=1)
        shared["ranks"].append(collectives.rank)
        return collectives.gather(shared["ranks"])

    assert run_threads(3, work) == [[[0], [1], [2]]] * 3


@settings(max_examples=40, deadline=None)
@given(world_size=st.integers(1, 6), data=st.data())
def test_a_rank_that_fails_at_any_point_fails_all_and_leaves_nobody_waiting(world_size, data):
    """C07: an error on one rank raises on all ranks, naming the rank; no rank is left in a barrier."""
    fault = RankFault(data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, 4)))

    def work(collectives):
        collectives.barrier(timeout_secs=30)
        collectives.gather(1)
        collectives.broadcast(2)
        collectives.all_sum([torch.ones(2)])
        collectives.barrier(timeout_secs=30)

    for outcome in thread_outcomes(world_size, work, fail_at=fault):
        assert isinstance(outcome.error, InjectedFailure if outcome.rank == fault.rank else RankFailed)
        assert f"rank {fault.rank}" in str(outcome.error)
        assert len(outcome.schedule) <= fault.call_index + 1
        if outcome.rank != fault.rank:
            assert isinstance(outcome.error.__cause__, InjectedFailure)


def test_an_error_between_collectives_reaches_the_ranks_that_wait():
    def work(collectives):
        if collectives.rank == 2:
            raise OSError("disk of rank 2")
        collectives.barrier(timeout_secs=30)

    with pytest.raises(OSError, match="disk of rank 2"):
        run_threads(4, work)
    outcomes = thread_outcomes(4, work)
    assert all("OSError: disk of rank 2" in str(outcome.error) for outcome in outcomes if outcome.rank != 2)


def test_a_rank_that_vanishes_is_named_after_the_deadline():
    def work(collectives):
        collectives.barrier(timeout_secs=0.05)

    outcomes = thread_outcomes(3, work, fail_at=RankFault(1, 0, silent=True))
    assert all("ranks [1] missing" in str(outcomes[rank].error) for rank in (0, 2))


def test_a_rank_that_calls_something_else_stops_all_ranks():
    def work(collectives):
        if collectives.rank == 0:
            collectives.gather(0)
        else:
            collectives.barrier(timeout_secs=30)

    for outcome in thread_outcomes(3, work):
        assert isinstance(outcome.error, RanksDisagree)
    with pytest.raises(RanksDisagree, match=r"rank 0 calls gather\(\)"):
        run_threads(3, work)


def test_sums_of_different_shapes_disagree():
    with pytest.raises(RanksDisagree, match="float32"):
        run_threads(2, lambda collectives: collectives.all_sum([torch.ones(collectives.rank + 1)]))


def test_a_rank_that_returns_early_stops_the_ranks_that_wait_for_it():
    def work(collectives):
        if collectives.rank != 1:
            collectives.barrier(timeout_secs=30)

    with pytest.raises(RanksDisagree, match="rank 1 has returned"):
        run_threads(3, work)


def test_the_schedule_is_recorded_for_each_rank():
    def work(collectives):
        collectives.barrier(timeout_secs=5)
        collectives.broadcast("x", source=1)

    schedules = {outcome.schedule for outcome in thread_outcomes(3, work)}
    assert schedules == {(Call("barrier"), Call("broadcast", "source=1"))}


def test_a_call_with_a_rank_outside_the_world_is_refused():
    with pytest.raises(InvalidArgument, match="source"):
        SingleProcess().broadcast(1, source=1)
    with pytest.raises(InvalidArgument, match="world_size"):
        run_threads(0, lambda collectives: None)


def test_a_world_of_one_is_the_same_as_one_thread():
    def work(collectives):
        (total,) = collectives.all_sum([torch.tensor([0.1])])
        collectives.barrier(timeout_secs=1)
        collectives.fail(ValueError()) if collectives.world_size > 1 else None
        return collectives.rank, collectives.world_size, total.item(), collectives.broadcast(3), collectives.gather(4)

    assert run_threads(1, work) == [work(SingleProcess())]
    assert attrs.asdict(SingleProcess()) == {"rank": 0, "world_size": 1}
