"""A hold knows for how long it has kept the owner of its leaves waiting (R05). The clock is that of the test."""

import threading
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends.hold_cases import PIECE, W, bytes_of

from trainfold.backends.hold import hold as hold_module
from trainfold.backends.hold.hold import Hold
from trainfold.core.errors import SaveFailed


class Clock:
    """Seconds that pass on command; it rings when it is read."""

    def __init__(self):
        self.now = 1000.0
        self.is_read = threading.Event()

    def __call__(self):
        self.is_read.set()
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(hold_module, "time", types.SimpleNamespace(monotonic=made))
    return made


def waiting(hold, clock):
    """A thread whose update waits for the hold, as the clock knows."""
    clock.is_read.clear()
    thread = threading.Thread(target=hold.protect, daemon=True)
    thread.start()
    assert clock.is_read.wait(20)
    return thread


def test_an_update_that_waits_for_the_writer_is_stalled_until_it_has_read(clock):
    """R05: the writer stands still for a quarter and half a second, and the update with it; a second update waits for nothing."""
    weight = torch.ones(100)
    hold = Hold({W: weight}, max_extra_bytes=0)
    pieces = hold.pieces(W, PIECE)
    thread = waiting(hold, clock)
    clock.now += 0.25
    found = bytes(next(pieces))
    clock.now += 0.5
    found += b"".join(map(bytes, pieces))
    thread.join(20)
    assert not thread.is_alive()
    assert hold.stalled_secs == 0.75
    hold.protect()
    assert hold.stalled_secs == 0.75
    assert found == bytes_of(weight)


def test_an_update_that_copies_is_stalled_while_it_copies(clock, monkeypatch):
    """R05: on a machine whose copies take 0.5 s."""
    copy = Hold._copy

    def slow(hold, chosen):
        clock.now += 0.5
        copy(hold, chosen)

    monkeypatch.setattr(Hold, "_copy", slow)
    hold = Hold({W: torch.ones(100)})
    hold.protect()
    assert (hold.stalled_secs, hold.copied_bytes) == (0.5, 400)


def test_threads_that_wait_at_the_same_time_count_once_and_a_save_that_fails_counts_too(clock):
    """R05: what the hold counts is never more than the time that has passed."""
    hold = Hold({W: torch.ones(100)}, max_extra_bytes=0)
    threads = [waiting(hold, clock), threading.Thread(target=hold.protect, daemon=True)]
    threads[1].start()
    clock.now += 0.5
    hold.release()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert hold.stalled_secs == 0.5
    with pytest.raises(SaveFailed):
        next(hold.pieces(W, PIECE))


@settings(deadline=None)
@given(room=st.none() | st.integers(0, 2000), reads=st.booleans())
def test_a_hold_that_is_read_before_the_update_or_copies_at_once_takes_only_the_time_of_the_update(room, reads):
    """R05: each reading of the clock takes a second; two of them are the whole of an update, and reading adds nothing."""
    times = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hold_module, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
        hold = Hold({W: torch.ones(100)}, max_extra_bytes=room if reads else None)
        if reads:
            assert len(b"".join(map(bytes, hold.pieces(W, PIECE)))) == 400
        assert hold.stalled_secs == 0
        hold.protect()
        assert hold.stalled_secs == 1
        hold.release()
        hold.protect()
        assert hold.stalled_secs == 1, "nothing is timed once the save is over"
