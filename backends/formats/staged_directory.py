"""`staged_directory`: writes the files of a directory beside it, keeps those that a killed writer has finished, and commits all of them with one rename."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import xxhash

from trainfold.backends.formats.file_sections import CutParts
from trainfold.backends.formats.present_directory import (
    DIRECTORY,
    PartsFrom,
    PresentDirectory,
    failures,
    in_the_way,
    what_is_at,
)
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
from trainfold.backends.formats.staging_place import check_room, check_vacant, locked_staging, staging_name, staging_of
from trainfold.backends.stores import run_lock
from trainfold.backends.stores.direct_io import write_stream
from trainfold.backends.stores.os_errors import wrong_size
from trainfold.backends.stores.protocol import Buffer
from trainfold.backends.stores.staged_files import make_directories, sync_above
from trainfold.core.checks import mapping_given
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointHostile

_FILES: Final = "files"  # what becomes the directory


@final
class StagedDirectory:
    """The files of a directory that does not exist yet; `staged_directory` makes it."""

    def __init__(self, path: str, above: int, staging: int) -> None:
        self._is_committed = False
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
        with failures(where):
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
        return f"{staging_of(self._path)}/{_FILES}/{checked_file_name(name)}"

    def commit(self) -> None:
        """Give the directory its name. It is durable when this returns.

        Raises:
            InvalidArgument: if something is at its path by now.
            CheckpointHostile: if there are other files than those that were written.
            SaveFailed: if it cannot be renamed or synced.
        """
        with failures(self._path):
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
                if what_is_at(self._path):
                    raise in_the_way(self._path) from error
                raise
            sync_above(self._path)
        self._is_committed = True

    def begin(self, plan: str, *, size_bytes: int) -> None:
        """Take over what an earlier process with this plan has finished, or start over. The caller has the lock."""
        planned, known = read_record(self._staging)
        with failures(self._path):
            is_kept = _is_directory(_FILES, self._staging) and planned == plan
            if not is_kept:
                known = {}
                remove_record(self._staging)
                _remove(_FILES, self._staging)
            else:
                self._open_files()
                known = {name: each for name, each in known.items() if each.is_whole or self._is_cut(name, each)}
                for name in set(os.listdir(self._files)) - known.keys():  # noqa: PTH208
                    _remove(name, self._files)
            check_room(self._path, size_bytes - sum(each.size_bytes for each in known.values()))
            if not is_kept:
                os.mkdir(_FILES, dir_fd=self._staging)
                os.fsync(self._staging)
                self._open_files()
            self._known = known
            self._record = StagedRecord(self._staging, plan, known)
            self._opened.callback(self._record.close)

    def close(self) -> None:
        """Close what is open, and remove what is left of a directory that is committed. The caller has the lock."""
        self._opened.close()
        if self._is_committed or not _is_directory(_FILES, self._staging):
            with suppress(OSError):
                with suppress(FileNotFoundError):
                    os.unlink(run_lock.LOCK_NAME, dir_fd=self._staging)
                remove_record(self._staging)
                os.rmdir(staging_name(self._path), dir_fd=self._above)

    def _open_files(self) -> None:
        self._files = os.open(_FILES, DIRECTORY, dir_fd=self._staging)
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
def staged_directory(
    path: str | Path, *, plan: str, files: Mapping[str, int] = MappingProxyType({})
) -> Iterator[StagedDirectory | PresentDirectory]:
    """Write a directory that is absent until it is whole. What a killed writer has finished is kept for the next one with the same plan.

    Law: whenever the process or the machine dies, the directory is as it was before, or whole; and the same calls, made again, finish it or find it there.

    Args:
        path: the directory, or its ``file://`` URL. It does not exist yet, is empty, or has the very files that are to be written: then they are compared. Links on the way are followed. Files are staged beside it, in ``.NAME.partial``.
        plan: what is written, as a text such as a digest: what another plan has finished is removed.
        files: name -> size in bytes of each file that is to be written, to see at once whether they fit, or are there.

    Raises:
        InvalidArgument: if there is something else at the path; for a path in a checkpoint of a run, and for another URL.
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
    mapping_given("staged_directory.files", files, values=int)
    real = check_vacant(path, files)
    above_path, name = os.path.split(real)
    with ExitStack() as held:
        with failures(real):
            make_directories(above_path, "")
            above = os.open(above_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, above)
            staging = locked_staging(above, above_path, name, held)
        staged = StagedDirectory(real, above, staging)
        held.callback(staged.close)
        if what_is_at(real):
            check_vacant(path, files)
            present = PresentDirectory(real)
            held.callback(present.close)
            yield present
        else:
            staged.begin(plan, size_bytes=sum(files.values()))
            yield staged


def _is_as_recorded(directory: int, name: str, known: Durable) -> bool:
    """Whether a file has the bytes that were recorded, and no others; a link, a special file, and one with another name have not."""
    fd = own_file(directory, name)
    if fd is None:
        return False
    try:
        return os.fstat(fd).st_size == known.size_bytes and digest_of_first(fd, known.size_bytes)[0] == known.digest
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
