"""Memory in pages of 2 MiB: a fork of a process with torch then takes a third of the time, and the suite makes thousands."""

import ctypes
import re
from pathlib import Path

COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 and later; other systems refuse it, and nothing changes
PAGE = 1 << 21


def use_huge_pages() -> None:
    """Put all private memory that this process has now into pages of 2 MiB, where the system can."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    libc = ctypes.CDLL(None)
    for line in maps.read_text().splitlines():
        found = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?", line)
        if found:
            first = -(-int(found[1], 16) // PAGE) * PAGE
            end = int(found[2], 16) // PAGE * PAGE
            if first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), COLLAPSE)
