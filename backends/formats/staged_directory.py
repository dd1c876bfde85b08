"""`staged_directory`: writes the files of a directory beside it, keeps those that a killed writer has finished, and commits all of them with one rename."""

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import xxhash

from trainfold.backends.formats.file_sections import CutParts
from trainfold.backends.formats.staged_record import (
    NOTE_BYTES,
    Durable,
    StagedRecord,
    checked_file_name,
    digest_of_first,
    own_file,
    read_record,
    remove_record,
)
from trainfold.backends.stores import run_lock
from trainfold.backends.stores.direct_io import write_stream
from trainfold.backends.stores.os_errors import save_failure, wrong_size
from trainfold.backends.stores.place import free_path
from trainfold.backends.stores.protocol import Buffer
from trainfold.backends.stores.staged_files import check_path, make_directories, sync_above
from trainfold.core.checks import count
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointHostile, InvalidArgument, NoSpace, RunLocked, RunReplaced
from trainfold.core.json_values import shown

PartsFrom: TypeAlias = Callable[[int], Iterable[Buffer]]
"""Gives the bytes of a file from an offset on."""

_FILES: Final = "files"  # what becomes the directory
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@final
class StagedDirectory:
    """The files of a directory that does not exist yet; `staged_directory` makes it.

    Attributes:
        is_committed: whether the directory is there, whole: `commit` has returned, here or in an earlier process with the same plan.
    """

    def __init__(self, path: str, above: int, staging: int) -> None:
        self.is_committed = False
        self._path = path
        self._above = above
        self._staging = staging
        self._known: dict[str, Durable] = {}
        self._checked: set[str] = set()
        self._opened = ExitStack()
        self._files = -1
        self._record: StagedRecord | None = None

    def has(self, name: str, *, size_bytes: int) -> bool:
        """Whether a file is finished: here, or by an earlier process, and then it is read and checked.

        Args:
            name: of the file.
            size_bytes: what the plan gives it. A file of another size is not kept.
        """
        known = self._known.get(checked_file_name(name))
        if known is None or not known.is_whole or known.size_bytes != size_bytes:
            return False
        if name not in self._checked and not _is_as_recorded(self._files, name, known):
            return False
        self._checked.add(name)
        return True

    def write(self, name: str, parts: Iterable[Buffer] | PartsFrom, *, size_bytes: int) -> bool:
        """Write a file, make it durable, and record it. One that is finished is kept, and nothing of its parts is asked for.

        Args:
            name: of the file, without a directory.
            parts: its bytes in order; a part is copied or written before the next one is asked for. A function is called with an offset, and gives the bytes from there on:
                then a large file of a killed writer is gone on with, and at most `NOTE_BYTES` of it are written again.
            size_bytes: how many they are in all.

        Returns:
            Whether it was written.

        Raises:
            SaveFailed: if it cannot be written; `NoSpace` on a full disk.
        """
        if self.has(name, size_bytes=size_bytes):
            return False
        where = f"{self._path}/{name}"
        with _failures(where):
            fd, start, whole = self._begun(name, size_bytes) if callable(parts) else self._new(name)
            try:
                rest = CutParts(parts(start) if callable(parts) else parts, whole)
                given = self._append(fd, name, rest, start=start, size_bytes=size_bytes)
                if given != size_bytes or rest.has_more():
                    raise wrong_size(
                        where, planned_bytes=size_bytes, given=f"{given} bytes" if given < size_bytes else "more"
                    )
            finally:
                os.close(fd)
            self._checked.add(name)
        return True

    def _append(self, fd: int, name: str, parts: CutParts, *, start: int, size_bytes: int) -> int:
        """Write up to the size, and note what is durable each time that `NOTE_BYTES` are; return where the file ends."""
        assert self._record is not None
        while True:
            due = min(size_bytes, start + NOTE_BYTES - start % NOTE_BYTES) - start
            given = write_stream(fd, parts.upto(due), size_bytes=due, start=start)
            start += given
            if given < due or (start == size_bytes and parts.has_more()):
                return start
            os.fsync(fd)
            self._known[name] = durable = Durable(start, DIGEST_PREFIX + parts.whole.hexdigest(), start == size_bytes)
            self._record.note(name, durable)
            if start == size_bytes:
                return start

    def _begun(self, name: str, size_bytes: int) -> tuple[int, int, Any]:
        """A file that an earlier process has begun, up to where its bytes are as they were noted; or a new one."""
        known = self._known.get(name)
        fd = None if known is None else own_file(self._files, name, mode=os.O_RDWR)
        if known is not None and fd is not None:
            digest, whole = digest_of_first(fd, known.size_bytes)
            if digest == known.digest and os.fstat(fd).st_size == known.size_bytes <= size_bytes:
                return fd, known.size_bytes, whole
            os.close(fd)
        return self._new(name)

    def _new(self, name: str) -> tuple[int, int, Any]:
        self._known.pop(name, None)
        _remove(name, self._files)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=self._files), 0, xxhash.xxh3_128()

    def path_of(self, name: str) -> str:
        """Where a file is until the commit."""
        return f"{os.path.dirname(self._path)}/{_staging_name(self._path)}/{_FILES}/{checked_file_name(name)}"  # noqa: PTH120

    def commit(self) -> None:
        """Give the directory its name. It is durable when this returns.

        Raises:
            InvalidArgument: if something is at its path by now.
            CheckpointHostile: if there are other files than those that were written.
            SaveFailed: if it cannot be renamed or synced.
        """
        if self.is_committed:
            return
        with _failures(self._path):
            there = set(os.listdir(self._files))  # noqa: PTH208  # a descriptor
            if there != self._checked:
                raise CheckpointHostile(
                    f"{self._path}: files staged for it", expected=f"the {len(self._checked)} files that were written",
                    found=f"others: {sorted(there ^ self._checked)[:4]}",
                    fix="find out which program writes there, and run this again")  # fmt: skip
            os.fsync(self._files)
            os.fsync(self._staging)
            name = os.path.basename(self._path)  # noqa: PTH119
            try:
                os.rename(_FILES, name, src_dir_fd=self._staging, dst_dir_fd=self._above)
            except OSError as error:
                if _what_is_at(self._path):
                    raise _in_the_way(self._path) from error
                raise
            sync_above(self._path)
        self.is_committed = True

    def begin(self, plan: str, *, size_bytes: int) -> None:
        """Take over what an earlier process with this plan has finished, or start over. The caller has the lock."""
        planned, known = read_record(self._staging)
        has_files = _is_directory(_FILES, self._staging)
        if _what_is_at(self._path):
            # a writer that was killed after its rename leaves its record alone
            self.is_committed = not has_files and planned == plan and _has_exactly(self._path, known)
            if not self.is_committed:
                raise _in_the_way(self._path)
            return
        with _failures(self._path):
            is_kept = has_files and planned == plan
            if not is_kept:
                known = {}
                remove_record(self._staging)
                _remove(_FILES, self._staging)
            else:
                self._open_files()
                known = {name: each for name, each in known.items() if each.is_whole or self._is_cut(name, each)}
                for name in set(os.listdir(self._files)) - known.keys():  # noqa: PTH208
                    _remove(name, self._files)
            disk = os.fstatvfs(self._staging)
            free = disk.f_bavail * disk.f_frsize
            needed = size_bytes - sum(each.size_bytes for each in known.values())
            if needed > free:
                raise NoSpace(self._path, expected=f"{needed} bytes free", found=free,
                              fix="make room there, or choose another disk; nothing was written")  # fmt: skip
            if not is_kept:
                os.mkdir(_FILES, dir_fd=self._staging)
                os.fsync(self._staging)  # from here on a record without files is that of a commit
                self._open_files()
            self._known = known
            self._record = StagedRecord(self._staging, plan, known)
            self._opened.callback(self._record.close)

    def close(self) -> None:
        """Close what is open, and remove what is left of a directory that is committed. The caller has the lock."""
        self._opened.close()
        if self.is_committed or not _is_directory(_FILES, self._staging):
            with suppress(OSError):
                with suppress(FileNotFoundError):
                    os.unlink(run_lock.LOCK_NAME, dir_fd=self._staging)
                remove_record(self._staging)
                os.rmdir(_staging_name(self._path), dir_fd=self._above)

    def _open_files(self) -> None:
        self._files = os.open(_FILES, _DIRECTORY, dir_fd=self._staging)
        self._opened.callback(os.close, self._files)

    def _is_cut(self, name: str, known: Durable) -> bool:
        """Whether a file that was begun is there, and now ends where it is durable."""
        fd = own_file(self._files, name, mode=os.O_RDWR)
        if fd is None:
            return False
        try:
            is_there = os.fstat(fd).st_size >= known.size_bytes
            if is_there:
                os.ftruncate(fd, known.size_bytes)
            return is_there
        finally:
            os.close(fd)


@contextmanager
def staged_directory(path: str | Path, *, plan: str, size_bytes: int = 0) -> Iterator[StagedDirectory]:
    """Write a directory that is absent until it is whole. What a killed writer has finished is kept for the next one with the same plan.

    Law: whenever the process or the machine dies, the directory is as it was before, or whole; and the same calls, made again, finish it or find it there.

    Args:
        path: the directory, or its ``file://`` URL. It does not exist yet, or is empty. Links on the way are followed. Files are staged beside it, in ``.NAME.partial``.
        plan: what is written, as a text such as a digest: what another plan has finished is removed.
        size_bytes: how much is written in all, to see at once whether it fits.

    Raises:
        InvalidArgument: if there is something at the path, other than what the same plan has committed; for a path in a checkpoint of a run, and for another URL.
        RunLocked: if another process writes there.
        NoSpace: if the disk has no room for it.
        CheckpointHostile: if what is staged there is not this user's.
        SaveFailed: if nothing can be written there.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as top:
        ...     with staged_directory(f"{top}/model", plan="1") as staged:
        ...         _ = staged.write("a", [b"12", b"3"], size_bytes=3)
        ...         is_there = Path(top, "model").exists()
        ...         staged.commit()
        ...     is_there, Path(top, "model/a").read_text(), os.listdir(top)
        (False, '123', ['model'])
    """
    count("staged_directory.size_bytes", size_bytes, least=0, fix="pass the size of all files together")
    real = check_vacant(path)
    above_path, name = os.path.split(real)
    with ExitStack() as held:
        with _failures(real):
            make_directories(above_path, "")
            above = os.open(above_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, above)
            staging = _locked(above, above_path, name, held)
        staged = StagedDirectory(real, above, staging)
        held.callback(staged.close)
        staged.begin(plan, size_bytes=size_bytes)
        yield staged


def check_vacant(path: str | Path) -> str:
    """Raise if something is in the way of a directory; a writer that was killed may have staged files for it.

    Args:
        path: as for `staged_directory`.

    Returns:
        The path behind all links.

    Raises:
        InvalidArgument: if there is something at the path; and for another URL.
        SaveFailed: if no such path can be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument("path", expected="a directory", found=shown(path), fix="name the directory that is to be written")  # fmt: skip
    given = os.fspath(path)
    check_path(given)
    given = free_path(given)
    real = os.path.realpath(given)
    with _failures(real):
        if real == "/" or (_what_is_at(real) and not os.path.lexists(f"{os.path.dirname(real)}/{_staging_name(real)}")):  # noqa: PTH120
            raise _in_the_way(real)
    return real


def _locked(above: int, above_path: str, name: str, held: ExitStack) -> int:
    """Make and lock the directory of staged files, and open it."""
    path = f"{above_path}/{_staging_name(name)}"
    while True:
        with suppress(FileExistsError):
            os.mkdir(_staging_name(name), 0o700, dir_fd=above)
        try:
            staging = os.open(_staging_name(name), _DIRECTORY, dir_fd=above)
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


def _staging_name(path: str) -> str:
    return f".{os.path.basename(path)}.partial"  # noqa: PTH119


def _what_is_at(path: str) -> str:
    """What is in the way of a directory; an empty text for nothing, and for an empty directory."""
    try:
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        return "a link that leads nowhere" if os.path.lexists(path) else ""
    except NotADirectoryError:
        return "a file"
    return "" if first is None else f"a directory with {first.name} in it"


def _in_the_way(path: str) -> InvalidArgument:
    return InvalidArgument(path, expected="a directory that does not exist yet, or is empty", found=_what_is_at(path) or "something else",
                           fix="choose another path, or remove what is there; nothing is overwritten")  # fmt: skip


def _planted(path: str, found: str) -> CheckpointHostile:
    return CheckpointHostile(path, expected="a directory of this user, for the files that are staged", found=found,
                             fix="find out what put it there, and remove it")  # fmt: skip


def _is_as_recorded(directory: int, name: str, known: Durable) -> bool:
    """Whether a file has the bytes that were recorded, and no others; a link, a special file, and one with another name have not."""
    fd = own_file(directory, name)
    if fd is None:
        return False
    try:
        return os.fstat(fd).st_size == known.size_bytes and digest_of_first(fd, known.size_bytes)[0] == known.digest
    finally:
        os.close(fd)


def _has_exactly(path: str, finished: dict[str, Durable]) -> bool:
    """Whether a directory has these files, and nothing else."""
    try:
        fd = os.open(path, _DIRECTORY)
    except OSError:
        return False
    try:
        names = set(os.listdir(fd))  # noqa: PTH208
        return names == finished.keys() and all(_is_as_recorded(fd, name, each) for name, each in finished.items())
    finally:
        os.close(fd)


def _is_directory(name: str, directory: int) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    return False


def _remove(name: str, directory: int) -> None:
    """Remove a file, a link, or a directory with all that is in it, through no link."""
    if _is_directory(name, directory):
        shutil.rmtree(name, dir_fd=directory)
    else:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


@contextmanager
def _failures(where: str) -> Iterator[None]:
    """Name the errors of the machine, and say what they mean for a directory that is staged."""
    try:
        yield
    except OSError as error:
        named = save_failure(error, where)
        raise type(named)(where, expected=named.expected, found=error,
                          fix="make room or look at the device there, or choose another disk; run this again, and it goes on with what is missing",
                          ) from error  # fmt: skip
