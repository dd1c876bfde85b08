"""The lock of a run on a filesystem: one writer, freed by its death."""

import fcntl
import os
import socket
import stat
from typing import Final

from trainfold.core.errors import CheckpointHostile, RunLocked

LOCK_NAME: Final = ".lock"
_HELD: Final[set[int]] = set()
_HOLDER_BYTES: Final = 256


def acquire(root: str) -> int:
    """Lock a run's directory.

    The lock belongs to the open file, so a second store object of the same process is refused like another process.

    Args:
        root: the directory, which exists.

    Returns:
        The descriptor that holds the lock; give it to `release`.

    Raises:
        RunLocked: naming the holder.
        CheckpointHostile: when the lock file is a link or anything else but a file.
        OSError: when it cannot be made.
    """
    path = os.path.join(root, LOCK_NAME)  # noqa: PTH118  # one string, no object, on a path used once a save
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise _planted(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _planted(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "an unnamed process"
        os.close(fd)
        mend = "wait for it or stop it (the lock goes with the process), or save into another run"
        if holder == _myself():
            holder, mend = f"{holder}, which is this one", "close the manager that holds it, or leave its with block"
        raise RunLocked(root, expected="no other writer", found=holder, mend=mend) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{_myself()}\n".encode(), 0)
    _HELD.add(fd)
    return fd


def _myself() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _planted(path: str) -> CheckpointHostile:
    return CheckpointHostile(
        path,
        expected="a regular file to lock",
        found="a link, a directory or a special file",
        mend="see who put it there, and remove it",
    )


def release(fd: int) -> None:
    """Give the lock up. The file stays: removing it would let two processes lock two files of one name."""
    if fd in _HELD:
        _HELD.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)  # for every copy: a child that was forked just now may not have let go yet
        os.close(fd)


def _drop_in_child() -> None:
    """A forked child (a loader's worker) shares the lock: unless it lets go, the lock outlives its owner."""
    for fd in _HELD:
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def is_abandoned(fd: int) -> bool:
    """Whether nobody writes this staging file any more; if so it is locked now, until ``fd`` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
