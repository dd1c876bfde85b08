"""`Arena`: pre-faulted memory for copies on the critical path: huge pages, returned to the system as soon as they are free."""

import ctypes
import mmap
from typing import Final, final

import torch

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HUGE_BYTES: Final = 2 << 20
ALIGNMENT_BYTES: Final = 64


@final
class Arena:
    """One anonymous mapping, handed out from its start to its end.

    A copy into fresh pages costs about ten times as much as one into present pages, so `make_present` pays for them in a background
    thread. The memory is given back when the arena and everything taken from it are gone.

    Args:
        size_bytes: how much can be taken. Memory that is neither taken nor made present costs nothing.

    Examples:
        >>> arena = Arena(8192)
        >>> arena.make_present(4096)
        >>> arena.take(5000).numel(), arena.left_bytes
        (5000, 3136)
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def make_present(self, size_bytes: int) -> None:
        """Fault in the first pages, without the GIL. If the kernel cannot, the first write to each page faults it in.

        They may be taken and written to meanwhile: no byte is changed.
        """
        libc = ctypes.CDLL(None)
        wanted = min(size_bytes, self.size_bytes)
        if wanted > 0 and hasattr(libc, "madvise"):
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(wanted), ctypes.c_int(_POPULATE_WRITE))

    @property
    def left_bytes(self) -> int:
        """The bytes that can still be taken."""
        return self.size_bytes - self._used

    def take(self, size_bytes: int) -> torch.Tensor:
        """Take so many bytes, as uint8.

        Args:
            size_bytes: no more than are left, after `padded`.
        """
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        taken = torch.frombuffer(self._memory, dtype=torch.uint8, offset=self._used, count=size_bytes)
        self._used += padded(size_bytes)
        return taken


def padded(size_bytes: int) -> int:
    """The bytes of an arena that a copy takes up.

    Examples:
        >>> padded(65)
        128
    """
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
