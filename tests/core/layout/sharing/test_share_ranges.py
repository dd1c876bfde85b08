"""`share_ranges`: bytes that several ranks need are read by one of them, each rank gets exactly what it needs, and rounds are bounded."""

import itertools
from collections import Counter

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from trainfold.core.layout.sharing.hops import hops_of
from trainfold.core.layout.sharing.ranges import ByteSpan
from trainfold.core.layout.sharing.rank_grid import rank_grid
from trainfold.core.layout.sharing.share_ranges import share_ranges


@st.composite
def spans(draw):
    """Disjoint spans of a few files, in order; none touches the next."""
    found = []
    for file in range(2):
        ends = sorted(draw(st.lists(st.integers(0, 24), max_size=6, unique=True)))
        found += [ByteSpan(file, start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
    return found


@st.composite
def worlds(draw):
    """Distinct lists of spans, and which one each of some ranks needs; in a mesh of all, or in a grid."""
    wanted = draw(st.lists(spans(), min_size=1, max_size=4, unique_by=tuple))
    needs = draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=11))
    numbers = {each: number for number, each in enumerate(dict.fromkeys(needs))}
    wanted, needs = [wanted[each] for each in numbers], [numbers[each] for each in needs]
    return wanted, needs, rank_grid(len(needs), most_connected=draw(st.sampled_from([3, 11])))


@given(world=worlds(), unit=st.integers(1, 5), limit=st.integers(11, 16))
def test_each_needed_byte_is_read_once_by_a_rank_that_needs_it_and_comes_to_all_that_do(world, unit, limit):
    """X03, X13: no other byte is read; and where no two ranks need the same, none of them waits for another."""
    wanted, needs, grid = world
    rounds = list(share_ranges(wanted, needs=needs, grid=grid, unit_bytes=unit, round_bytes=limit))
    event(f"{min(len(rounds), 5)} rounds, {'a mesh' if grid.columns == 1 else 'a grid'}")
    bytes_of = [{(file, at) for file, start, stop in each for at in range(start, stop)} for each in wanted]
    takers = {}
    for one in itertools.chain(*rounds):
        assert one.reader in one.takers
        assert 0 < one.size_bytes <= unit
        for at in range(one.start, one.stop):
            assert (one.file, at) not in takers
            takers[one.file, at] = one.takers
    every = set().union(*(bytes_of[each] for each in needs))
    by_need = {at: {rank for rank, each in enumerate(needs) if at in bytes_of[each]} for at in every}
    assert takers == (by_need if any(len(ranks) > 1 for ranks in by_need.values()) else {})


ONE_READS_FOR_ITS_ROW = (  # ranks 1 and 2 have read much when the three of the first row need the same, so rank 0 reads it
    [
        [ByteSpan(1, 0, 12)],
        [ByteSpan(0, 0, 24), ByteSpan(1, 0, 12)],
        [ByteSpan(0, 30, 54), ByteSpan(1, 0, 12)],
        [ByteSpan(2, 0, 1)],
    ],
    [0, 1, 2, *[3] * 8],
    rank_grid(11, most_connected=3),
)


@example(world=ONE_READS_FOR_ITS_ROW, unit=12, limit=12)
@given(world=worlds(), unit=st.integers(1, 20), limit=st.integers(11, 16))
def test_each_rank_has_little_before_it_reads_it_and_takes_no_more_in_a_round_than_a_limit(world, unit, limit):
    """X13: in either hop no rank sends or receives more, what it only passes on included."""
    wanted, needs, grid = world
    rounds = list(share_ranges(wanted, needs=needs, grid=grid, unit_bytes=unit, round_bytes=limit))
    assert all(rounds)
    for rank in range(grid.size):
        mine = [[one for one in each if rank in one.takers] for each in rounds]
        missing = sorted((one.file, one.start) for each in mine for one in each)
        for number, each in enumerate(mine):
            assert sum(one.size_bytes for one in each) <= limit
            missing = [place for place in missing if place not in {(one.file, one.start) for one in each}]
            ahead = [one for some in mine[: number + 1] for one in some if [(one.file, one.start)] > missing[:1] > []]
            assert sum(one.size_bytes for one in ahead) <= limit
        for each in rounds:
            for hop in hops_of(each, grid, rank):
                for way in (hop.go, hop.come):
                    assert sum(one.size_bytes for some in way.values() for one in some) <= limit


@given(world=worlds(), unit=st.integers(1, 20), limit=st.integers(11, 16))
def test_hops_bring_each_range_to_its_takers_over_neighbours_and_to_each_rank_once(world, unit, limit):
    """X03: what one rank sends is what the other one expects, in the same order; a rank sends only what it has."""
    wanted, needs, grid = world
    for ranges in share_ranges(wanted, needs=needs, grid=grid, unit_bytes=unit, round_bytes=limit):
        has = {rank: [one for one in ranges if one.reader == rank] for rank in range(grid.size)}
        plans = [hops_of(ranges, grid, rank) for rank in range(grid.size)]
        for hops in zip(*plans, strict=True):
            before = {rank: set(each) for rank, each in has.items()}
            for rank, hop in enumerate(hops):
                assert rank in hop.ranks
                for other, some in hop.go.items():
                    assert other != rank
                    assert set(some) <= before[rank]
                    assert hops[other].ranks == hop.ranks
                    assert hops[other].come[rank] == some
                    has[other] += some
                assert {source for source, some in hop.come.items() if some} <= set(hop.ranks) - {rank}
            assert sum(map(len, [some for hop in hops for some in hop.go.values()])) == sum(
                map(len, [some for hop in hops for some in hop.come.values()])
            )
        for rank, got in has.items():
            assert max(Counter(got).values(), default=1) == 1
            assert {one for one in ranges if rank in one.takers} <= set(got)


@pytest.mark.parametrize("lists", [2, 4, 9])
def test_ranks_read_what_is_their_own_at_the_same_time_though_all_need_a_little_of_each_file(lists):
    """X13: as where parameters are cut and norms are not. One after the other took as many times longer as there were ranks."""
    wanted = [
        [ByteSpan(file, 0, 8) if file != own else ByteSpan(file, 0, 400) for file in range(lists)]
        for own in range(lists)
    ]
    grid = rank_grid(lists, most_connected=9)
    rounds = list(share_ranges(wanted, needs=range(lists), grid=grid, unit_bytes=4, round_bytes=100))
    assert len(rounds) <= (400 + 8 * lists) // 100 + 2


@given(world=worlds(), unit=st.integers(1, 5))
def test_ranks_with_the_same_needs_read_about_as_much_whatever_they_share_with_others(world, unit):
    """X03: where no round is full."""
    wanted, needs, grid = world
    read = [0] * grid.size
    for each in share_ranges(wanted, needs=needs, grid=grid, unit_bytes=unit, round_bytes=10**6):
        for one in each:
            read[one.reader] += one.size_bytes
    for number in range(len(wanted)):
        alike = [each for each, need in zip(read, needs, strict=True) if need == number]
        assert max(alike) - min(alike) <= unit


@given(spans=spans(), ranks=st.sampled_from([2, 3, 6, 61, 512]), unit=st.integers(1, 5), most=st.sampled_from([4, 512]))
def test_ranks_that_need_the_same_read_about_as_much_and_together_what_one_of_them_needs(spans, ranks, unit, most):
    """X03: at any number of replicas; and no rank receives anything that it does not need."""
    read, grid = [0] * ranks, rank_grid(ranks, most_connected=most)
    for each in share_ranges([spans], needs=[0] * ranks, grid=grid, unit_bytes=unit, round_bytes=512):
        for one in each:
            read[one.reader] += one.size_bytes
            assert len(one.takers) == ranks
    assert max(read) - min(read) <= unit
    assert sum(read) == sum(stop - start for _, start, stop in spans)


@pytest.mark.parametrize(("ranks", "most"), [(36, 4), (36, 36), (37, 4)])
def test_replicas_read_about_as_much_and_rounds_are_full_over_many_rounds(ranks, most):
    """X13: in a mesh and in a grid. Ranks of a longer row read less, since all ranks of it pass on what one reads."""
    read, grid, size = [0] * ranks, rank_grid(ranks, most_connected=most), 20_000
    spans = [ByteSpan(0, 0, size)]
    rounds = list(share_ranges([spans], needs=[0] * ranks, grid=grid, unit_bytes=10, round_bytes=420))
    for one in itertools.chain(*rounds):
        read[one.reader] += one.size_bytes
    unit = max(one.size_bytes for each in rounds for one in each)
    assert max(read) <= size / ranks + 2 * unit
    assert max(read) - min(read) <= (unit if ranks == 36 else size / ranks / 2)
    assert len(rounds) <= 1.2 * size / 420


@pytest.mark.parametrize("size", [257, 311, 512, 2_048, 16_381, 16_384])
def test_a_rank_of_a_grid_has_about_two_roots_of_neighbours(size):
    """X03: also where the number of ranks is a prime. Rows are disjoint, so are columns, and both hold all ranks."""
    grid = rank_grid(size, most_connected=256)
    assert max(map(grid.neighbours, range(size))) <= 3 * size**0.5
    for groups in ({grid.row(rank) for rank in range(size)}, {grid.column(rank) for rank in range(size)}):
        assert sorted(itertools.chain(*groups)) == list(range(size))
        assert all(grid.relay(source, size - 1) in grid.column(size - 1) for source in range(0, size, 7))
