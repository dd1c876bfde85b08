"""A hold: the leaves are saved as they were, whoever writes to them meanwhile, and no more bytes are copied than must be."""

import operator
import os
import signal
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.hold.hold import Hold
from trainfold.backends.hold.owner_thread import OwnerThread
from trainfold.core.digest import tensor_bytes
from trainfold.core.errors import SaveFailed

PIECE = 64
W = ("model", "w")


def name_of(number):
    return ("model", f"leaf-{number}")


def bytes_of(tensor):
    return bytes(tensor_bytes(tensor))


def shapes_of_leaves():
    """Flat ones and others: transposed, strided, conjugated, empty, without a dimension."""
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
    """Law: whatever was read when the update came, and whatever may be copied, the bytes are those of before (D01, D02)."""
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
    """P10: a torn leaf is never saved; the error says what to call."""
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
    """max_extra_bytes: the smallest are copied, as far as it goes; the call ends when the others are read, or the save has failed."""
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
        if len(copies) == at:  # in the middle of a piece: half of it is what somebody else writes to the freed memory
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
    """As fully sharded training frees and gathers parameters: what lies there is not what was saved; an update does not copy it."""
    leaf = torch.arange(1024.0)
    hold = Hold({W: leaf})
    keeper, storage = [], leaf.untyped_storage()
    storage.resize_(0)
    keeper.append(torch.empty(1024))  # takes the place that became free
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
    """Write as an in-place kernel does until it returns: the version counter stands."""
    leaf.numpy()[:] = value


def returns(leaf):
    """The kernel returns: only now does torch move the counter."""
    leaf.add_(0.0)


def read_across_a_kernel(hold, leaf):
    """Read a leaf while a kernel writes to it, and let that return when the last piece has been read."""
    pieces = hold.pieces(W, PIECE)
    found = bytes(next(pieces))
    kernel(leaf, 7.0)
    found += b"".join(bytes(piece) for piece in pieces)
    returns(leaf)
    return found


def test_a_write_that_ends_after_the_last_piece_was_read_is_found_in_the_end():
    """P10: what was read is torn, and nothing showed it while it was read."""
    leaf = torch.zeros(1024)
    hold = Hold({name_of(0): torch.zeros(4), W: leaf})
    assert len(set(read_across_a_kernel(hold, leaf))) > 1
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        hold.check_unchanged()
    assert hold.written() == {W}


def test_a_write_that_ends_after_the_last_piece_was_read_is_found_by_the_update_too():
    """After `protect` the counters say nothing any more, so it looks at them, whatever was read by then."""
    leaf, other = torch.zeros(1024), torch.zeros(4)
    hold = Hold({W: leaf, name_of(0): other})
    read_across_a_kernel(hold, leaf)
    hold.protect()
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        hold.check_unchanged()
    with pytest.raises(SaveFailed, match=r"w: .*wait_staging"):
        list(hold.pieces(name_of(0), PIECE))


def test_a_write_that_ends_while_the_update_waits_is_found():
    """Another thread's: the last look of `protect` comes when it has waited."""
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
    """P10: all is read and written while it is at work, and its counter stands."""
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
    """A loop that waits for the save cannot move, and one that sits in a call of its own must not put it off for ever."""
    may_end, found, (is_in_call, begin), (reader, writer) = threading.Event(), {}, os.pipe(), os.pipe()
    call = map(operator.call, [partial(os.write, begin, b"x"), partial(os.read, reader, 1)])

    def owns(name, wait):
        found[name] = OwnerThread()
        wait()

    waits = {"waits": may_end.wait, "reads": partial(list, call)}
    threads = [threading.Thread(target=owns, args=each) for each in waits.items()]
    for thread in threads:
        thread.start()
    os.read(is_in_call, 1)
    while "waits" not in found:
        time.sleep(0.001)
    assert found["waits"].wait_until_it_moves(longest_secs=60)
    assert not found["reads"].wait_until_it_moves(longest_secs=0.02)
    may_end.set()
    os.write(writer, b"x")
    for thread in threads:
        thread.join(10)
    assert found["reads"].wait_until_it_moves(longest_secs=60)
    for descriptor in (is_in_call, begin, reader, writer):
        os.close(descriptor)


@given(
    read=st.integers(0, 3), kinds=st.lists(st.sampled_from(["flat", "strided", "conjugated"]), min_size=3, max_size=3)
)
@settings(deadline=None, max_examples=30)
def test_writes_after_an_announcement_are_no_failure(read, kinds):
    """Law: however much has been read before it."""
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
    """Another rank writes them, and looks at its own."""
    leaf, other = torch.zeros(4), torch.zeros(4)
    hold = Hold({W: leaf, name_of(0): other})
    hold.read_in_order([W])
    other.add_(1.0)
    list(hold.pieces(W, PIECE))
    hold.check_unchanged()


def test_what_was_written_to_is_named_until_somebody_announces():
    """All of it, also what is written to when the save has failed already; but nothing of an update."""
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


def watched_leaf():
    """A leaf, and a reference to the array whose memory it has: every alias of the leaf keeps that."""
    memory = np.zeros(1024, dtype=np.float32)
    return torch.from_numpy(memory), weakref.ref(memory)


def test_a_failed_hold_lets_go_when_it_has_said_what_was_written_to():
    leaf, gone = watched_leaf()
    hold = Hold({W: leaf})
    leaf.add_(1.0)
    hold.release()
    assert hold.written() == {W}
    del leaf
    assert gone() is None
    assert hold.written() == {W}


@pytest.mark.parametrize("end", ["check_unchanged", "protect", "release"])
def test_a_leaf_that_was_read_is_let_go_when_it_needs_no_look_any_more(end):
    leaf, gone = watched_leaf()
    hold = Hold({W: leaf})
    list(hold.pieces(W, PIECE))
    del leaf
    assert gone() is not None
    getattr(hold, end)()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of other tests' threads, on Python 3.12
def test_a_forked_child_waits_for_nobody():
    """Neither for a writer, who is in its parent, nor for a lock that was taken there when it was forked."""
    hold = Hold({W: torch.zeros(1024)}, max_extra_bytes=0)
    with hold._mutex, hold._protecting:
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                hold.protect()
                os._exit(len(hold.written()))
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_memory_that_was_made_ready_is_used():
    leaf = torch.arange(4096.0)
    hold = Hold({W: leaf})
    hold.prepare(4096 * 4)
    hold.protect()
    leaf.zero_()
    assert b"".join(bytes(piece) for piece in hold.pieces(W, PIECE)) == bytes_of(torch.arange(4096.0))


@pytest.mark.parametrize("ready_bytes", [4096, 8192, 16384, 1 << 20])
@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
@pytest.mark.parametrize("room", [None, 8192])
def test_memory_for_copies_is_there_once_however_late_it_is_made_ready(monkeypatch, when, ready_bytes, room):
    """Extra memory is at most the state, or `max_extra_bytes`: a writer that comes late makes nothing ready for what was copied."""
    made, present = [], []
    leaf, reader_is_done = torch.arange(4096.0), []
    hold = Hold({W: leaf}, max_extra_bytes=room)

    class Counted(Arena):
        def __init__(self, size_bytes):
            super().__init__(size_bytes)
            made.append(size_bytes)

        def make_present(self, size_bytes):
            if when == "meanwhile":
                protect()
            present.append(min(size_bytes, self.size_bytes))
            super().make_present(size_bytes)

    def protect():
        thread = threading.Thread(target=hold.protect)  # it waits for what there is no room for
        thread.start()
        reader_is_done.append(thread.join)
        while not hold.copied_bytes:
            time.sleep(0.001)

    monkeypatch.setattr("trainfold.backends.hold.hold.Arena", Counted)
    if when == "after":
        protect()
    hold.prepare(ready_bytes)
    if when == "before":
        protect()
    assert b"".join(bytes(piece) for piece in hold.pieces(W, PIECE)) == bytes_of(torch.arange(4096.0))
    for join in reader_is_done:
        join(20)
    assert hold.copied_bytes == (room or 16384)
    assert len(made) == 1
    assert sum(present) <= min(ready_bytes, hold.copied_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("how", ["in the call", "by an update", "by the writer"])
@pytest.mark.parametrize(
    "look", [lambda t: t.t(), lambda t: t[::2], lambda t: t.view(2, 2, 1024, 512).permute(3, 0, 2, 1), lambda t: t]
)
def test_copies_lie_in_memory_that_goes_back_at_once_and_are_made_once(monkeypatch, dtype, how, look):
    """Extra memory is 0 at rest: malloc keeps what was copied by `clone` or `to`, by tens of megabytes."""
    taken, made = [], []
    take = Arena.take
    monkeypatch.setattr(Arena, "take", lambda self, size_bytes: (taken.append(size_bytes), take(self, size_bytes))[1])
    leaf = look(torch.randint(0, 2, (2048, 1024)).to(dtype))
    expected = bytes_of(leaf)
    hold = Hold({W: leaf}, unannounced=[W] if how == "in the call" else [])
    assert (taken == [leaf.nbytes]) == (how == "in the call")
    if how == "by an update":
        hold.protect()
        leaf.zero_()
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda self: made.append(self) if not self.is_contiguous() else contiguous(self)
    )
    assert b"".join(bytes(piece) for piece in hold.pieces(W, 1 << 20)) == expected
    assert taken == ([] if how == "by the writer" and leaf.is_contiguous() else [leaf.nbytes])
    assert hold.copied_bytes == (0 if how == "by the writer" else leaf.nbytes)
    assert not made


@pytest.mark.parametrize("begun", [True, False])
def test_a_leaf_that_is_copied_to_be_read_counts_among_the_extra_bytes(begun):
    """Its bytes do not lie in order; the writer has a copy of all of it while the update makes its own."""
    leaves = {W: torch.arange(4096.0).view(64, 64).t(), ("model", "flat"): torch.arange(16384.0)}
    expected = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    hold = Hold(leaves, max_extra_bytes=24 << 10)
    first = hold.pieces(W, PIECE)
    found = bytes(next(first)) if begun else b""
    thread = threading.Thread(target=hold.protect)
    thread.start()
    while not hold.copied_bytes:
        time.sleep(0.001)
    found += b"".join(bytes(piece) for piece in first)
    assert found == expected[W]
    assert b"".join(bytes(piece) for piece in hold.pieces(("model", "flat"), PIECE)) == expected["model", "flat"]
    thread.join(20)
    assert hold.copied_bytes == 8 << 10


def test_a_machine_without_memory_for_copies_waits(monkeypatch):
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf})
    monkeypatch.setattr("trainfold.backends.hold.hold.Arena", _no_memory)
    waiter = threading.Thread(target=hold.protect)
    waiter.start()
    assert sum(len(piece) for piece in hold.pieces(W, PIECE)) == 4096
    waiter.join(10)
    assert not waiter.is_alive()
    assert hold.copied_bytes == 0


def _no_memory(size_bytes):
    raise OSError(12, "Cannot allocate memory")


def test_an_interrupted_protect_can_be_called_again(monkeypatch):
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf})
    with monkeypatch.context() as patched:
        patched.setattr("trainfold.backends.hold.hold.Arena", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            hold.protect()
    hold.protect()
    leaf.fill_(1.0)
    assert b"".join(hold.pieces(W, PIECE)) == bytes(4096)


def _interrupt(size_bytes):
    raise KeyboardInterrupt


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("room", [None, 0, 100_000_000])
def test_leaves_on_a_device_are_read_beside_the_computation_and_before_later_writes(room):
    """D02 on CUDA: reads are ordered before the update by events; what is unread is cloned within the room, or waited for."""
    leaves = {name_of(i): torch.full((10_000_000,), float(i), device="cuda") for i in range(8)}
    leaves[name_of(8)] = torch.arange(12.0, device="cuda").view(3, 4).t()
    before = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    hold = Hold(leaves, max_extra_bytes=room)
    found = dict.fromkeys(leaves, b"")

    def read():
        for name in leaves:
            for piece in hold.pieces(name, 1 << 19):
                found[name] += bytes(piece)

    writer = threading.Thread(target=read)
    writer.start()
    hold.protect()
    for leaf in leaves.values():
        leaf.fill_(-1.0)
    writer.join(60)
    hold.release()
    assert not writer.is_alive()
    assert {name: len(data) for name, data in found.items()} == {name: len(data) for name, data in before.items()}
    assert found == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_write_that_nobody_announced_fails_the_save():
    leaf = torch.zeros(10_000_000, device="cuda")
    hold = Hold({W: leaf})
    pieces = hold.pieces(W, 1 << 19)
    next(pieces)
    leaf.add_(1.0)
    with pytest.raises(SaveFailed, match="wait_staging"):
        list(pieces)


def test_a_hold_reads_what_the_leaf_was_wherever_its_owner_leads_it_later():
    """D02: ``.data =`` and `set_` give a tensor other memory."""
    leaf = torch.zeros(1024)
    hold = Hold({W: leaf})
    leaf.data = torch.ones(1024)
    assert b"".join(bytes(piece) for piece in hold.pieces(W, PIECE)) == bytes(4096)


def test_a_preparation_that_gets_no_memory_fails_nothing(monkeypatch):
    """D05: on one rank of several, an error before the ranks meet would leave them out of step."""

    def full(self, size_bytes):
        raise MemoryError

    monkeypatch.setattr("trainfold.backends.hold.copy_arena.Arena.make_present", full)
    hold = Hold({W: torch.zeros(1024)})
    hold.prepare(4096)
    hold.protect()
    assert b"".join(bytes(piece) for piece in hold.pieces(W, PIECE)) == bytes(4096)
