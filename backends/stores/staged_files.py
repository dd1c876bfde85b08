"""Opens files in a run's directory without following links, and stages new ones."""

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from trainfold.backends.stores import run_lock
from trainfold.backends.stores.os_errors import missing, not_a_directory
from trainfold.core.errors import CheckpointHostile, InvalidArgument
from trainfold.core.json_values import shown

STAGED_PREFIX: Final = ".tmp-"
_NAME_BYTES: Final = 255
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: a planted fifo must not hang us
_COUNTER: Final = itertools.count()


def check_path(path: str) -> None:
    """Check that the system could open a path; the longest allowed path depends on the filesystem.

    Raises:
        InvalidArgument: for an empty path, one with a NUL byte, or one that has no bytes in the filesystem's encoding.
    """
    try:
        fault = "an empty name" if not path else "a NUL byte" if b"\0" in os.fsencode(path) else None
    except UnicodeEncodeError:
        fault = "characters that have no bytes"
    if fault is not None:
        found = f"{fault} in {shown(path)}" if path else fault
        raise InvalidArgument("path", expected="a directory", found=found, fix="name the run's directory")


def too_long(path: str) -> InvalidArgument:
    """The error for a path that is too long for the filesystem."""
    return InvalidArgument("path", expected="a path that the filesystem can hold", found=f"{len(path)} characters: {shown(path)}",
                           fix="choose a shorter name for the run, or a folder higher up")  # fmt: skip


def path_of(root: str, directory: str) -> str:
    """The path of a directory of a run; the caller has checked its name."""
    return f"{root}/{directory}" if directory else root


@contextmanager
def open_directory(root: str, directory: str) -> Iterator[int]:
    """Open the run's directory ("") or one below it.

    The user chooses the path of the run, which may contain links; nothing below the run may be a link.

    Raises:
        FileNotFoundError: if there is no such directory.
        CheckpointHostile: if it is a link, or not a directory.
        CheckpointForeign: if the run's path is a file.
    """
    path = path_of(root, directory)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if directory else 0))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise too_long(path) from error
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        if not directory:
            raise not_a_directory(path) from error
        raise CheckpointHostile(
            path,
            expected="a directory",
            found="a link or a file",
            fix="copy the real directory there if you trust it; trainfold follows no links inside a run",
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_file(root: str, directory: str, last: str) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading; yields its descriptor and its size.

    Raises:
        CheckpointMissing: if there is no such file.
        CheckpointHostile: if it, or its directory, is a link or a special file.
    """
    where = f"{path_of(root, directory)}/{last}"
    try:
        with open_directory(root, directory) as parent:
            fd = os.open(last, _READ, dir_fd=parent)
    except FileNotFoundError:
        raise missing(where) from None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise not_a_file(where) from error
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise not_a_file(where)
        yield fd, found.st_size
    finally:
        os.close(fd)


def not_a_file(where: str) -> CheckpointHostile:
    """The error for a link, a directory, a fifo, a socket or a device in place of a file."""
    return CheckpointHostile(
        where,
        expected="a regular file",
        found="a link or a special file",
        fix="copy the real file there if you trust where it points; trainfold follows no links inside a run",
    )


def make_directories(root: str, directory: str) -> None:
    """Create a run's directory and one below it; `sync_above` makes the entries above the run durable.

    Raises:
        CheckpointForeign: if a file is in the way.
        OSError: if they cannot be created.
    """
    made = []
    above = os.path.abspath(root)  # noqa: PTH100
    while not os.path.isdir(above):  # noqa: PTH112
        made.append(above)
        above = os.path.dirname(above)  # noqa: PTH120
    for path in reversed(made):
        try:
            os.mkdir(path)  # noqa: PTH102
        except (FileExistsError, NotADirectoryError) as error:
            if not os.path.isdir(path):  # noqa: PTH112
                raise not_a_directory(path) from error
    if directory:
        with suppress(FileExistsError):
            os.mkdir(path_of(root, directory))  # noqa: PTH102


def sync_above(root: str) -> None:
    """Make the entries of all directories above a run durable, up to the root of its filesystem.

    Raises:
        OSError: if one cannot be synced.
    """
    run = Path(root).resolve()
    device = run.stat().st_dev
    for above in itertools.takewhile(lambda path: path.stat().st_dev == device, run.parents):
        try:
            fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            os.sync()  # a directory that this user may traverse but not open
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def staged(parent: int, last: str) -> Iterator[tuple[int, str]]:
    """Create a file under a temporary name in an open directory; yields its descriptor and that name.

    The name is removed at the end unless the caller renamed it. After an error nothing is synced: a failed fsync may
    have dropped the bytes, and a second fsync would report success. The file is locked while its writer lives, so that
    `collect` can distinguish the file of a dead writer from that of a living one.
    """
    while True:
        name = f"{STAGED_PREFIX}{os.getpid()}-{next(_COUNTER)}-{last}"[:_NAME_BYTES]
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags, 0o666, dir_fd=parent)
        except FileExistsError:
            continue  # left by a dead process that had this pid
        if run_lock.is_abandoned(fd) and os.fstat(fd).st_nlink:
            break
        os.close(fd)  # a collector was faster than our lock: try another name
    try:
        yield fd, name
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(name, dir_fd=parent)


def collect(root: str) -> list[str]:
    """Remove the files that dead writers staged in a run, and return their paths. The caller must hold the run's lock."""
    removed = []
    with os.scandir(root) as entries:
        directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for directory in ["", *directories]:
        with suppress(OSError, CheckpointHostile), open_directory(root, directory) as parent:
            staged_names = [name for name in os.listdir(parent) if name.startswith(STAGED_PREFIX)]  # noqa: PTH208  # a descriptor
            removed += [
                f"{path_of(root, directory)}/{name}" for name in staged_names if _remove_if_abandoned(parent, name)
            ]
    return removed


def _remove_if_abandoned(parent: int, name: str) -> bool:
    try:
        fd = os.open(name, _READ, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a hint that was being replaced
            os.unlink(name, dir_fd=parent)
            return True
        return False
    try:
        if run_lock.is_abandoned(fd):
            os.unlink(name, dir_fd=parent)
            return True
        return False
    finally:
        os.close(fd)
