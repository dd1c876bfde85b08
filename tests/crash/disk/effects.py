"""The effects on a disk: one value for each change that a crash can keep or lose, and the recorder that lists them."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import attrs

TOP = 0  # the inode of the top directory; it exists before the program starts, and is durable


@final
@attrs.frozen
class Bind:
    """A name appears in a directory: of a new file, directory or link, or another name of a file."""

    directory: int
    name: str
    inode: int
    kind: str  # file, directory, link
    target: str = ""


@final
@attrs.frozen
class Unbind:
    """A name is removed."""

    directory: int
    name: str


@final
@attrs.frozen
class Move:
    """A name is moved over another one."""

    source_directory: int
    source: str
    directory: int
    name: str
    inode: int


@final
@attrs.frozen
class Write:
    """Bytes are written into a file."""

    inode: int
    offset: int
    data: bytes = attrs.field(repr=lambda data: f"<{len(data)} bytes>")


@final
@attrs.frozen
class Resize:
    """A file gets a size: cut off, or extended by zeros."""

    inode: int
    size: int


@final
@attrs.frozen
class Sync:
    """A file or directory is made durable; with None, everything is."""

    inode: int | None


@final
@attrs.frozen
class SyncFailed:
    """A file could not be made durable: the kernel has dropped its written data, and no later sync brings them back."""

    inode: int


@final
@attrs.frozen
class Mark:
    """A mark in the program: it begins an operation (``begin``), the operation returned (``ack``), or it failed (``fail``)."""

    what: str
    value: Any = None


Effect: TypeAlias = Bind | Unbind | Move | Write | Resize | Sync | SyncFailed | Mark


@final
class Recorder:
    """A handler for `watched`: makes each call, and lists its effects below one directory, in order.

    Args:
        top: the directory.
        inodes: path below it -> inode, for everything in it.
        count: the highest inode used so far.
    """

    def __init__(self, top: str | os.PathLike[str], inodes: Mapping[str, int] | None = None, count: int = TOP) -> None:
        self.top = os.path.realpath(top)
        self.effects: list[Effect] = []
        self._mutex = threading.RLock()
        self._opened: dict[int, tuple[str, int]] = {}  # descriptor -> the path when it was opened, and the inode
        self._inodes = {self.top: TOP, **{f"{self.top}/{path}": inode for path, inode in (inodes or {}).items()}}
        self._count = count

    def mark(self, what: str, value: Any = None) -> None:
        """Record what the program under test is doing."""
        with self._mutex:
            self.effects.append(Mark(what, value))

    def __call__(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call and record its effect."""
        with self._mutex:
            return getattr(self, f"do_{name}", self._unknown)(real, *args, **kwargs)

    def target(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The path below the top that a call concerns, or None if it concerns anything else."""
        if name == "sync":
            return None
        if isinstance(args[0], int):
            return self._opened[args[0]][0] if args[0] in self._opened else None
        if name in {"rename", "replace", "link"}:
            return self._path(args[1], kwargs.get("dst_dir_fd"))
        return self._path(args[1] if name == "symlink" else args[0], kwargs.get("dir_fd"))

    def descriptor_of_directory(self, fd: int) -> int:
        """Another open descriptor: that of the directory in which an open file was made."""
        above, _ = os.path.split(self._opened[fd][0])
        return next(other for other, (path, _) in self._opened.items() if path == above)

    def sync_failed(self, fd: int) -> None:
        """Record that a file could not be made durable."""
        with self._mutex:
            self.effects.append(SyncFailed(self._opened[fd][1]))

    # --- descriptors ---------------------------------------------------------------------------------------------

    def do_open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        full = self._path(path, dir_fd)
        fd = real(path, flags, mode, dir_fd=dir_fd)
        if full is None:
            return fd
        inode = self._inodes.get(full)
        if inode is None:
            assert flags & os.O_CREAT, f"{full} was not made under watch"
            inode = self._make(full, "file")
        elif flags & os.O_TRUNC:
            self.effects.append(Resize(inode, 0))
        self._opened[fd] = (full, inode)
        return fd

    def do_close(self, real: Any, fd: int) -> None:
        self._opened.pop(fd, None)
        real(fd)

    # --- bytes ---------------------------------------------------------------------------------------------------

    def do_write(self, real: Any, fd: int, data: Any) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR) if fd in self._opened else 0
        return self._written(fd, offset, data, real(fd, data))

    def do_pwrite(self, real: Any, fd: int, data: Any, offset: int) -> int:
        return self._written(fd, offset, data, real(fd, data, offset))

    def do_ftruncate(self, real: Any, fd: int, size: int) -> None:
        real(fd, size)
        if fd in self._opened:
            self.effects.append(Resize(self._opened[fd][1], size))

    def do_allocate(self, real: Any, fd: int, start: int, size: int) -> None:
        real(fd, start, size)
        if fd in self._opened and os.fstat(fd).st_size == start + size:  # some filesystems cannot
            self.effects.append(Resize(self._opened[fd][1], start + size))

    def do_fsync(self, real: Any, fd: int) -> None:
        real(fd)
        if fd in self._opened:
            self.effects.append(Sync(self._opened[fd][1]))

    do_fdatasync = do_fsync

    def do_sync(self, real: Any) -> None:
        del real  # do not sync other programs' data
        self.effects.append(Sync(None))

    # --- names ---------------------------------------------------------------------------------------------------

    def do_rename(
        self, real: Any, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        old, new = self._path(source, src_dir_fd), self._path(target, dst_dir_fd)
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if old is None and new is None:
            return
        assert old is not None, f"{source} is moved in from elsewhere"
        assert new is not None, f"{target} is moved out"
        inode = self._inodes.pop(old)
        self._inodes[new] = inode
        for below in [path for path in self._inodes if path.startswith(old + "/")]:
            self._inodes[new + below.removeprefix(old)] = self._inodes.pop(below)
        for fd, (path, opened) in self._opened.items():
            if path == old or path.startswith(old + "/"):
                self._opened[fd] = new + path.removeprefix(old), opened
        self.effects.append(Move(*self._place(old), *self._place(new), inode))

    do_replace = do_rename

    def do_link(self, real: Any, source: Any, target: Any, **kwargs: Any) -> None:
        old, new = self._path(source, kwargs.get("src_dir_fd")), self._path(target, kwargs.get("dst_dir_fd"))
        real(source, target, **kwargs)
        if new is not None and old is not None:
            self._inodes[new] = self._inodes[old]
            self.effects.append(Bind(*self._place(new), self._inodes[old], "file"))

    def do_unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        full = self._path(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if full is not None:
            del self._inodes[full]
            self.effects.append(Unbind(*self._place(full)))

    do_remove = do_rmdir = do_unlink

    def do_mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        full = self._path(path, dir_fd)
        real(path, mode, dir_fd=dir_fd)
        if full is not None:
            self._make(full, "directory")

    def do_symlink(self, real: Any, target: Any, path: Any, *args: Any, dir_fd: int | None = None) -> None:
        full = self._path(path, dir_fd)
        real(target, path, *args, dir_fd=dir_fd)
        if full is not None:
            self._make(full, "link", os.fspath(target))

    # --- inside --------------------------------------------------------------------------------------------------

    def _unknown(self, real: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"the recorder does not know {real} {args} {kwargs}")

    def _path(self, path: Any, dir_fd: int | None) -> str | None:
        """The path below the top, or None if it is outside."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self._opened:
                return None
            text = f"{self._opened[dir_fd][0]}/{text}"
        above, last = os.path.split(os.path.abspath(text))  # noqa: PTH100  # links on the way are followed, a last one is not
        full = f"{os.path.realpath(above)}/{last}"
        return full if full == self.top or full.startswith(self.top + "/") else None

    def _place(self, full: str) -> tuple[int, str]:
        above, last = os.path.split(full)
        return self._inodes[above], last

    def _make(self, full: str, kind: str, target: str = "") -> int:
        self._count += 1
        self._inodes[full] = self._count
        self.effects.append(Bind(*self._place(full), self._count, kind, target))
        return self._count

    def _written(self, fd: int, offset: int, data: Any, count: int) -> int:
        if fd in self._opened and count:
            self.effects.append(Write(self._opened[fd][1], offset, bytes(memoryview(data).cast("B")[:count])))
        return count
