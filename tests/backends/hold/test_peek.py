"""A leaf that is looked at before it is written: its bytes are those of the call, whatever its owner does meanwhile, and they can be read again."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.hold.held_leaf import Move
from trainfold.backends.hold.hold import Hold
from trainfold.core.errors import SaveFailed
from trainfold.core.tensor_memory import tensor_bytes

NAME = ("model", "w")


def held(tensor, **options):
    hold = Hold({NAME: tensor}, **options)
    hold.read_in_order([NAME])
    return hold, hold.leaves_of("model")["w"]


def peeked(leaf, start, size):
    memory = bytearray(size)
    leaf.peek(start, memoryview(memory))
    return bytes(memory)


def rest(hold):
    return b"".join(bytes(piece) for piece in hold.pieces(NAME, 16))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    turned=st.booleans(),
    room=st.sampled_from([None, 8, 64]),
    reads=st.lists(st.tuples(st.integers(0, 160), st.integers(0, 60)), max_size=4),
    after=st.integers(0, 4),
)
def test_what_is_looked_at_is_what_was_held_and_is_written_afterwards(size, turned, room, reads, after):
    """The owner announces an update between two looks, with any room for copies: what has no room is waited for, as while it is written."""
    tensor = torch.arange(float(2 * size)).reshape(2, size)
    tensor = tensor.t() if turned else tensor
    before = bytes(tensor_bytes(tensor.clone()))
    hold, leaf = held(tensor, max_extra_bytes=room)
    owner = None

    def update():
        hold.protect()
        tensor.fill_(-1.0)

    for number, (at, count) in enumerate(reads):
        if number == after:
            owner = threading.Thread(target=update)
            owner.start()
        start = min(at, len(before))
        stop = min(start + count, len(before))
        assert peeked(leaf, start, stop - start) == before[start:stop]
    leaf.end_peek(is_read=False)
    assert rest(hold) == before
    if owner is not None:
        owner.join(10)
        assert not owner.is_alive()


def test_an_update_does_not_wait_for_the_end_of_a_look():
    """What is not read yet is copied: the owner goes on although the leaf is written much later."""
    tensor = torch.arange(1024.0)
    before = bytes(tensor_bytes(tensor.clone()))
    hold, leaf = held(tensor)
    assert peeked(leaf, 0, 64) == before[:64]
    hold.protect()  # in this thread: it would wait for ever
    tensor.zero_()
    assert hold.protected_bytes == len(before)
    assert peeked(leaf, 64, 64) == before[64:128]
    leaf.end_peek(is_read=False)
    assert rest(hold) == before


@pytest.mark.parametrize("turned", [False, True])
def test_a_write_that_was_not_announced_is_refused(turned):
    tensor = torch.arange(12.0).reshape(3, 4)
    tensor = tensor.t() if turned else tensor
    hold, leaf = held(tensor)
    peeked(leaf, 0, 8)
    tensor.add_(1)
    with pytest.raises(SaveFailed):
        peeked(leaf, 8, 8)
    hold.release()
    assert hold.written() == {NAME}


def test_a_write_after_the_look_has_ended_is_found_before_the_commit():
    """It is not known whether it came before the last byte was read: torch moves the counter when a kernel returns."""
    tensor = torch.arange(12.0)
    hold, leaf = held(tensor)
    peeked(leaf, 0, 48)
    leaf.end_peek(is_read=True)
    tensor.add_(1)
    with pytest.raises(SaveFailed):
        hold.check_unchanged()


def test_a_leaf_that_was_read_to_its_end_is_not_copied_for_an_update():
    tensor = torch.arange(12.0)
    hold, leaf = held(tensor)
    peeked(leaf, 0, 48)
    leaf.end_peek(is_read=True)
    hold.protect()
    assert hold.copied_bytes == 0


def test_memory_that_was_given_back_is_refused():
    tensor = torch.arange(12.0)
    hold, leaf = held(tensor)
    peeked(leaf, 0, 8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SaveFailed, match="given back"):
        peeked(leaf, 8, 8)
    hold.release()


def test_a_part_of_a_leaf_is_looked_at_and_written():
    """Other ranks write the rest of it."""
    tensor = torch.arange(12.0)
    before = bytes(tensor_bytes(tensor.clone()))
    hold = Hold({NAME: tensor})
    hold.read_in_order([NAME], parts={NAME: (8, 24)})
    leaf = hold.leaves_of("model")["w"]
    assert peeked(leaf, 8, 8) == before[8:16]
    hold.protect()
    tensor.zero_()
    assert peeked(leaf, 16, 8) == before[16:24]
    assert rest(hold) == before[8:24]


def test_an_update_cannot_begin_while_a_piece_is_copied(monkeypatch):
    """Or it would write to bytes that are being compared."""
    tensor = torch.arange(12.0)
    hold, leaf = held(tensor)
    look_at, free = leaf.handover.watch.look_at, []

    def looking(name):
        other = threading.Thread(target=lambda: free.append(leaf.handover.mutex.acquire(blocking=False)))
        other.start()
        other.join()
        look_at(name)

    monkeypatch.setattr(leaf.handover.watch, "look_at", looking)
    peeked(leaf, 0, 8)
    assert free == [False]
    hold.release()


def test_bytes_that_the_owner_is_copying_are_waited_for():
    tensor = torch.arange(12.0)
    before = bytes(tensor_bytes(tensor.clone()))
    hold, leaf = held(tensor)
    move, found = Move(), []
    leaf.move(move, 16)
    assert peeked(leaf, 0, 16) == before[:16]
    writer = threading.Thread(target=lambda: found.append(peeked(leaf, 8, 16)))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    move.is_over = True
    leaf.handover.writer.ring()
    writer.join(10)
    assert found == [before[8:24]]
    hold.release()
