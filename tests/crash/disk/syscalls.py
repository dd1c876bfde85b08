"""Sends every call by which Python changes a filesystem through one function, to record the call or to make it fail.

``os`` and ``open`` are patched, so this sees everything that any thread of this process writes through them, but not what C++
writes directly. test_recorder.py compares it with the output of strace.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from trainfold.backends.stores import direct_io

Handler = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes the name of a call, the real function and its arguments; makes the call, or does not, and returns its result."""

WATCHED: Final = (
    "open", "close", "write", "writev", "pwrite", "pwritev", "ftruncate", "truncate", "fsync", "fdatasync", "sync",
    "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "symlink",
    "posix_fallocate", "sendfile", "copy_file_range", "mkfifo", "mknod",
)  # fmt: skip
_BUFFER_BYTES: Final = 4096  # the buffer size of `open` on common filesystems: st_blksize


@contextmanager
def watched(handler: Handler) -> Iterator[None]:
    """Send each call to a handler. Several threads call the handler; the calls that it makes itself are not watched."""

    def wrapper(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: handler(name, real, args, kwargs)

    real_open = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return real_open(file, mode, buffering, *args, **kwargs)
        raw = _File(os.fspath(file), mode.replace("b", "").replace("t", ""), handler)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else _BUFFER_BYTES
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

    with ExitStack() as stack:
        for name in WATCHED:
            stack.enter_context(mock.patch.object(os, name, wrapper(name, getattr(os, name))))
        for module in (io, builtins):
            stack.enter_context(mock.patch.object(module, "open", opened))
        # the only call that the store makes through ctypes
        allocate = wrapper("allocate", direct_io._allocate)
        stack.enter_context(mock.patch.object(direct_io, "_allocate", allocate))
        yield


class _File(io.FileIO):
    """A file object that opens, writes and closes through calls that the handler sees, like the C implementation."""

    def __init__(self, path: Any, mode: str, handler: Handler) -> None:
        self._handler = handler
        super().__init__(path, mode, opener=lambda name, flags: os.open(name, flags, 0o666))

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._handler("close", lambda _: super(_File, self).close(), (self.fileno(),), {})
