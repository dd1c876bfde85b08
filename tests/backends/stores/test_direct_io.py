"""Streams of bytes: the file's content is right whatever the threads do, and a save outlives the program that started it."""

import os
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.hold.copy_arena import Arena
from trainfold.backends.runs.api import load
from trainfold.backends.stores import direct_io
from trainfold.backends.wakeup import Wakeup
from trainfold.core.state.state import Progress, TrainState

PAGE = direct_io.ALIGNMENT_BYTES


@pytest.fixture(autouse=True)
def small_buffers():
    pool = type(direct_io._POOL)()
    with mock.patch.multiple(direct_io, DIRECT_FROM_BYTES=1, BUFFER_BYTES=2 * PAGE, _POOL=pool):
        yield pool


def written(folder, parts, *, size_bytes=None):
    """What `write_stream` made of the parts; also checks that it left no thread behind."""
    name = Path(folder) / "file"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    before = set(threading.enumerate())
    try:
        direct_io.write_stream(fd, parts, size_bytes=sum(map(len, parts)) if size_bytes is None else size_bytes)
        return name.read_bytes()
    finally:
        deadline = time.monotonic() + 20
        while not set(threading.enumerate()) <= before:  # they have signalled their end, and exit in a moment
            assert time.monotonic() < deadline
        os.close(fd)


def test_a_file_has_no_padding_where_the_filesystem_has_no_direct_writes(tmp_path):
    """W18: every save of a file above 1 MiB failed there: the last write was padded, and only direct mode cut the padding off."""
    with mock.patch.object(direct_io, "try_direct", return_value=False):
        assert written(tmp_path, [b"x" * (PAGE + 7), b"y"]) == b"x" * (PAGE + 7) + b"y"


def refusing(started):
    """Let only this many threads start, as when Python shuts down (from 3.12 on) or at a limit of the system."""
    real, left = threading.Thread.start, [None] * started

    def start(thread):
        if not left:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        left.pop()
        real(thread)

    return mock.patch.object(threading.Thread, "start", start)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=8), started=st.integers(0, 2), slow=st.booleans())
def test_a_file_has_the_bytes_of_its_parts_in_order_however_many_threads_write_them(
    tmp_path_factory, sizes, started, slow
):
    """D01, P11: each byte is written once, from a buffer that is refilled only afterwards; with 2 threads, 1 or none."""
    data = np.random.default_rng(len(sizes)).integers(0, 255, sum(sizes), dtype=np.uint8).tobytes()
    ends = np.cumsum(sizes)
    parts = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    real, offsets = os.pwrite, []

    def pwrite(fd, piece, offset):
        offsets.append(offset)
        if slow and offset % (4 * PAGE) == 0:
            time.sleep(0.001)
        return real(fd, piece, offset)

    with refusing(started), mock.patch.object(os, "pwrite", pwrite):
        assert written(tmp_path_factory.mktemp("stream"), parts, size_bytes=max(1, len(data))) == data
    assert sorted(offsets) == list(range(0, len(data), 2 * PAGE))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=4))
def test_a_file_that_is_written_stream_after_stream_is_the_same_as_by_one(tmp_path_factory, sizes):
    """Also where a stream begins in the middle of a page, which direct writes cannot."""
    data = np.random.default_rng(len(sizes)).integers(0, 255, sum(sizes), dtype=np.uint8).tobytes()
    name, start = tmp_path_factory.mktemp("stream") / "file", 0
    with name.open("wb+") as file:
        for size in sizes:
            part = data[start : start + size]
            assert direct_io.write_stream(file.fileno(), [part], size_bytes=size, start=start) == size
            start += size
            assert os.fstat(file.fileno()).st_size == start
    assert name.read_bytes() == data


@pytest.mark.parametrize("started", [0, 1, 2])
@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_of_any_write_reaches_the_caller_and_the_first_one_wins(tmp_path, started, failing, small_buffers):
    """C15: also that of the last write, and of a write by the thread that fills."""
    real = os.pwrite

    def pwrite(fd, piece, offset):
        if offset >= failing * 2 * PAGE:
            raise OSError(28, f"No space left at {offset}")
        return real(fd, piece, offset)

    parts = [bytes(PAGE)] * 12
    told = pytest.raises(OSError, match=f"No space left at {failing * 2 * PAGE}$")
    with refusing(started), mock.patch.object(os, "pwrite", pwrite), told as caught:
        written(tmp_path, parts)
    assert caught.value.errno == 28
    assert written(tmp_path, parts) == bytes(12 * PAGE), "and its buffers are good for the next file"
    assert len(small_buffers._free) == direct_io.BUFFERS


@pytest.mark.parametrize("after", [0, 1, 3, 30])
def test_parts_that_raise_end_the_stream_and_no_thread_stays(tmp_path, after):
    def parts():
        yield from [bytes(PAGE)] * after
        raise KeyError("a leaf has gone")

    with pytest.raises(KeyError, match="a leaf has gone"):
        written(tmp_path, parts(), size_bytes=64 * PAGE)


# --- the end of the program ------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, sys, torch, trainfold
from trainfold.core.state.state import Progress, TrainState

state = TrainState(trainer=Progress(step=1), extra={"w": torch.arange(10 << 20, dtype=torch.float32)})
if sys.argv[2] == "atexit":
    atexit.register(lambda: trainfold.save(state, sys.argv[1]))
    sys.exit(0)
manager = trainfold.CheckpointManager(sys.argv[1], mode="async")
if sys.argv[3] == "second":
    manager.save(TrainState(trainer=Progress(step=0), extra={"w": torch.zeros(10 << 20)}))
    manager.drain()
manager.save(state)
if sys.argv[2] == "exit":
    sys.exit(3)
if sys.argv[2] == "raise":
    raise KeyError("a bug of the loop")
"""


@pytest.mark.parametrize(
    ("end", "code", "which"),
    [
        ("normal", 0, "first"),
        ("exit", 3, "first"),
        ("raise", 1, "first"),
        ("normal", 0, "second"),
        ("atexit", 0, "first"),
    ],
)
def test_a_program_that_ends_without_close_leaves_the_save_under_way_whole(warm_python, tmp_path, end, code, which):
    """P11: 40 MB are more than the buffers hold, so Python shuts down while they are written."""
    command = warm_python.command("-c", PROGRAM, tmp_path / "run", end, which, is_tidy=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "save" not in done.stderr
    wanted = torch.arange(10 << 20, dtype=torch.float32)
    found = load(tmp_path / "run", like=TrainState(trainer=Progress(), extra={"w": torch.zeros(10 << 20)}))
    assert found.trainer.step == 1
    assert torch.equal(found.extra["w"], wanted)


class Made:
    """Parts that are made in the writer's buffers, some shorter than the room there; parts with odd numbers are made elsewhere."""

    def __init__(self, sizes):
        self.sizes, self.elsewhere = sizes, 0

    def __iter__(self):
        return self.placed(lambda size: memoryview(bytearray(size)))

    def __len__(self):
        return sum(self.sizes)

    def content(self):
        return b"".join(bytes([number + 1]) * size for number, size in enumerate(self.sizes))

    def placed(self, place):
        for number, size in enumerate(self.sizes):
            left = size
            while left:
                if number % 2:
                    part = memoryview(bytearray(left))
                    self.elsewhere += left
                else:
                    part = place(left)
                    part = part[: max(1, len(part) - number)]
                part[:] = bytes([number + 1]) * len(part)
                left -= len(part)
                yield part


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=8), started=st.integers(0, 2))
def test_parts_that_are_made_where_they_are_wanted_are_not_copied_again(tmp_path_factory, sizes, started):
    parts, copied, real = Made(sizes), [], np.copyto
    with (
        refusing(started),
        mock.patch.object(np, "copyto", lambda to, part: (copied.append(part.nbytes), real(to, part))),
    ):
        assert written(tmp_path_factory.mktemp("made"), parts, size_bytes=sum(sizes)) == parts.content()
    assert sum(copied) == parts.elsewhere


# --- interrupts and forks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_a_write_that_is_interrupted_again_and_again_is_left_when_nothing_is_being_written(
    tmp_path, monkeypatch, small_buffers, times
):
    """A late write would go to the next file with this descriptor, from a buffer that another save fills."""
    under_way, may_go_on, real, interrupts = [], threading.Event(), direct_io._write_at, []

    def slow(*args):
        if (
            threading.current_thread() is threading.main_thread()
        ):  # the waiting thread does the tasks that no thread has started
            threading.Event().wait(0.05)  # and the threads do the rest
            real(*args)
            return
        under_way.append(1)
        assert may_go_on.wait(20)
        assert not small_buffers._free
        real(*args)
        under_way.pop()

    def wait(bell, real=Wakeup.wait):
        if threading.current_thread() is threading.main_thread() and len(interrupts) < times:
            interrupts.append(1)
            raise KeyboardInterrupt
        may_go_on.set()
        real(bell)

    monkeypatch.setattr(direct_io, "_write_at", slow)
    monkeypatch.setattr(Wakeup, "wait", wait)
    size = 5 * direct_io.BUFFER_BYTES
    with (tmp_path / "file").open("wb") as file, pytest.raises(KeyboardInterrupt):
        direct_io.write_stream(file.fileno(), [bytes(size)], size_bytes=size)
    assert not under_way
    assert len(interrupts) == times
    assert len(small_buffers._free) == direct_io.BUFFERS


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of other tests' threads, on Python 3.12
def test_a_forked_child_has_buffers_of_its_own(tmp_path):
    """A child and its parent never share buffers, not even those that waited for reuse at the fork."""
    with direct_io._POOL.borrow(2) as (one, other):
        one[:] = 1
    arena = Arena(4096).take(4096).fill_(1)
    assert len(direct_io._POOL._free) >= 2
    pid = os.fork()
    if not pid:
        try:
            one[:] = 2
            arena.fill_(2)
            os._exit(len(direct_io._POOL._free))
        finally:
            os._exit(100)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert one.max() == 1
    assert arena.max() == 1
    assert other.nbytes
