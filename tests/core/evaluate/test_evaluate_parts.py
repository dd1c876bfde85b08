"""Evaluations in parts: however one is split and continued, it is complete only if each sample was counted once."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree
from trainfold.core.evaluate.suite import check_tally, no_tally
from trainfold.core.format.codec import leaf_digest

SUITE = {"sum": M.Sum()}


def powers(at):
    """Their sum shows how often each sample was counted."""
    return torch.tensor([4.0**index for index in at], dtype=torch.float64)


def summed(batch):
    return {"sum": batch}


def part_of(length, at, *, size=4, limit=None, ranks=None):
    cursor = trainfold.evaluation.make_eval_cursor(length, global_batch_size=size, next_index=at)
    return trainfold.evaluation.eval_batches(cursor, powers, collectives=ranks, limit=limit)


def after_some(part, count):
    iterator = iter(part)
    for _ in range(count):
        next(iterator, None)
    return iterator


def ahead_of(part):
    yield from list(part)


def limited(part, count):
    ticks = itertools.count()
    return trainfold.evaluation.time_limit(part, secs=count, clock=lambda: next(ticks))


CUTS = {
    "whole": lambda part, _: part,
    "generator": lambda part, _: (batch for batch in part),
    "slice": itertools.islice,
    "advanced": after_some,
    "read ahead": lambda part, count: itertools.islice(ahead_of(part), count),
    "twice": lambda part, _: itertools.chain(part, part),
    "time": limited,
    "time outside of a generator": lambda part, count: limited((batch for batch in part), count),
    "every other": lambda part, count: itertools.islice(part, 0, None, count),
    "filter": lambda part, count: (batch for index, batch in enumerate(part) if index != count - 1),
}


@settings(deadline=None, max_examples=150)
@given(length=st.integers(0, 12), data=st.data())
def test_complete_is_each_sample_once_whatever_cut_the_evaluation_and_however_it_goes_on(length, data):
    """Q01, Q12, P30: the tally's position says the same: each sample before it was counted once, and no other."""
    tally, promised = None, 0
    for _ in range(data.draw(st.integers(1, 4), "parts")):
        world = data.draw(st.integers(1, 3), "ranks")
        how = data.draw(st.sampled_from([*CUTS, "steps"]), "cut")
        limit = data.draw(st.none() | st.integers(1, 3), "limit")
        size = data.draw(st.integers(1, 5), "size")
        counts = [data.draw(st.integers(1, 3), "count") for _ in range(world)]
        known = tally is not None and tally.next_index >= 0
        places = [0, promised, *([tally.next_index] * 4 if known else [])]
        at = data.draw(st.sampled_from(places), "at")
        start = data.draw(st.sampled_from([tally, tally, tally, None]), "start")

        def work(ranks, how=how, limit=limit, size=size, counts=counts, at=at, start=start):
            part = part_of(length, at, size=size, limit=limit, ranks=ranks)
            batches = part if how == "steps" else CUTS[how](part, counts[ranks.rank])
            steps = counts[0] if how == "steps" else None
            found = trainfold.evaluate(summed, batches, SUITE, collectives=ranks, steps=steps, start=start)
            leaves = [leaf_digest(leaf) for leaf in tree.leaves(found.tally.accumulators)]
            return found, (leaves, found.tally.complete, found.tally.next_index), part.after.next_index

        outcomes = thread_outcomes(world, work)
        if any(outcome.error is not None for outcome in outcomes):
            errors = {type(outcome.error) for outcome in outcomes}
            assert errors in ({InvalidArgument}, {RanksDisagree}, {InvalidArgument, RankFailed})
            continue
        found, told, promised = outcomes[0].value
        assert all(outcome.value[1] == told for outcome in outcomes), "all ranks have the same tally"
        tally = found.tally
        if found.complete and found.batches:  # a used-up iterator does not say what it contained
            assert found.get("sum", 0.0) == sum(4.0**index for index in range(length))
        if tally.next_index >= 0:
            assert found.get("sum", 0.0) == sum(4.0**index for index in range(tally.next_index))


@pytest.mark.parametrize("how", ["whole", "generator"])
def test_an_evaluation_that_nothing_cuts_is_complete_and_one_by_parts_is_at_its_end(how):
    """Q12: a whole evaluation is never reported as partial."""
    for length, size, world in itertools.product((0, 1, 5, 12), (1, 4, 5), (1, 3)):

        def work(ranks, length=length, size=size):
            tally, found = None, None
            while tally is None or tally.next_index < length:
                at = 0 if tally is None else tally.next_index
                part = CUTS[how](part_of(length, at, size=size, limit=2, ranks=ranks), 0)
                found = trainfold.evaluate(summed, part, SUITE, collectives=ranks, start=tally)
                tally = found.tally
            whole = trainfold.evaluate(
                summed, CUTS[how](part_of(length, 0, size=size, ranks=ranks), 0), SUITE, collectives=ranks
            )
            return found, found.complete, whole, whole.complete

        for found, is_complete, whole, is_whole in run_threads(world, work):
            assert is_complete
            assert is_whole
            assert found == whole


def test_steps_cut_an_evaluation_where_it_can_go_on():
    """P30: the tally's position is where the steps ended, not where the batches would have ended."""
    part = part_of(12, 0)
    cut = trainfold.evaluate(summed, part, SUITE, steps=2)
    assert (cut.complete, cut.tally.next_index) == (False, 8)
    with pytest.raises(InvalidArgument, match="one that reached sample 8"):
        trainfold.evaluate(summed, part_of(12, part.after.next_index), SUITE, start=cut.tally)
    rest = trainfold.evaluate(summed, part_of(12, 8), SUITE, start=cut.tally)
    assert rest.complete
    assert rest == trainfold.evaluate(summed, part_of(12, 0), SUITE)


def test_a_limit_of_time_on_one_rank_leaves_no_position_on_any():
    """Q12: all ranks have the same tally, so any of them can save it."""

    def work(ranks):
        part = part_of(12, 0, ranks=ranks)
        return trainfold.evaluate(summed, limited(part, 99 if ranks.rank else 1), SUITE, collectives=ranks).tally

    for tally in run_threads(2, work):
        assert (tally.complete, tally.next_index) == (False, -1)


def test_a_gap_is_never_forgotten():
    """P30: an evaluation that started late, without `start`, cannot be continued."""
    trainfold.evaluate(summed, part_of(12, 0, limit=1), SUITE)
    late = trainfold.evaluate(summed, part_of(12, 4, limit=1), SUITE)
    assert (late.complete, late.tally.next_index) == (False, -1)
    with pytest.raises(InvalidArgument, match="gap"):
        trainfold.evaluate(summed, part_of(12, 8), SUITE, start=late.tally)


def test_batches_count_what_they_gave_and_know_how_many_they_are():
    part = part_of(12, 0, limit=2)
    assert (len(part), part.given, bool(part)) == (2, 0, True)
    assert [part.given for _ in part] == [1, 2]
    next(iter(part))
    assert part.given == 1


@given(length=st.integers(0, 20), size=st.integers(1, 9), world=st.integers(1, 4), limit=st.none() | st.integers(1, 4))
def test_the_length_of_a_ranks_batches_is_how_many_it_gives(length, size, world, limit):
    for rank in range(world):

        class Ranks:
            world_size = world

        Ranks.rank = rank
        part = part_of(length, 0, size=size, limit=limit, ranks=Ranks)
        assert len(part) == len(list(part)) == part.given


def test_a_loader_with_a_rank_of_its_own_may_be_limited():
    """A loader's attributes are not those of a cursor's batches."""

    class Loader(list):
        rank, world_size, cursor, steps = 1, 4, "mine", 3

    batches = trainfold.evaluation.time_limit(Loader([powers(range(3))]), secs=3600)
    assert trainfold.evaluate(summed, batches, SUITE) == {"sum": 21.0}


def test_a_tally_that_names_the_module_of_a_metric_is_gone_on_with():
    """Q01: older tallies say `trainfold.core.metrics.topk.TopK`; the class has one public name, whatever its module."""
    suite = {"top": M.TopK(2), "loss": M.Ratio()}
    tally = no_tally(suite)
    assert tally.metrics["top"].startswith("trainfold.metrics.TopK(")
    old = {"top": tally.metrics["top"].replace("trainfold.metrics.", "trainfold.core.metrics.topk."),
           "loss": tally.metrics["loss"].replace("trainfold.metrics.", "trainfold.core.metrics.ratio.")}  # fmt: skip
    check_tally("start", suite, attrs.evolve(tally, metrics=old))
    with pytest.raises(InvalidArgument, match="TopK"):
        check_tally("start", suite | {"top": M.TopK(3)}, attrs.evolve(tally, metrics=old))
