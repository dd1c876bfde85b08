"""Where a directory is staged: `check_vacant`, `check_room`, and `locked_staging`, which makes the place beside it and holds its lock."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from trainfold.backends.formats.present_directory import DIRECTORY, failures, in_the_way, is_present, what_is_at
from trainfold.backends.stores import run_lock
from trainfold.backends.stores.place import free_bytes_at, free_path
from trainfold.backends.stores.staged_files import check_path
from trainfold.core.errors import CheckpointHostile, InvalidArgument, NoSpace, RunLocked, RunReplaced
from trainfold.core.json_values import shown


def check_vacant(path: str | Path, files: Mapping[str, int]) -> str:
    """Raise if something is in the way of a directory.

    Args:
        path: as for `staged_directory`.
        files: as there.

    Returns:
        The path behind all links.

    Raises:
        InvalidArgument: if there is something at the path that has not these files; and for another URL.
        SaveFailed: if no such path can be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument("path", expected="a directory", found=shown(path), fix="name the directory that is to be written")  # fmt: skip
    given = os.fspath(path)
    check_path(given)
    given = free_path(given)
    real = os.path.realpath(given)
    with failures(real):
        if real == "/" or (what_is_at(real) and not is_present(real, files)):
            raise in_the_way(real)
    return real


def check_room(path: str, needed_bytes: int) -> int:
    """Raise if there is not enough room for what is written.

    Args:
        path: where it is written; it need not be there.
        needed_bytes: how much.

    Returns:
        How much is free.

    Raises:
        NoSpace: if that is less.
    """
    free_bytes = free_bytes_at(path)
    if needed_bytes > free_bytes:
        raise NoSpace(path, expected=f"{needed_bytes} bytes free", found=free_bytes,
                      fix="make room there, or choose another disk; nothing was written")  # fmt: skip
    return free_bytes


def staging_of(path: str) -> str:
    """Where the files of a directory are staged.

    Args:
        path: of the directory, behind all links.
    """
    return f"{os.path.dirname(path)}/{staging_name(path)}"  # noqa: PTH120


def staging_name(path: str) -> str:
    """The name of the directory of staged files.

    Args:
        path: of the directory that is to be written, or its name.
    """
    return f".{os.path.basename(path)}.partial"  # noqa: PTH119


def locked_staging(above: int, above_path: str, name: str, held: ExitStack) -> int:
    """Make and lock the directory of staged files, and open it.

    Args:
        above: the directory in which it is, opened.
        above_path: the path of that.
        name: of the directory that is to be written.
        held: what closes and releases it.

    Raises:
        RunLocked: if another process writes there.
        CheckpointHostile: if it is not this user's.
    """
    path = f"{above_path}/{staging_name(name)}"
    while True:
        with suppress(FileExistsError):
            os.mkdir(staging_name(name), 0o700, dir_fd=above)
        try:
            staging = os.open(staging_name(name), DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            continue  # another process has committed, and removed it
        except NotADirectoryError as error:
            raise _planted(path, "a link or a file") from error
        held.callback(os.close, staging)
        if os.fstat(staging).st_uid != os.geteuid():
            raise _planted(path, "one of another user")
        try:
            lock = run_lock.acquire(path)
        except RunLocked as error:
            fix = "wait for it; or stop it and run this again, which goes on where it stopped"
            raise RunLocked(path, expected="no other writer", found=error.found, fix=fix) from None
        except FileNotFoundError:
            continue
        held.callback(run_lock.release, lock)
        with suppress(RunReplaced):
            run_lock.check(lock)
            return staging


def _planted(path: str, found: str) -> CheckpointHostile:
    return CheckpointHostile(path, expected="a directory of this user, for the files that are staged", found=found,
                             fix="find out what put it there, and remove it")  # fmt: skip
