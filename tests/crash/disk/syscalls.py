"""Every call by which Python changes a filesystem goes through one function: to record what is done, or to make it fail.

``os`` and ``open`` are patched, so this sees all that is written through them, by any thread, in this process; not what
C++ writes by itself. What strace sees is compared with it in test_recorder.py.
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
"""Gets the name of a call, the real function, and its arguments; does it, or not, and returns what it returns."""

WATCHED: Final = (
    "open", "close", "write", "writev", "pwrite", "pwritev", "ftruncate", "truncate", "fsync", "fdatasync", "sync",
    "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "symlink",
    "posix_fallocate", "sendfile", "copy_file_range", "mkfifo", "mknod",
)  # fmt: skip
_BUFFER_BYTES: Final = 4096  # what `open` takes on common filesystems: st_blksize


@contextmanager
def watched(handler: Handler) -> Iterator[None]:
    """Send each call to a handler. The handler is called by several threads; what it calls itself is not watched."""

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
        # the one call that the store makes through ctypes
        allocate = wrapper("allocate", direct_io._allocate)
        stack.enter_context(mock.patch.object(direct_io, "_allocate", allocate))
        yield


class _File(io.FileIO):
    """A file that is opened, written and closed by calls that the handler sees, as the one of C makes them."""

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
