"""The lock of a run on a filesystem, for its one writer. The writer's death frees the lock; each write first checks that it still holds."""

import fcntl
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, final

import attrs

from trainfold.backends.lock_holder import (
    has_ended,
    has_gone_since,
    myself,
    seen_from_here,
    this_machine,
    writer_in_words,
)
from trainfold.core.errors import CheckpointHostile, RunLocked, RunReplaced

LOCK_NAME: Final = ".lock"
_HOLDER_BYTES: Final = 256
_DEAD_SECS: Final = 10.0
_LOOK_SECS: Final = 0.01
_FRESH_SECS: Final = 600.0  # for which a process of another machine may write without a change that this one sees


@final
@attrs.frozen
class HeldLock:
    """A lock that a process has taken, and the locked file.

    Attributes:
        root: the directory.
        fd: the open file that the lock belongs to.
        pid: the process that took it.
        file: device and inode of the file. While it is open, no other file can have them.
    """

    root: str
    fd: int
    pid: int
    file: tuple[int, int]


_HELD: Final[set[HeldLock]] = set()


def acquire(root: str) -> HeldLock:
    """Lock a run's directory. A living holder is refused at once; a killed one may take some seconds to end, and is waited for.

    The lock belongs to the open file, so a second store object of this process is refused like one of another process.

    Args:
        root: the directory, which exists.

    Returns:
        The lock, for `release`.

    Raises:
        RunLocked: naming the holder.
        CheckpointHostile: if the lock file is a link, or not a file.
        OSError: if it cannot be created.
    """
    path = os.path.join(root, LOCK_NAME)  # noqa: PTH118  # one string, no object, on a path used once a save
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise _planted(path) from error
        raise
    opened = os.fstat(fd)
    if not stat.S_ISREG(opened.st_mode):
        os.close(fd)
        raise _planted(path)
    try:
        _take(fd)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        fix = "wait for it or stop it (the lock ends with the process), or save into another run"
        if holder == myself():
            holder, fix = f"{holder}, which is this one", "close the manager that holds it, or leave its with block"
        elif has_ended(holder):
            holder, fix = f"{holder}, which has ended, and something that it started", "stop what it started"
        raise RunLocked(root, expected="no other writer", found=holder, fix=fix) from None
    except BaseException:
        os.close(fd)
        raise
    with suppress(OSError):  # a full disk: the lock holds, but no message can name the process
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{myself()}\n{this_machine()}\n".encode(), 0)
    held = HeldLock(root, fd, os.getpid(), (opened.st_dev, opened.st_ino))
    _HELD.add(held)
    return held


def writers(root: str, directories: Iterable[str]) -> dict[str, str]:
    """The directories into which the holder of the lock may be writing now, each with that process in words.

    It takes no lock, which could refuse one to a process that starts. What has not changed since the lock was taken is what a process before has left.

    Args:
        root: the run.
        directories: of saves without a manifest.
    """
    try:
        fd = os.open(f"{root}/{LOCK_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        opened = os.fstat(fd)
        holder = _holder(fd) if stat.S_ISREG(opened.st_mode) else ""
    except OSError:
        return {}
    finally:
        os.close(fd)
    is_gone = has_gone_since(holder, opened.st_mtime)
    found = {}
    for name in directories if not is_gone else ():
        changed = _changed_at(f"{root}/{name}")
        words = writer_in_words(holder, is_gone=is_gone, is_fresh=time.time() - changed < _FRESH_SECS)
        if words is not None and changed >= opened.st_mtime:
            found[name] = words
    return found


def _changed_at(directory: str) -> float:
    """When a directory, or a file in it, has changed last."""
    times = [0.0]
    with suppress(OSError):
        times.append(os.lstat(directory).st_mtime)
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):  # renamed meanwhile
                    times.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times)


def _take(fd: int) -> None:
    """Lock the file, at the latest some seconds after its holder was killed: a large process keeps its locks until its memory is freed.

    Raises:
        BlockingIOError: if another process has it.
    """
    late = time.monotonic() + _DEAD_SECS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > late or not has_ended(_holder(fd)):
                raise
            time.sleep(_LOOK_SECS)
        else:
            return


def _holder(fd: int) -> str:
    holder, _, machine = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip().partition("\n")
    return seen_from_here(holder, machine) or "an unnamed process"


def check(held: HeldLock) -> None:
    """Check that this process still owns a lock, and that the run's directory is still the locked one. Costs a getpid and a stat.

    Raises:
        RunLocked: in a forked child, because the lock stays with the process that took it.
        RunReplaced: if the directory was removed or moved, or another one is at its path.
        OSError: if the directory cannot be read.
    """
    if held.pid != os.getpid():
        raise RunLocked(
            held.root,
            expected=f"process {held.pid}, which took the lock",
            found=f"process {os.getpid()}, which was forked from it",
            fix="save in that process, or make a manager in this one after the other is closed",
        )
    path = os.path.join(held.root, LOCK_NAME)  # noqa: PTH118  # as above
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        found = "no directory: it was removed or moved"
    else:
        if (there.st_dev, there.st_ino) == held.file:
            return
        found = "another .lock, which another process may hold"
    raise RunReplaced(
        held.root,
        expected="the directory, and the .lock in it, that this process has locked",
        found=found,
        fix="put the directory back; or make another manager and restore, to go on at this path",
    )


def _planted(path: str) -> CheckpointHostile:
    return CheckpointHostile(
        path,
        expected="a regular file to lock",
        found="a link, a directory or a special file",
        fix="find out what put it there, and remove it",
    )


def release(held: HeldLock) -> None:
    """Release the lock. The file stays: if it were removed, two processes could lock two files of one name.

    Does nothing in a forked child, which released its copy at the fork: the descriptor may belong to another file by now.
    """
    if held not in _HELD:
        return
    is_open = _is_open(held)
    if is_open:
        with suppress(OSError):  # so that no one takes a living process for the writer after its release
            os.ftruncate(held.fd, 0)
        with suppress(OSError):  # the device is gone: what was saved is saved
            # for all copies of the descriptor: a child that was just forked may still have one
            fcntl.flock(held.fd, fcntl.LOCK_UN)
    _HELD.discard(held)  # here, so that an interrupted caller can try again, and no descriptor is closed twice
    if is_open:
        with suppress(OSError):
            os.close(held.fd)


def _is_open(held: HeldLock) -> bool:
    """Whether its descriptor is still that of the lock: a program that closes what it has not opened frees the number for another file."""
    try:
        opened = os.fstat(held.fd)
    except OSError:
        return False
    return (opened.st_dev, opened.st_ino) == held.file


def _drop_in_child() -> None:
    """A forked child, such as a loader's worker, shares the lock: unless it closes its copy, the lock outlives its owner."""
    for held in _HELD:
        if _is_open(held):
            with suppress(OSError):
                os.close(held.fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def is_abandoned(fd: int) -> bool:
    """Whether no program writes this staging file any more. If so, the file is locked until ``fd`` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
