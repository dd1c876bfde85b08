"""Writes a stream of bytes at disk speed: through pooled aligned buffers, with O_DIRECT if the filesystem supports it.

One thread fills a buffer, while the caller's iterator hashes the parts hot in cache, and two others write the buffers
before it. Direct writes leave the page cache to the training process and cost a tenth of the CPU time of buffered ones.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.stores.protocol import Buffer, Placeable

BUFFER_BYTES: Final = 2 << 20  # four of them stay in the third-level cache, where the device reads them
BUFFERS: Final = 4
WRITERS: Final = 2  # two in flight keep the disk busy while the filler waits for a core
ALIGNMENT_BYTES: Final = 4096
DIRECT_FROM_BYTES: Final = 1 << 20  # below this, threads and alignment cost more than the page cache
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)

Bytes = npt.NDArray[np.uint8]


@final
class _Pool:
    """Buffers kept for reuse: fresh memory costs page faults, which run at a tenth of the speed of a copy."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._mutex = threading.Lock()

    @contextmanager
    def borrow(self, count: int) -> Iterator[list[Bytes]]:
        with self._mutex:
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        taken += [_aligned_buffer() for _ in range(count - len(taken))]
        try:
            yield taken
        finally:
            with self._mutex:
                self._free += taken[: max(0, BUFFERS - len(self._free))]

    def renew(self) -> None:
        """Start empty in a forked child: the thread that held the lock is gone, and the buffers belong to the parent."""
        self._mutex, self._free = threading.Lock(), []

    def clear(self) -> None:
        with self._mutex:
            self._free.clear()


def _aligned_buffer() -> Bytes:
    # private, so not shared with a forked child
    memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin for each write
    return np.frombuffer(memory, dtype=np.uint8)


_POOL: Final = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _POOL.renew())  # noqa: PLW0108  # the pool of that time


def release_buffers() -> None:
    """Free the buffers kept for reuse; for a caller that will not write for a while."""
    _POOL.clear()


def try_direct(fd: int) -> bool:
    """Switch an open file to O_DIRECT; False if the filesystem does not support it."""
    if not _O_DIRECT:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError:
        return False
    return True


def write_stream(fd: int, parts: Iterable[Buffer], *, size_bytes: int, start: int = 0) -> int:
    """Write parts one after another at the end of a file; not yet durable (fsync it).

    Args:
        fd: a file open for writing; its O_DIRECT flag may be changed.
        parts: the bytes in order; a part is copied or written, and released, before the next one is asked for. `Placeable` parts put their bytes
            straight into a buffer, which saves a copy.
        size_bytes: what the parts should have in all; the file never grows by more.
        start: how many bytes the file has. A multiple of `ALIGNMENT_BYTES` keeps the speed.

    Returns:
        How many bytes the parts had: ``size_bytes`` or less; if they had too many, the count up to and with the first part too many.

    Raises:
        OSError: from the write; ENOSPC before the first byte where the filesystem can allocate ahead.
    """
    if size_bytes < DIRECT_FROM_BYTES:
        return _write_small(fd, parts, size_bytes, start)
    _allocate(fd, start, size_bytes)
    is_direct = try_direct(fd)
    given = 0
    with _POOL.borrow(BUFFERS) as buffers, Helpers(WRITERS) as writers:
        queue = _Queue(fd, writers, deque(buffers), offset=start)
        for part in parts.placed(queue.place) if isinstance(parts, Placeable) else parts:
            data = np.frombuffer(part, dtype=np.uint8)
            given += data.nbytes
            if given > size_bytes:
                break
            queue.put(data)
            del part, data  # what comes next may need their memory
        queue.finish(pads=is_direct)
    if is_direct:
        os.ftruncate(fd, start + min(given, size_bytes))  # the last write was padded to the alignment
    return given


@final
@attrs.define(eq=False)
class _Queue:
    """Fills one buffer while others are written, in file order."""

    fd: int
    writers: Helpers
    free: deque[Bytes]
    busy: deque[Task[Bytes]] = attrs.field(factory=deque)
    filled: int = 0
    offset: int = 0

    def place(self, size_bytes: int) -> memoryview:
        """The memory for the next bytes, as many as fit; waits for a free buffer. See `Place`."""
        if not self.free:
            self._take_back()
        return self.free[0].data[self.filled : min(self.filled + size_bytes, BUFFER_BYTES)]

    def put(self, data: Bytes) -> None:
        start = 0
        if self.free and _address(data) == _address(self.free[0]) + self.filled:
            self.filled += data.nbytes
            if self.filled == BUFFER_BYTES:
                self._send(BUFFER_BYTES)
            return
        while start < data.nbytes:
            if not self.free:
                self._take_back()
            count = min(BUFFER_BYTES - self.filled, data.nbytes - start)
            # numpy's copy releases the GIL, so the training thread goes on
            np.copyto(self.free[0][self.filled : self.filled + count], data[start : start + count])
            self.filled += count
            start += count
            if self.filled == BUFFER_BYTES:
                self._send(BUFFER_BYTES)

    def finish(self, *, pads: bool) -> None:
        if self.filled:
            padded = -(-self.filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if pads else self.filled
            self.free[0][self.filled : padded] = 0
            self._send(padded)
        while self.busy:
            self._take_back()

    def _send(self, count: int) -> None:
        task = Task(partial(_write_buffer, self.fd, self.free.popleft(), count, self.offset))
        self.busy.append(task)
        self.writers.give(task)
        self.offset += count
        self.filled = 0

    def _take_back(self) -> None:
        self.free.append(self.busy.popleft().result())


def _address(data: Bytes) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def _write_buffer(fd: int, buffer: Bytes, count: int, offset: int) -> Bytes:
    """Write the first bytes of a buffer, and return the buffer."""
    _write_at(fd, buffer.data[:count], offset)
    return buffer


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    may_be_direct = True
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not may_be_direct:
                raise
            # The filesystem accepted the flag but not the write, or a short write lost the alignment. The flag itself
            # proves nothing now: the other writer of this file may have cleared it.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
            may_be_direct = False


def _write_small(fd: int, parts: Iterable[Buffer], size_bytes: int, start: int) -> int:
    given = 0
    for part in parts:
        data = memoryview(part).cast("B")
        if given + len(data) > size_bytes:
            return given + len(data)
        _write_at(fd, data, start + given)
        given += len(data)
    return given


def _allocate(fd: int, start: int, size_bytes: int) -> None:
    """Reserve the blocks ahead: a full disk is detected before the first byte, and single writes need no new metadata.

    Not ``os.posix_fallocate``: glibc emulates it by touching each block where the filesystem cannot do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    offset_type = ctypes.c_int64
    while libc.fallocate(ctypes.c_int(fd), 0, offset_type(start), offset_type(size_bytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise OSError(code, os.strerror(code))
            return
