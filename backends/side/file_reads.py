"""`read_whole` reads a file of the user's while others may write it; `files_below` lists a directory."""

import errno
import os
import stat
import time
from pathlib import Path
from typing import Final, NamedTuple

from trainfold.core.errors import CheckpointHostile, InvalidState

_TRIES: Final = 3
_MISSING: Final = (errno.ENOENT, errno.ENOTDIR)
_COARSE_NS: Final = (
    2_000_000_000  # of some filesystems: a file that was written again in this time may have the same stamp
)


class FileIdentity(NamedTuple):
    """What changes when a file does: its device, inode, size in bytes, and the times of its bytes and of its inode in nanoseconds."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    def is_settled(self, now_ns: int) -> bool:
        """Whether a later change would show in the times."""
        return max(self.mtime_ns, self.ctime_ns) + _COARSE_NS < now_ns


class WholeFile(NamedTuple):
    """The bytes of a file, and its identity while they were read; None if a change after it might not show."""

    data: bytes
    identity: FileIdentity | None


def file_identity(path: Path) -> FileIdentity | None:
    """The identity of a file; None if it is not there."""
    try:
        return _identity(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_whole(path: Path, *, most_bytes: int) -> WholeFile:
    """Read a file that has the same identity before and after.

    Args:
        path: of the file; links are followed.
        most_bytes: the size above which it is refused.

    Raises:
        InvalidState: if it is not there, too large, not a regular file, cannot be read, or changes at each attempt to read it.
    """
    for _ in range(_TRIES):
        begun_ns = time.time_ns()
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # NONBLOCK: a pipe must not hang a run
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidState(str(path), expected="a file", found="a directory or a special file", fix="name files, or one directory")  # fmt: skip
            if found.st_size > most_bytes:
                raise InvalidState(str(path), expected=f"at most {most_bytes} bytes for all files together", found=f"{found.st_size} in this one",
                                   fix="leave it out, or pass a larger max_bytes=: the bytes are held in memory")  # fmt: skip
            data = _bytes_of(fd, found.st_size)
            before, after = _identity(found), _identity(os.fstat(fd))
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(fd)
        if before == after == file_identity(path) and len(data) == before.size_bytes:
            return WholeFile(data, before if before.is_settled(begun_ns) else None)
    raise InvalidState(str(path), expected="a file that stays as it is while it is read", found=f"one that changed at each of {_TRIES} attempts",
                       fix="write it under another name, and rename it when it is whole")  # fmt: skip


def files_below(directory: Path) -> dict[str, Path]:
    """Name -> path of each file in a directory and in those in it, sorted. What is removed meanwhile is left out.

    Raises:
        CheckpointHostile: for a link that leads out of it.
        InvalidState: for a link to a directory, or to nothing; for what is neither a file nor a directory; and for a directory that cannot be read.
    """

    def unread(error: OSError) -> None:
        if error.errno not in _MISSING:
            raise _unreadable(Path(error.filename), error, kind="a directory") from error

    home, found = directory.resolve(), dict[str, Path]()
    for above, folders, names in os.walk(directory, onerror=unread):
        for name in [*folders, *names]:
            path = Path(above, name)
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise CheckpointHostile(str(path), expected="a file in its directory", found=f"a link to {path.resolve()}",
                                        fix='name the files that are meant one by one: SideFiles({"name": path})')  # fmt: skip
            if path.is_symlink() and not path.is_file():
                raise InvalidState(str(path), expected="a file, a directory, or a link to a file", found=f"a link to {_kind_of(path)}",
                                   fix='remove the link, or name the files that are meant: SideFiles({"name": path})')  # fmt: skip
        for name in names:
            path = Path(above, name)
            if path.is_file():
                found[path.relative_to(directory).as_posix()] = path
            elif os.path.lexists(path):
                raise InvalidState(str(path), expected="a file, a directory, or a link to a file", found="a special file, such as a pipe or a socket",
                                   fix='remove it, or name the files that are meant: SideFiles({"name": path})')  # fmt: skip
    return dict(sorted(found.items()))


def _kind_of(link: Path) -> str:
    return "a directory" if link.is_dir() else "a special file" if link.exists() else "nothing"


def _bytes_of(fd: int, size_bytes: int) -> bytes:
    parts, left = [], size_bytes + 1  # one more shows that it has grown
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _identity(found: os.stat_result) -> FileIdentity:
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _unreadable(path: Path, error: OSError, *, kind: str = "a file") -> InvalidState:
    return InvalidState(str(path), expected=f"{kind} that can be read", found="nothing" if error.errno in _MISSING else error.strerror,
                        fix="put it there, leave it out of SideFiles, or name the component in optional= of attach")  # fmt: skip
