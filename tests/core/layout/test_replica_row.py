"""Rows of a check of replicas: they differ exactly where the digests of ranks differ that have one name, and the minority is who differs from most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.errors import RanksDisagree
from trainfold.core.layout.replica_row import ReplicaRow, agreed_rows, differing_leaves, drift_error, minority, numbered

DIGESTS = st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("vw"), st.sampled_from(["0", "1"])))


@given(ranks=st.lists(DIGESTS, min_size=1, max_size=4))
def test_rows_differ_exactly_where_ranks_have_one_name_with_other_digests(ranks):
    """R07: model: compare the mappings themselves."""
    wanted = {
        name
        for one in ranks
        for other in ranks
        for name in one.keys() & other.keys()
        if list(one[name].items()) != list(other[name].items())
    }
    rows = [ReplicaRow(7, each).numbers() for each in ranks]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 60, "what a gather of numbers takes"
    found = agreed_rows(rows)
    assert found.is_over
    assert not found.is_torn
    names = {number: each for mine in ranks for number, each in numbered(mine).items()}
    assert {name for number in found.doubtful for name in names[number]} == wanted


def test_more_names_than_a_row_has_places_for_share_the_last_one():
    """R07: a difference in any of them is still seen."""
    digests = {f"name-{index:02}": {"w": "0"} for index in range(40)}
    for odd in ("name-00", "name-39"):
        rows = [ReplicaRow(7, each).numbers() for each in (digests, {**digests, odd: {"w": "1"}})]
        (number,) = agreed_rows(rows).doubtful
        assert odd in numbered(digests)[number]
        assert len(rows[0]) <= 60


def test_a_row_without_digests_is_waited_for_and_torn_ones_end_the_check():
    done, pending, torn = ReplicaRow(7, {}), ReplicaRow(7), ReplicaRow(7, is_torn=True)
    assert not agreed_rows([done.numbers(), pending.numbers(), torn.numbers()]).is_over
    assert agreed_rows([done.numbers(), torn.numbers()]).is_torn
    with pytest.raises(RanksDisagree, match=r"\[7, 8\], by rank"):
        agreed_rows([done.numbers(), ReplicaRow(8).numbers()])


@given(held=st.dictionaries(st.integers(0, 7), st.sampled_from("abc"), min_size=2))
def test_the_minority_is_every_rank_outside_of_the_one_largest_group(held):
    """R07."""
    groups = sorted(([rank for rank in held if held[rank] == each] for each in set(held.values())), key=len)
    is_clear = len(groups) == 1 or len(groups[-1]) > len(groups[-2])
    assert sorted(minority(held)) == (sorted(set(held) - set(groups[-1])) if is_clear else [])


def test_an_error_names_the_leaf_the_ranks_and_what_to_resume_from():
    """R07: with two ranks there is no majority, and both are named."""
    ranks = [{"model": {"v": "0", "w": digest}} for digest in "0100"]
    text = str(drift_error(differing_leaves(ranks), step=200, equal_at=100))
    assert text.startswith(
        "w: expected the same bits at step 200 on ranks 0, 1, 2 and 3, found other bits on rank 1 than on ranks 0, 2 and 3;"
    )
    assert "of step 100 or before" in text
    text = str(drift_error(differing_leaves(ranks[:2]), step=200, equal_at=None))
    assert "found other bits on rank 0 than on rank 1, and no majority that says which are damaged;" in text
    assert "before this run began" in text
