"""A hold saves leaves as they were, whatever writes to them meanwhile, and copies no more bytes than necessary."""

import operator
import os
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends.hold_cases import PIECE, W, bytes_of, name_of

from trainfold.backends.hold.hold import Hold
from trainfold.backends.hold.write_watch import wait_until_it_moves
from trainfold.core.errors import SaveFailed


def shapes_of_leaves():
    """Flat shapes and others: transposed, strided, conjugated, empty, 0-d."""
    return st.lists(
        st.sampled_from(["flat", "transposed", "strided", "conjugated", "empty", "scalar", "large"]),
        min_size=1,
        max_size=6,
    )


def make_leaf(kind, number):
    base = torch.arange(number, number + 48, dtype=torch.float32)
    return {
        "flat": base.clone,
        "transposed": lambda: base.view(6, 8).t(),
        "strided": lambda: base[::3],
        "conjugated": lambda: torch.complex(base, base).conj(),
        "empty": base[:0].clone,
        "scalar": lambda: torch.tensor(float(number)),
        "large": lambda: torch.arange(number, number + 400, dtype=torch.float64),
    }[kind]()


def exposed_bytes(leaves):
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@settings(deadline=None, max_examples=150)
@given(
    kinds=shapes_of_leaves(), pieces_before=st.integers(0, 20), room=st.none() | st.integers(0, 4000), data=st.data()
)
def test_what_is_read_is_what_was_there_and_the_copies_fit(kinds, pieces_before, room, data):
    """Law: whatever was read before the update, and whatever may be copied, the saved bytes are those from before it (D01, D02)."""
    leaves = {name_of(i): make_leaf(kind, i) for i, kind in enumerate(kinds)}
    before = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    order = data.draw(st.permutations(list(leaves)))
    hold = Hold(leaves, max_extra_bytes=room)
    hold.read_in_order(order)
    found = dict.fromkeys(order, b"")
    may_go_on, has_paused = threading.Event(), threading.Event()

    def read():
        count = 0
        for name in order:
            for piece in hold.pieces(name, PIECE):
                if count == pieces_before:
                    has_paused.set()
                    may_go_on.wait(10)
                found[name] += bytes(piece)
                count += 1
        has_paused.set()

    writer = threading.Thread(target=read)
    writer.start()
    has_paused.wait(10)
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    may_go_on.set()
    waiter.join(10)
    assert not waiter.is_alive()
    for leaf in leaves.values():
        torch.view_as_real(leaf.conj()).fill_(-7.0) if leaf.is_conj() else leaf.fill_(-7.0)
    writer.join(10)
    assert found == before
    copied_at_once = 0
    assert hold.copied_bytes <= (exposed_bytes(leaves.values()) if room is None else room) + copied_at_once


@settings(deadline=None, max_examples=100)
@given(
    kinds=shapes_of_leaves(),
    pieces_before=st.integers(0, 12),
    room=st.none() | st.integers(0, 4000),
    is_first=st.booleans(),
    data=st.data(),
)
def test_of_leaves_that_ranks_share_only_the_bytes_that_this_rank_writes_are_held(
    kinds, pieces_before, room, is_first, data
):
    """Law: the bytes of a part are those from before the update, and no byte outside of it is waited for or copied (D01, D02)."""
    leaves = {name_of(i): make_leaf(kind, i) for i, kind in enumerate(kinds)}
    before = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    parts = {
        name: tuple(sorted(data.draw(st.lists(st.integers(0, len(before[name])), min_size=2, max_size=2))))
        for name in data.draw(st.sets(st.sampled_from(sorted(leaves))))
    }
    hold = Hold(leaves, max_extra_bytes=room)
    if is_first:  # the update comes before the plan is made
        threading.Thread(target=hold.protect, daemon=True).start()
    hold.read_in_order(list(leaves), parts=parts)
    needed = sum(parts[name][1] - parts[name][0] if name in parts else len(before[name]) for name in leaves)
    found = dict.fromkeys(leaves, b"")
    waiter = threading.Thread(target=hold.protect, daemon=True)
    count = 0
    for name in leaves:
        first, end = parts.get(name, (0, len(before[name])))
        held = hold.leaves_of(name[0])[name[1]]
        for until in (data.draw(st.integers(first, end)), None):  # as the writer of the first rows of a tensor reads it
            for piece in held.pieces(PIECE, until=until):
                if count == pieces_before:
                    waiter.start()
                found[name] += bytes(piece)
                count += 1
    if count <= pieces_before:
        waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    assert found == {name: each[slice(*parts[name])] if name in parts else each for name, each in before.items()}
    if not is_first and all(leaf.is_contiguous() and not leaf.is_conj() for leaf in leaves.values()):
        assert hold.copied_bytes <= needed


def test_nothing_is_copied_of_what_has_been_read():
    leaves = {name_of(i): torch.full((256,), float(i)) for i in range(4)}
    hold = Hold(leaves)
    for name in list(leaves)[:3]:
        list(hold.pieces(name, PIECE))
    hold.protect()
    assert hold.copied_bytes == 256 * 4
    hold.protect()
    assert hold.copied_bytes == 256 * 4


def test_without_room_an_update_waits_for_the_last_byte():
    """max_extra_bytes=0: wait, never copy."""
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf}, max_extra_bytes=0)
    pieces = hold.pieces(W, PIECE)
    next(pieces)
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert sum(len(piece) for piece in pieces) == 4096 - PIECE
    waiter.join(10)
    assert not waiter.is_alive()
    assert hold.copied_bytes == 0


def test_with_some_room_the_last_bytes_are_copied_and_the_first_are_waited_for():
    leaves = {name_of(0): torch.zeros(1024), name_of(1): torch.ones(1024)}
    hold = Hold(leaves, max_extra_bytes=5000)
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    first = b"".join(bytes(piece) for piece in hold.pieces(name_of(0), PIECE))
    waiter.join(10)
    assert not waiter.is_alive()
    assert hold.copied_bytes == 5000
    for leaf in leaves.values():
        leaf.fill_(9.0)
    assert first == bytes(4096)
    assert b"".join(bytes(piece) for piece in hold.pieces(name_of(1), PIECE)) == bytes_of(torch.ones(1024))


def test_a_write_that_nobody_announced_fails_the_save_and_names_the_leaf():
    """P10: a torn leaf is never saved; the error names the function to call."""
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf})
    pieces = hold.pieces(W, PIECE)
    next(pieces)
    leaf.add_(1.0)
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        list(pieces)


def test_a_write_before_an_announced_one_is_noticed_too():
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf})
    leaf.add_(1.0)
    hold.protect()
    with pytest.raises(SaveFailed, match="wait_staging"):
        list(hold.pieces(W, PIECE))


@pytest.mark.parametrize("room", [None, 0, 100])
def test_small_leaves_that_nobody_answers_for_are_copied_at_once(room):
    leaf = torch.zeros(4)
    hold = Hold({W: leaf}, unannounced=[W], max_extra_bytes=room)
    hold.settle()
    leaf.add_(1.0)
    assert b"".join(hold.pieces(W, PIECE)) == bytes(16)


@pytest.mark.parametrize("end", [lambda hold, name: list(hold.pieces(name, 1 << 20)), lambda hold, _: hold.release()])
def test_leaves_that_nobody_answers_for_and_that_there_is_no_room_for_are_waited_for(end):
    """max_extra_bytes: the smallest are copied within the limit; the call returns once the others are read or the save fails."""
    leaves = {name_of(size): torch.zeros(size << 20, dtype=torch.uint8) for size in (3, 1, 2)}
    hold = Hold(leaves, unannounced=leaves.keys(), max_extra_bytes=4 << 20)
    assert hold.copied_bytes == 3 << 20
    caller = threading.Thread(target=hold.settle)
    caller.start()
    caller.join(0.05)
    assert caller.is_alive()
    end(hold, name_of(3))
    caller.join(10)
    assert not caller.is_alive()
    hold.protect()
    assert hold.copied_bytes == 3 << 20


@pytest.mark.parametrize("place", [None, lambda size: memoryview(bytearray(size))])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_leaf_whose_memory_goes_elsewhere_is_read_from_there(monkeypatch, at, place):
    """``share_memory_()``, or a queue to another process, moves it and frees the old one; no version counter moves."""
    leaf = torch.arange(1024.0)
    wanted, copies, real = bytes_of(leaf), [], np.copyto
    hold = Hold({W: leaf})

    def copy(to, part):
        if len(copies) == at:  # in the middle of a piece: half of it is foreign data from the freed memory
            real(to, part)
            to[: len(to) // 2] = 255
            leaf.share_memory_()
        else:
            real(to, part)
        copies.append(len(part))

    monkeypatch.setattr(np, "copyto", copy)
    assert b"".join(bytes(piece) for piece in hold.pieces(W, 1024, place)) == wanted
    assert sum(copies) == 4096 + 1024
    hold.check_unchanged()


def test_a_leaf_whose_memory_is_freed_and_made_again_fails_the_save():
    """As when fully sharded training frees and gathers parameters: the memory has other content, and an update does not copy it."""
    leaf = torch.arange(1024.0)
    hold = Hold({W: leaf})
    keeper, storage = [], leaf.untyped_storage()
    before = storage.data_ptr()
    while storage.data_ptr() in (0, before):  # new memory at the same address would look as if nothing was freed
        storage.resize_(0)
        keeper.append(torch.empty(1024))  # takes the freed memory
        storage.resize_(4096)
    updating = threading.Thread(target=hold.protect)
    updating.start()
    with pytest.raises(SaveFailed, match=r"replaced meanwhile.*wait_staging"):
        b"".join(bytes(piece) for piece in hold.pieces(W, PIECE))
    assert hold.copied_bytes == 0
    hold.release()
    updating.join(60)
    assert not updating.is_alive()


def test_an_update_that_copies_a_leaf_whose_memory_goes_elsewhere_copies_it_again(monkeypatch):
    leaf, real, moved = torch.arange(1024.0), torch.Tensor.copy_, []
    wanted, hold = bytes_of(leaf), Hold({W: leaf})

    def copy(to, part):
        real(to, part)
        if not moved:
            to[:512] = 255
            moved.append(leaf.share_memory_())
        return to

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    hold.protect()
    monkeypatch.undo()
    leaf.zero_()
    assert moved
    assert b"".join(bytes(piece) for piece in hold.pieces(W, PIECE)) == wanted


def test_inference_tensors_have_no_versions_and_are_copied():
    with torch.inference_mode():
        leaf = torch.zeros(4)
    assert Hold({W: leaf}).copied_bytes == 16


def test_a_hold_that_is_over_makes_nobody_wait_and_keeps_nothing():
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf}, max_extra_bytes=0)
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    hold.release()
    waiter.join(10)
    assert not waiter.is_alive()
    gone = weakref.ref(leaf)
    del leaf
    assert gone() is None
    with pytest.raises(SaveFailed, match="released"):
        list(hold.pieces(W, PIECE))


def kernel(leaf, value):
    """Write like an in-place kernel that has not returned yet: the version counter does not change."""
    leaf.numpy()[:] = value


def returns(leaf):
    """The kernel returns: only now does torch bump the counter."""
    leaf.add_(0.0)


def read_across_a_kernel(hold, leaf):
    """Read a leaf while a kernel writes to it, and let the kernel return when the last piece has been read."""
    pieces = hold.pieces(W, PIECE)
    found = bytes(next(pieces))
    kernel(leaf, 7.0)
    found += b"".join(bytes(piece) for piece in pieces)
    returns(leaf)
    return found


def test_a_write_that_ends_after_the_last_piece_was_read_is_found_in_the_end():
    """P10: the bytes are torn, and nothing shows it during the read."""
    leaf = torch.zeros(1024)
    hold = Hold({name_of(0): torch.zeros(4), W: leaf})
    assert len(set(read_across_a_kernel(hold, leaf))) > 1
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        hold.check_unchanged()
    assert hold.written() == {W}


def test_a_write_that_ends_after_the_last_piece_was_read_is_found_by_the_update_too():
    """After `protect` the counters prove nothing, so `protect` checks them itself, however much was read by then."""
    leaf, other = torch.zeros(1024), torch.zeros(4)
    hold = Hold({W: leaf, name_of(0): other})
    read_across_a_kernel(hold, leaf)
    hold.protect()
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        hold.check_unchanged()
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        list(hold.pieces(name_of(0), PIECE))


def test_a_write_that_ends_while_the_update_waits_is_found():
    """A write of another thread: `protect` checks the counters last, after it has waited."""
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf, name_of(0): torch.zeros(1024)}, max_extra_bytes=0)
    kernel(leaf, 7.0)
    list(hold.pieces(W, PIECE))
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    returns(leaf)
    list(hold.pieces(name_of(0), PIECE))
    waiter.join(10)
    assert not waiter.is_alive()
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        hold.check_unchanged()


def test_a_kernel_that_outlasts_the_writing_is_waited_for():
    """P10: everything is read and written while the kernel runs, and its counter does not change."""
    leaf, made, told = torch.zeros(1024), [], []
    (is_in_kernel, begin), (may_end, end) = os.pipe(), os.pipe()
    steps = [partial(os.write, begin, b"x"), partial(os.read, may_end, 1), partial(leaf.add_, 1.0)]

    def own():
        made.append(Hold({W: leaf}))
        list(map(operator.call, steps))  # one call, as a kernel is

    def look():
        try:
            made[0].check_unchanged()
        except SaveFailed as error:
            told.append(error)

    owner, looker = threading.Thread(target=own), threading.Thread(target=look)
    owner.start()
    os.read(is_in_kernel, 1)
    list(made[0].pieces(W, PIECE))
    looker.start()
    looker.join(0.1)
    is_waiting = looker.is_alive()
    os.write(end, b"x")
    looker.join(10)
    owner.join(10)
    for descriptor in (is_in_kernel, begin, may_end, end):
        os.close(descriptor)
    assert is_waiting
    assert len(told) == 1


def test_an_owner_that_waits_or_has_ended_or_never_moves_holds_no_save_up():
    """A loop that waits for the save cannot continue, and a loop inside a long call must not delay the save for ever."""
    may_end, found, (is_in_call, begin), (reader, writer) = threading.Event(), {}, os.pipe(), os.pipe()
    call = map(operator.call, [partial(os.write, begin, b"x"), partial(os.read, reader, 1)])

    def owns(name, wait):
        found[name] = threading.get_ident()
        wait()

    waits = {"waits": may_end.wait, "reads": partial(list, call)}
    threads = [threading.Thread(target=owns, args=each) for each in waits.items()]
    for thread in threads:
        thread.start()
    os.read(is_in_call, 1)
    while "waits" not in found:
        time.sleep(0.001)
    assert wait_until_it_moves(found["waits"], longest_secs=60)
    assert not wait_until_it_moves(found["reads"], longest_secs=0.02)
    may_end.set()
    os.write(writer, b"x")
    for thread in threads:
        thread.join(10)
    assert wait_until_it_moves(found["reads"], longest_secs=60)
    for descriptor in (is_in_call, begin, reader, writer):
        os.close(descriptor)


@given(
    read=st.integers(0, 3), kinds=st.lists(st.sampled_from(["flat", "strided", "conjugated"]), min_size=3, max_size=3)
)
@settings(deadline=None, max_examples=30)
def test_writes_after_an_announcement_are_no_failure(read, kinds):
    """Law: this holds however much was read before the announcement."""
    leaves = {name_of(i): make_leaf(kind, i) for i, kind in enumerate(kinds)}
    before = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    hold = Hold(leaves)
    names = list(leaves)
    found = {name: b"".join(map(bytes, hold.pieces(name, PIECE))) for name in names[:read]}
    hold.protect()
    for leaf in leaves.values():
        leaf.mul_(2)
    hold.protect()
    found |= {name: b"".join(map(bytes, hold.pieces(name, PIECE))) for name in names[read:]}
    hold.check_unchanged()
    hold.release()
    assert found == before
    assert hold.written() == frozenset()


def test_leaves_that_are_not_written_here_may_change():
    """Another rank writes these leaves to the checkpoint, and checks them."""
    leaf, other = torch.zeros(4), torch.zeros(4)
    hold = Hold({W: leaf, name_of(0): other})
    hold.read_in_order([W])
    other.add_(1.0)
    list(hold.pieces(W, PIECE))
    hold.check_unchanged()


def test_what_was_written_to_is_named_until_somebody_announces():
    """All such leaves, also those written after the save has failed, but no leaf that an update writes."""
    leaves = {name_of(i): torch.zeros(4) for i in range(4)}
    hold = Hold(leaves)
    leaves[name_of(2)].add_(1.0)
    with pytest.raises(SaveFailed):
        list(hold.pieces(name_of(2), PIECE))
    hold.release()
    assert not hold.is_over
    leaves[name_of(1)].add_(1.0)
    hold.protect()
    leaves[name_of(0)].add_(1.0)
    assert hold.written() == {name_of(1), name_of(2)}
    assert hold.is_over
