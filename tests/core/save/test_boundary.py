"""What ranks agree on at a boundary, and which step counts as the last one saved: values, without a manager."""

import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import RanksDisagree
from trainfold.core.save.boundary import Boundary, agreed_boundary
from trainfold.core.save.requests import REQUESTS, merge_requests
from trainfold.core.save.triggers import (
    Triggers,
    decide,
    last_saved_after_failure,
    last_saved_at,
    make_triggers,
    with_chosen_cadence,
)

facts = st.builds(
    Boundary,
    step=st.just(3),
    has_ended=st.booleans(),
    secs_since_save=st.integers(0, 9).map(float),
    every=st.none() | st.integers(1, 9),
    asked=st.sets(st.sampled_from(REQUESTS)).map(lambda asked: merge_requests([asked])),
    has_failed=st.booleans(),
)


@given(ranks=st.lists(facts, min_size=1, max_size=4), is_last=st.booleans(), is_best=st.booleans())
def test_what_ranks_agree_on_depends_on_their_order_only_by_rank_0(ranks, is_last, is_best):
    """Rank 0 has the clock and the cadence; the rest is any and all."""
    ranks = [attrs.evolve(each, is_last=is_last, is_best=is_best) for each in ranks]
    found = agreed_boundary([each.numbers() for each in ranks])
    assert (found.secs_since_save, found.every) == (ranks[0].secs_since_save, ranks[0].every)
    for order in itertools.permutations(ranks[1:]):
        assert agreed_boundary([each.numbers() for each in (ranks[0], *order)]) == found
    assert agreed_boundary([found.numbers()] * 3) == found
    assert found.has_ended is all(each.has_ended for each in ranks)
    assert found.has_failed is any(each.has_failed for each in ranks)
    assert set(found.asked) == {request for each in ranks for request in each.asked}
    assert (found.is_last, found.is_best) == (is_last, is_best)
    assert agreed_boundary([ranks[0].numbers()]) == ranks[0]


def test_ranks_at_different_steps_are_refused_with_the_step_of_each():
    with pytest.raises(RanksDisagree, match=r"\[3, 4\], by rank"):
        agreed_boundary([Boundary(step).numbers() for step in (3, 4)])


@pytest.mark.parametrize("flag", ["is_last", "is_best"])
def test_a_flag_that_only_some_ranks_give_is_refused_with_these_ranks(flag):
    rows = [Boundary(3, **{flag: rank in (1, 3)}).numbers() for rank in range(4)]
    with pytest.raises(RanksDisagree, match=f"{flag}: expected the same on every rank, found True on rank 1, 3 of 4"):
        agreed_boundary(rows)


def test_before_there_is_a_cadence_the_clock_decides_and_nothing_else_of_the_triggers_changes():
    triggers = make_triggers(at_end=False)
    assert with_chosen_cadence(triggers, 7) == Triggers(every=7, at_end=False)
    assert with_chosen_cadence(triggers, None).at_end is False
    assert with_chosen_cadence(triggers, None).every is None


@given(back=st.integers(0, 20), saved=st.integers(0, 20), seen=st.integers(0, 20))
def test_a_step_that_is_trained_again_is_saved_again(back, saved, seen):
    """A loop that goes back in memory has not saved what it trains from there, whatever the directory is called."""
    last = last_saved_at(back, seen=seen, last_saved=saved)
    if back < seen and back <= saved:
        assert decide(back, triggers=Triggers(), last_saved=last, secs_since_save=0.0, is_last=True).save
    else:
        assert last == saved
    assert last <= saved


@given(before=st.none() | st.integers(0, 9), failed=st.integers(0, 9), now=st.none() | st.integers(0, 9))
def test_a_save_that_failed_never_counts_as_saved(before, failed, now):
    found = last_saved_after_failure(now, before=before, failed=failed)
    assert found in (before, now)
    assert found is None or before is None or found <= before
