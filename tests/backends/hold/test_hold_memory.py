"""What a hold keeps and releases: memory for copies, across forks, on devices."""

import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from kit.backends.hold_cases import PIECE, W, bytes_of, name_of

from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.hold.hold import Hold
from trainfold.core.errors import SaveFailed


def watched_leaf():
    """A leaf, and a reference to the array that owns its memory: every alias of the leaf keeps the array alive."""
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from the threads of other tests, on Python 3.12
def test_a_forked_child_waits_for_nobody():
    """It waits neither for a writer, which runs in its parent, nor for a lock that the parent held at the fork."""
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
    """Extra memory is at most the state, or `max_extra_bytes`: a late writer prepares no memory for leaves already copied."""
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
        thread = threading.Thread(target=hold.protect)  # it waits for the leaves that have no room
        thread.start()
        reader_is_done.append(thread.join)
        while not hold.copied_bytes:
            time.sleep(0.001)

    monkeypatch.setattr("trainfold.backends.hold.copy_room.Arena", Counted)
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
    """Between saves there is no extra memory: after `clone` or `to`, malloc would keep tens of megabytes of copies."""
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
    """It is not contiguous, so the writer has a full copy while the update makes another."""
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
    monkeypatch.setattr("trainfold.backends.hold.copy_room.Arena", _no_memory)
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
        patched.setattr("trainfold.backends.hold.copy_room.Arena", _interrupt)
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
    """D02 on CUDA: events order reads before the update; unread leaves are cloned within the limit, or waited for."""
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
def test_rows_of_leaves_on_a_device_are_read_as_the_writer_of_a_shared_tensor_reads_them():
    """N05 on CUDA: the last rows alone; and the first rows, and then the others for the digest."""
    leaves = {name_of(i): torch.arange(10_000_000.0, device="cuda") + i for i in range(2)}
    first, second = leaves
    before = {name: bytes_of(leaf) for name, leaf in leaves.items()}
    hold = Hold(leaves)
    hold.read_in_order(leaves, parts={second: (20_000_000, 40_000_000)})
    held = hold.leaves_of(first[0])
    rows = b"".join(bytes(piece) for piece in held[first[1]].pieces(1 << 19, until=20_000_000))
    hold.protect()
    for leaf in leaves.values():
        leaf.fill_(-1.0)
    assert rows + b"".join(bytes(piece) for piece in held[first[1]].pieces(1 << 19)) == before[first]
    assert b"".join(map(bytes, held[second[1]].pieces(1 << 19))) == before[second][20_000_000:]
    assert hold.copied_bytes == 40_000_000


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
