"""Laws of exchanges in a tree, over threads: what ranks get, what it costs, and what happens if a rank ends at any message."""

import hashlib
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.backends.tree_of_threads import Dead, run_tree, total_of

from trainfold.backends.ranks.call import Call, Deadline
from trainfold.backends.ranks.processes.tree import HEAD, HEAD_BYTES, PIECE_BYTES, SIZE
from trainfold.backends.ranks.processes.waiting import look_secs
from trainfold.core.errors import RankFailed, RanksDisagree
from trainfold.core.layout.agreement.rank_tree import rank_tree

shapes = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
UNTIL = 30.0


def tree_of(shape):
    size, node_ranks, fan_out = shape
    return rank_tree(size, node_ranks=node_ranks, fan_out=fan_out)


def payload(rank, call, most):
    """Bytes of a rank in a call: none, few or many."""
    seed = hashlib.blake2b(f"{rank} {call}".encode(), digest_size=8).digest()
    return np.random.default_rng(list(seed)).bytes(int.from_bytes(seed[:4], "big") % (most + 1))


calls = st.lists(
    st.tuples(st.sampled_from(["meet", "give", "add", "start", "wait"]), st.integers(0, 9000)), min_size=1, max_size=8
)


@given(shape=shapes, schedule=calls)
@settings(max_examples=40, deadline=None)
def test_ranks_get_what_all_gave_in_rank_order_whatever_the_tree_and_the_schedule(shape, schedule):
    """Gathers, broadcasts and sums, with numbers that are started before them and waited for after them, or never."""
    tree = tree_of(shape)
    ranks = range(tree.size)

    def play(exchange, rank):
        found, pending = [], []
        for index, (kind, most) in enumerate(schedule):
            call, until = Call(kind, str(index)), Deadline(UNTIL)
            if kind == "meet":
                found.append(exchange.meet(call, payload(rank, index, most), until))
            elif kind == "give":
                found.append(exchange.give(call, payload(rank, index, most), most % tree.size, until))
            elif kind == "add":
                exchange.meet(call, b"", until)
                exchange.add(total := total_of([rank + most, -(2**62)]), call, until)
                found.append(total.tolist())
            elif kind == "start":
                pending.append(exchange.start(call, total_of([rank, index, most % 61]).numpy().tobytes(), UNTIL))
            elif pending:
                found.append(pending.pop(most % len(pending)).rows(until))
        return found

    def wanted():
        found, pending = [], []
        for index, (kind, most) in enumerate(schedule):
            if kind == "meet":
                found.append([payload(rank, index, most) for rank in ranks])
            elif kind == "give":
                found.append(payload(most % tree.size, index, most))
            elif kind == "add":
                found.append(sum((total_of([rank + most, -(2**62)]) for rank in ranks), total_of([0, 0])).tolist())
            elif kind == "start":
                pending.append([(rank, index, most % 61) for rank in ranks])
            elif pending:
                found.append(pending.pop(most % len(pending)))
        return found

    results, _, _ = run_tree(tree, play)
    assert results == [wanted()] * tree.size


@given(shape=shapes, victim=st.integers(0, 11), ends_at=st.integers(0, 30))
@example(shape=(3, 2, 1), victim=0, ends_at=22)  # in the thread that passes on numbers
@settings(max_examples=25, deadline=None)
def test_a_rank_that_ends_at_any_message_is_named_by_all_others_with_one_text(shape, victim, ends_at):
    """C07: root, leader or leaf, before or after any message of a schedule with every kind of call."""
    tree = tree_of(shape)
    victim %= tree.size

    def play(exchange, rank):
        pending = exchange.start(Call("start_gather"), total_of([rank]).numpy().tobytes(), UNTIL)
        exchange.meet(Call("gather", "", "write its files"), b"x" * 5000, Deadline(UNTIL))
        exchange.give(Call("broadcast"), b"y" * 6000, 0, Deadline(UNTIL))
        exchange.add(total_of([1, 2]), Call("all_sum"), Deadline(UNTIL))
        again = exchange.start(Call("start_gather"), total_of([rank]).numpy().tobytes(), UNTIL)
        return pending.rows(Deadline(UNTIL)), again.rows(Deadline(UNTIL))

    results, _, _ = run_tree(tree, play, grace_secs=0.3, ends={victim: ends_at})
    if not isinstance(results[victim], Dead):
        assert all(isinstance(each, tuple) for each in results)
        return
    others = [each for rank, each in enumerate(results) if rank != victim]
    failed = [each for each in others if isinstance(each, RankFailed)]
    assert all(isinstance(each, tuple | RankFailed) for each in others), others
    assert len({str(each) for each in failed}) <= 1
    for each in failed:
        missing = str(each).partition(":")[0].removeprefix("ranks ").removeprefix("rank ").split(", ")
        done = [str(rank) for rank, result in enumerate(results) if isinstance(result, tuple)]
        assert str(victim) in missing
        assert set(missing) <= {str(victim), *done}, "who has all that it needs may have ended; no other rank is named"


@given(shape=shapes, odd=st.integers(0, 11), is_started=st.booleans())
@settings(max_examples=20, deadline=None)
def test_calls_that_differ_are_refused_on_every_rank_with_the_ranks_that_made_them(shape, odd, is_started):
    """V05: a rank that makes another call, or starts numbers where others gather, gets a result no more than the others do."""
    tree = tree_of(shape)
    odd %= tree.size

    def play(exchange, rank):
        if is_started and rank == odd:
            return exchange.start(Call("start_gather"), bytes(8), UNTIL).rows(Deadline(UNTIL))
        return exchange.meet(Call("gather" if rank != odd else "barrier"), b"x" * 2000 * rank, Deadline(UNTIL))

    results, _, _ = run_tree(tree, play)
    if tree.size == 1:
        return
    assert all(isinstance(each, RanksDisagree) for each in results), results
    assert len({str(each) for each in results}) == 1
    assert f"rank {odd} calls {'start_gather' if is_started else 'barrier'}()" in str(results[0])


@pytest.mark.parametrize("shape", [(8, 8, 8), (8, 2, 2), (64, 8, 2), (150, 8, 4)])
@pytest.mark.parametrize("size_bytes", [10, 1_000, 20_000])
def test_a_gather_is_a_message_or_two_up_and_one_and_the_pieces_down_and_its_bytes_are_those_of_the_ranks(
    shape, size_bytes
):
    """C06: counted. What a rank sends and receives follows from its place, and from the number of ranks only by what all gave."""
    tree = tree_of(shape)

    def play(exchange, rank):
        return exchange.meet(Call("gather"), bytes([rank % 256]) * size_bytes, Deadline(UNTIL))

    began = time.monotonic()
    results, counts, values = run_tree(tree, play)
    looks = 5 + (time.monotonic() - began) / look_secs(tree.size)
    assert results == [[bytes([rank % 256]) * size_bytes for rank in range(tree.size)]] * tree.size
    each, inline = size_bytes + SIZE.size, HEAD_BYTES - HEAD.size

    def message(ranks, piece=2**60):
        rest = max(ranks * each - inline, 0)
        return 1 + -(-rest // piece), HEAD_BYTES + rest

    for place, count in zip(tree.places(), counts, strict=True):
        below, down = [message(child.size) for child in place.children], message(tree.size, PIECE_BYTES)
        above = [] if place.parent is None else [message(place.branch.size)]
        assert (count.received, count.bytes_received) == tuple(
            map(sum, zip((0, 0), *below, *([down] if above else []), strict=True))
        )
        assert (count.sent, count.bytes_sent) == tuple(
            map(sum, zip((0, 0), *above, *[down for _ in below], strict=True))
        )
    assert values.requests <= tree.size * looks, "the notice board is looked at now and then, and not for each message"
