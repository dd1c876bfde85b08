"""`share_ranges`: bytes that several ranks need are read by one of them, each rank gets exactly what it needs, and rounds are bounded."""

import itertools

from hypothesis import event, given
from hypothesis import strategies as st

from trainfold.core.layout.shared_reads import ByteSpan, share_ranges


@st.composite
def spans(draw):
    """Disjoint spans of a few files, in order; none touches the next."""
    found = []
    for file in range(2):
        ends = sorted(draw(st.lists(st.integers(0, 24), max_size=6, unique=True)))
        found += [ByteSpan(file, start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
    return found


RANKS = st.lists(spans(), min_size=1, max_size=5)


@given(wanted=RANKS, unit=st.integers(1, 5), limit=st.integers(5, 12))
def test_each_needed_byte_is_read_once_by_a_rank_that_needs_it_and_comes_to_all_that_do(wanted, unit, limit):
    """X03, X13: no other byte is read; and where no two ranks need the same, none of them waits for another."""
    rounds = share_ranges(wanted, unit_bytes=unit, round_bytes=limit)
    event(f"{min(len(rounds), 5)} rounds")
    needs = [{(file, at) for file, start, stop in each for at in range(start, stop)} for each in wanted]
    takers = {}
    for one in itertools.chain(*rounds):
        assert one.reader in one.takers
        assert 0 < one.stop - one.start <= unit
        for at in range(one.start, one.stop):
            assert (one.file, at) not in takers
            takers[one.file, at] = one.takers
    by_need = {at: {rank for rank, each in enumerate(needs) if at in each} for at in set().union(*needs)}
    assert takers == (by_need if any(len(ranks) > 1 for ranks in by_need.values()) else {})


@given(wanted=RANKS, unit=st.integers(1, 20), limit=st.integers(5, 12))
def test_each_rank_takes_in_the_order_in_which_it_reads_and_no_more_in_a_round_than_a_limit(wanted, unit, limit):
    rounds = share_ranges(wanted, unit_bytes=unit, round_bytes=limit)
    assert all(rounds)
    for rank in range(len(wanted)):
        mine = [[one for one in each if rank in one.takers] for each in rounds]
        order = [(one.file, one.start) for each in mine for one in each]
        assert order == sorted(order)
        for each in mine:
            assert sum(one.stop - one.start for one in each) <= limit
            assert sum((one.stop - one.start) * (len(one.takers) - 1) for one in each if one.reader == rank) <= limit


@given(spans=spans(), ranks=st.sampled_from([2, 3, 6, 512]), unit=st.integers(1, 5))
def test_ranks_that_need_the_same_read_about_as_much_and_together_what_one_of_them_needs(spans, ranks, unit):
    """X03: at any number of replicas."""
    read = [0] * ranks
    for one in itertools.chain(*share_ranges([spans] * ranks, unit_bytes=unit, round_bytes=512)):
        read[one.reader] += one.stop - one.start
    assert max(read) - min(read) <= unit
    assert sum(read) == sum(stop - start for _, start, stop in spans)
