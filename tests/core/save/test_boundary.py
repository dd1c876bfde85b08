"""What ranks agree on at a boundary, and which step counts as the last one saved: values, without a manager."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import RanksDisagree
from trainfold.core.save.triggers import (
    Boundary,
    Triggers,
    agreed_boundary,
    decide,
    last_saved_after_failure,
    last_saved_at,
    make_triggers,
    with_chosen_cadence,
)

facts = st.builds(
    Boundary, st.just(3), st.booleans(), st.booleans(), st.booleans(), st.floats(0, 9), st.none() | st.integers(1, 9)
)


@given(ranks=st.lists(facts, min_size=1, max_size=4))
def test_what_ranks_agree_on_depends_on_their_order_only_by_rank_0(ranks):
    """Rank 0 has the clock and the cadence; the rest is any and all."""
    found = agreed_boundary(ranks)
    assert (found.secs_since_save, found.every) == (ranks[0].secs_since_save, ranks[0].every)
    for order in itertools.permutations(ranks[1:]):
        assert agreed_boundary([ranks[0], *order]) == found
    assert agreed_boundary([found] * 3) == found
    assert found.has_ended is all(each.has_ended for each in ranks)
    assert (found.is_last, found.is_best) == (any(e.is_last for e in ranks), any(e.is_best for e in ranks))


def test_ranks_at_different_steps_are_refused_with_the_step_of_each():
    with pytest.raises(RanksDisagree, match=r"\[3, 4\], by rank"):
        agreed_boundary([Boundary(step, False, False, False) for step in (3, 4)])


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
