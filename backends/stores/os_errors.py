"""What an `OSError` means for a save, and for a read. Only this module turns errors of the machine into errors with a name and a fix; `locked` has the caller's fix."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from trainfold.backends.stores.place import is_own_disk
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointTorn,
    CheckpointUnreadable,
    NoSpace,
    NotWritable,
    RankFailed,
    RunLocked,
    SaveFailed,
    SaveFailedElsewhere,
)
from trainfold.core.problem import Problem, problem_of

_FULL = {errno.ENOSPC, errno.EDQUOT}
_LOST = {
    errno.EIO,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENODATA,
}  # a bad sector, or wrong bytes that the filesystem has found
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_MORE_ROOM = (
    "delete old checkpoints with `trainfold prune RUN --keep-last N` (not by hand: newer ones may refer to their files), "
    "keep fewer with keep_last=, or save on another disk"
)


def save_failure(error: OSError, where: str) -> SaveFailed:
    """The named error for an `OSError` that stopped a write.

    Args:
        error: the error of the operating system.
        where: the file or run.

    Examples:
        >>> print(save_failure(OSError(errno.ENOSPC, "No space left on device"), "runs/a"))
        runs/a: expected the planned bytes to be written, found [Errno 28] No space left on device; delete old checkpoints with `trainfold prune RUN --keep-last N` (not by hand: newer ones may refer to their files), keep fewer with keep_last=, or save on another disk; earlier checkpoints are intact
    """
    kind: type[SaveFailed]
    if error.errno == errno.EFBIG:
        kind, fix = NoSpace, "raise the limit on the size of a file (`ulimit -f`), or save on a filesystem without it"
    elif error.errno in _FULL:
        kind, fix = NoSpace, f"{_MORE_ROOM}; earlier checkpoints are intact"
    elif error.errno == errno.ENOMEM:
        kind, fix = (
            SaveFailed,
            "this machine has no memory left: free some, or give an async save less with max_extra_bytes=; earlier checkpoints are intact",
        )
    elif error.errno in _FORBIDDEN:
        kind, fix = NotWritable, "give this user the right to write there, or save elsewhere"
    else:
        kind, fix = SaveFailed, "look at the device and its log; earlier checkpoints are intact"
    return kind(where, expected="the planned bytes to be written", found=error, fix=fix)


def read_failure(error: OSError, where: str) -> CheckpointDamaged:
    """The named error for an `OSError` that stopped a read.

    What a disk of this machine has lost is damage, and will not pass. Everything else may pass: rights, a stale handle, no descriptors or no memory left; and on
    a filesystem over a network the same error is that of a server that is away for a while.

    Args:
        error: the error of the operating system.
        where: the file.

    Examples:
        >>> print(read_failure(OSError(errno.EACCES, "Permission denied"), "runs/a/run.json"))
        runs/a/run.json: expected a file that can be read, found [Errno 13] Permission denied; give this user the right to read there; this does not prove damage
    """
    kind: type[CheckpointDamaged] = CheckpointUnreadable
    if error.errno in _LOST and is_own_disk(where):
        kind, fix = CheckpointDamaged, "look at the device and its log, or use an older checkpoint"
    elif error.errno in _FORBIDDEN:
        fix = "give this user the right to read there; this does not prove damage"
    else:
        fix = "look at the device, or at the server of the files, and try again; this does not prove damage"
    found = (
        f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error)
    )  # without the name, which is that in its directory
    return kind(where, expected="a file that can be read", found=found, fix=fix)


@contextmanager
def named_reads(where: str) -> Iterator[None]:
    """Turn each `OSError` of a block into a `CheckpointUnreadable`, or a `CheckpointDamaged`."""
    try:
        yield
    except OSError as error:
        raise read_failure(error, where) from error


@contextmanager
def locked(store: Store, fix: Callable[[RunLocked], str]) -> Iterator[None]:
    """Hold a run's lock; if another writer has it, the error says what to do about that here.

    Args:
        store: the run.
        fix: the error of the lock -> the next move.

    Raises:
        RunLocked: if another writer holds it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(store.lock())
        except RunLocked as error:
            raise RunLocked(error.where, expected=error.expected, found=error.found, fix=fix(error)) from None
        yield


@contextmanager
def named_failures(where: str) -> Iterator[None]:
    """Turn each `OSError` and `MemoryError` of a block into a `SaveFailed`, whether it came from a write or from reading the run, and what cannot be read now too."""
    try:
        yield
    except CheckpointDamaged as error:
        if isinstance(error.__cause__, OSError):  # as `named_reads` has raised it
            raise save_failure(error.__cause__, error.where) from error
        if not isinstance(error, CheckpointUnreadable):
            raise
        raise cannot_save(problem_of(error)) from error
    except OSError as error:
        raise save_failure(error, where) from error
    except MemoryError as error:
        raise no_memory(where) from error


def cannot_save(problem: Problem) -> SaveFailed:
    """The error for a save that has to know what its run holds, and cannot.

    Examples:
        >>> print(cannot_save(Problem("CheckpointUnreadable", "runs/a", "an answer", "503", "try again")))
        runs/a: expected an answer, found 503; try again
    """
    return SaveFailed(problem.where, expected=problem.expected, found=problem.found, fix=problem.fix)


def no_memory(where: str) -> SaveFailed:
    """The error for a save that ran out of memory.

    Examples:
        >>> print(no_memory("runs/a").found)
        [Errno 12] Cannot allocate memory
    """
    return save_failure(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), where)


@contextmanager
def failures_elsewhere() -> Iterator[None]:
    """Turn the failure of another rank into a `SaveFailed`, so that every rank raises an error of a save.

    Examples:
        >>> with failures_elsewhere():
        ...     raise RankFailed("rank 1", expected="every rank to succeed", found="no space", fix="make room")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.SaveFailedElsewhere: rank 1: expected every rank to succeed, found no space; make room
    """
    try:
        yield
    except RankFailed as error:
        failed = SaveFailedElsewhere(error.where, expected=error.expected, found=error.found, fix=error.fix)
        failed.rank, failed.step, failed.has_reported = error.rank, error.step, error.has_reported
        raise failed from error


def no_space(where: str, *, needed_bytes: int, free_bytes: int) -> NoSpace:
    """The error for a save that does not fit on the disk."""
    return NoSpace(
        where,
        expected=f"{needed_bytes} bytes free",
        found=f"{free_bytes}",
        fix=f"{_MORE_ROOM}; nothing was written",
    )


def not_a_directory(path: str) -> CheckpointForeign:
    """The error for a run's path if it, or a part of it, exists and is not a directory."""
    return CheckpointForeign(
        path,
        expected="a directory",
        found="a file, or a link that leads nowhere",
        fix="give the path of a run, or of a place where one can be created",
    )


def missing(where: str) -> CheckpointMissing:
    """The error for reading a file that is not there."""
    return CheckpointMissing(where, expected="a file", found="none", fix="list the run to see which steps are complete")


def torn(where: str, *, expected_bytes: int, found_bytes: int) -> CheckpointTorn:
    """The error for reading past the end of a file."""
    return CheckpointTorn(
        where,
        expected=f"at least {expected_bytes} bytes",
        found=f"{found_bytes}",
        fix="this checkpoint was cut off: load an earlier one",
    )


def wrong_size(where: str, *, planned_bytes: int, given: str) -> SaveFailed:
    """The error for a write whose parts do not add up to the announced number of bytes."""
    return SaveFailed(
        where,
        expected=f"parts of {planned_bytes} bytes in all",
        found=given,
        fix="pass the size of all parts together as size_bytes",
    )
