"""`LocalStore`: a store in a directory of a local filesystem. Its commit protocol survives power cuts."""

import errno
import functools
import logging
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, TypeAlias, final

from trainfold.backends.stores import run_lock
from trainfold.backends.stores.names import is_component, prefix_directory, split_name
from trainfold.backends.stores.os_errors import named_failures, named_reads, no_space, torn, wrong_size
from trainfold.backends.stores.place import free_bytes_at, is_object_url, local_path
from trainfold.backends.stores.protocol import Buffer, Store
from trainfold.backends.stores.staged_files import (
    STAGED_PREFIX,
    check_path,
    collect,
    make_directories,
    not_a_file,
    open_directory,
    open_file,
    path_of,
    staged,
    sync_above,
)
from trainfold.backends.stores.stand_in import stand_in
from trainfold.core.digest import digest_of
from trainfold.core.errors import CommitConflict, InvalidArgument
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.json_values import shown
from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference

Run: TypeAlias = "str | Path | Store"
_LOG = logging.getLogger("trainfold")
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
MARGIN_BYTES: Final = 1 << 20
"""How much more `LocalStore.reserve` wants: directories, the manifest, and what the filesystem keeps about them."""


@final
class LocalStore:
    """A run in a directory. Nothing is created until something is written.

    A file is staged under a temporary name in its directory, synced, and renamed. A commit syncs the directory and
    the run's directory, stages and syncs the record, links it to its name (which fails if the name exists) and
    syncs the directory again. A file whose fsync failed is abandoned and never synced again.

    Args:
        path: the run's directory, or its ``file://`` URL. It may be a link; nothing below it may be one.
        is_shared: whether ranks that need the same bytes read them once and send them to each other, because the store is slower than their network.
        prefers: which files a save writes there, where few and large ones cost less.

    Raises:
        InvalidArgument: for a URL of another scheme, or a path that no filesystem can have.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     store = LocalStore(directory + "/run")
        ...     store.write("step-1/a", [b"123"], size_bytes=3)
        ...     store.commit("step-1/manifest.json", b"{}")
        ...     store.list(), store.list("step-1"), store.read("step-1/a", start=1)
        (['step-1'], ['a', 'manifest.json'], b'23')
    """

    def __init__(
        self, path: str | os.PathLike[str], *, is_shared: bool = False, prefers: FilePreference = NO_PREFERENCE
    ) -> None:
        given = local_path(os.fspath(path))
        check_path(given)
        given = stand_in(given) or given
        self._url = given.rstrip("/") or "/"
        self._root = os.path.abspath(given)  # noqa: PTH100  # a later chdir must not move the run
        self._is_shared, self._prefers = is_shared, prefers
        self._mutex = threading.Lock()
        self._swapping = threading.Lock()
        self._held: run_lock.HeldLock | None = None
        self._durable: tuple[int, int] | None = None  # the directory whose own name is known to be durable
        self._shadowed: set[str] = set()  # hints whose names are taken, and logged once

    @property
    def url(self) -> str:
        """The path that the caller gave, unchanged; in a replay of that run, the path of its copy."""
        return self._url

    @property
    def is_shared(self) -> bool:
        """See `SharedByRanks`."""
        return self._is_shared

    @property
    def prefers(self) -> FilePreference:
        """See `PrefersFiles`."""
        return self._prefers

    def __repr__(self) -> str:
        return f"LocalStore({self._url!r})"

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`."""
        with named_reads(self._where(name)):
            return self._read(name, start, stop)

    def _read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open_file(self._root, *split_name(name)) as (fd, size_bytes):
            count = (size_bytes if stop is None else min(stop, size_bytes)) - start  # never more than is there
            data = os.pread(fd, max(0, count), start)
            while 0 < len(data) < count and (more := os.pread(fd, count - len(data), start + len(data))):
                data += more
        return data

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`."""
        with self.opened(name) as read_into:
            read_into(buffer, start)

    @contextmanager
    def opened(self, name: str) -> Iterator[Callable[[memoryview, int], None]]:
        """Open a file once for many reads: gives a function ``(buffer, start)`` like `read_into`."""
        where = self._where(name)
        with ExitStack() as held:
            with named_reads(where):  # not around what the caller does
                fd, size_bytes = held.enter_context(open_file(self._root, *split_name(name)))

            def read_into(buffer: memoryview, start: int) -> None:
                view, done = buffer.cast("B"), 0
                with named_reads(where):
                    while done < len(view) and (count := os.preadv(fd, [view[done:]], start + done)):
                        done += count
                if done < len(view):
                    raise torn(where, expected_bytes=start + len(view), found_bytes=min(size_bytes, start + done))

            yield read_into

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        with named_reads(self._where(name)):
            found = self._stat(name)
        return None if found is None else found.st_size

    def committed_at(self, name: str) -> float | None:
        """See `Store.committed_at`: the time of the file's last change of contents; in a directory without rights, that of the directory, before which it was committed."""
        try:
            found = self._stat(name)
        except PermissionError:
            found = os.stat(os.path.dirname(self._where(name)))  # noqa: PTH116, PTH120
        return None if found is None else found.st_mtime

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`. Links to a sibling, such as `point` makes, are hints and left out."""
        directory = prefix_directory(prefix)
        with named_reads(self._where(directory)):
            try:
                with open_directory(self._root, directory) as parent, os.scandir(parent) as entries:
                    return sorted(
                        entry.name
                        for entry in entries
                        if is_component(entry.name) and not (entry.is_symlink() and _is_hint(parent, entry.name))
                    )
            except FileNotFoundError:
                return []

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""
        with self.written_unsynced(name, parts, size_bytes=size_bytes) as finish:
            finish()

    @contextmanager
    def written_unsynced(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> Iterator[Callable[[], None]]:
        """See `SyncsLater`."""
        from trainfold.backends.stores.direct_io import write_stream  # late: it imports numpy, and a reader needs none

        directory, last = split_name(name)
        with ExitStack() as opened:
            with self._writing(name):
                make_directories(self._root, directory)
                parent = opened.enter_context(open_directory(self._root, directory))
                fd, temporary = opened.enter_context(staged(parent, last))
                given = write_stream(fd, parts, size_bytes=size_bytes)
                if given != size_bytes:
                    raise wrong_size(self._where(name), planned_bytes=size_bytes, given=f"{given} bytes or more")

            def finish() -> None:
                with self._named_errors(name):
                    os.fsync(fd)
                    os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)

            yield finish

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """See `Store.commit`."""
        self._commit(name, data, replaces=replaces, is_as_old=replaces is not None and digest_of(data) == replaces)

    def commit_as_old(self, name: str, data: bytes, *, replaces: str) -> None:
        """See `KeepsTime`."""
        self._commit(name, data, replaces=replaces, is_as_old=True)

    def _commit(self, name: str, data: bytes, *, replaces: str | None, is_as_old: bool) -> None:
        from trainfold.backends.stores.direct_io import write_stream  # late, as in `write`

        directory, last = split_name(name)
        with self._writing(name):
            make_directories(self._root, directory)
            with open_directory(self._root, directory) as parent, staged(parent, last) as (fd, temporary):
                os.fsync(parent)
                self._sync_root()
                write_stream(fd, [data], size_bytes=len(data))
                os.fsync(fd)
                if replaces is None:
                    self._link(parent, temporary, last)
                else:
                    with self._swapping, self._lock_held():
                        self._check_replaced(name, replaces)
                        if is_as_old:  # such as the same bytes again, durable once more
                            found = os.stat(last, dir_fd=parent)
                            os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
                        os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
                self._sync_committed(parent, last, undo=replaces is None)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._writing(name), suppress(FileNotFoundError):
            if not name.endswith("/"):
                directory, last = split_name(name)
                with open_directory(self._root, directory) as parent:
                    with suppress(FileNotFoundError):
                        os.unlink(last, dir_fd=parent)
                    os.fsync(parent)
                if directory:
                    with suppress(OSError):  # a directory is there while a name below it is
                        os.rmdir(path_of(self._root, directory))  # noqa: PTH106
                return
            directory = prefix_directory(name)
            with open_directory(self._root, directory) as parent:
                # sidecars first: if one cannot be removed, the checkpoint stays complete and the caller tries again
                with os.scandir(parent) as entries:
                    sidecars = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
                for below in sidecars:
                    shutil.rmtree(below, dir_fd=parent)
                with suppress(FileNotFoundError):
                    os.unlink(MANIFEST, dir_fd=parent)
                    os.fsync(parent)
                for below in os.listdir(parent):  # noqa: PTH208  # of an open directory, not of a path
                    with suppress(FileNotFoundError):
                        os.unlink(below, dir_fd=parent)
            os.rmdir(path_of(self._root, directory))  # noqa: PTH106
            self._sync_root()

    def point(self, name: str, target: str) -> None:
        """See `Store.point`: a symbolic link."""
        split_name(name), split_name(target)
        temporary = f"{STAGED_PREFIX}{os.getpid()}-{threading.get_ident()}-{name}"
        with suppress(OSError), open_directory(self._root, "") as parent:
            if self._is_shadowed(parent, name):
                return
            os.symlink(target, temporary, dir_fd=parent)
            try:
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                os.unlink(temporary, dir_fd=parent)
                raise

    def pointers(self) -> dict[str, str]:
        """See `Store.pointers`: links to a sibling."""
        try:
            with open_directory(self._root, "") as parent, os.scandir(parent) as entries:
                links = [entry.name for entry in entries if entry.is_symlink() and _is_hint(parent, entry.name)]
                return {name: os.readlink(name, dir_fd=parent) for name in sorted(links)}
        except FileNotFoundError:
            return {}

    def writers(self, directories: Sequence[str]) -> dict[str, str]:
        """See `NamesWriters`."""
        return run_lock.writers(self._root, directories)

    # --- the right to write, and room for it ---------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `Store.lock`: ``flock`` on ``.lock``."""
        # bound here: when Python ends, this module's names may be gone before a lock that was never released
        is_ending = sys.is_finalizing
        with self._named_errors(""):
            make_directories(self._root, "")
            held = run_lock.acquire(self._root)
        try:
            with self._mutex:
                self._held = held
            with suppress(OSError):
                collect(self._root)
            yield
        finally:
            try:
                if not is_ending():  # then the process releases the lock by ending
                    self._release(held)
            except BaseException:  # an interrupt: no later call could release it
                self._release(held)
                raise

    def _release(self, held: run_lock.HeldLock) -> None:
        with self._mutex:
            self._held = None
        run_lock.release(held)

    def reserve(self, size_bytes: int) -> None:
        """See `Store.reserve`: asks ``statvfs`` for the free space, and creates and removes a file."""
        with self._writing(""):
            free_bytes = free_bytes_at(self._root)
            if size_bytes + MARGIN_BYTES > free_bytes:
                raise no_space(self._root, needed_bytes=size_bytes + MARGIN_BYTES, free_bytes=free_bytes)
            make_directories(self._root, "")
            with open_directory(self._root, "") as parent, staged(parent, "probe"):
                pass

    # --- inside --------------------------------------------------------------------------------------------------

    def _is_shadowed(self, parent: int, name: str) -> bool:
        """Whether a file or directory of the user has the name of a hint. It is left alone, and logged once."""
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISLNK(found.st_mode):
            return False
        if name not in self._shadowed:
            kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
            _LOG.warning("%s is a %s, so the hint of that name is not written; a resume does not need the hint; remove the %s "
                         "to get it back", self._where(name), kind, kind)  # fmt: skip
        self._shadowed.add(name)
        return True

    def _stat(self, name: str) -> os.stat_result | None:
        """The status of a file; None if there is no such file, or a directory has the name."""
        directory, last = split_name(name)
        try:
            with open_directory(self._root, directory) as parent:
                found = os.stat(last, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(found.st_mode):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise not_a_file(self._where(name))
        return found

    def _where(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _named_errors(self, name: str) -> Iterator[None]:
        with named_failures(self._where(name)):
            yield

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Check first that this store still holds its lock, on the directory that now has the path; else touch nothing."""
        with self._named_errors(name):
            if (held := self._held) is not None:
                run_lock.check(held)
            yield

    def _sync_root(self) -> None:
        with open_directory(self._root, "") as root:
            os.fsync(root)
            self._sync_above(os.fstat(root))

    def _sync_above(self, root: os.stat_result) -> None:
        """Make the name of the run and those above it durable, once: the program that created them may not have done so."""
        if self._durable == (root.st_dev, root.st_ino):
            return
        sync_above(self._root)
        self._durable = (root.st_dev, root.st_ino)

    def _link(self, parent: int, temporary: str, last: str) -> None:
        """Give the staged record its name, unless the name is taken."""
        try:
            os.link(temporary, last, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            raise self._conflict(last, "no such name", "one") from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # a filesystem without hard links: under the locks, the check and the rename are one step
            with self._swapping, self._lock_held():
                if last in os.listdir(parent):
                    raise self._conflict(last, "no such name", "one") from None
                os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)

    def _check_replaced(self, name: str, replaces: str) -> None:
        found = digest_of(self._read(name)) if self._stat(name) is not None else "no such name"
        if found != replaces:
            raise self._conflict(name, replaces, found)

    def _conflict(self, name: str, expected: str, found: str) -> CommitConflict:
        return CommitConflict(
            self._where(name),
            expected=expected,
            found=found,
            fix="another writer was first: read what it committed, and plan again",
        )

    def _sync_committed(self, parent: int, last: str, *, undo: bool) -> None:
        try:
            os.fsync(parent)
        except OSError:
            if undo:  # the commit was not acknowledged, so it must not block a second try
                with suppress(OSError):
                    os.unlink(last, dir_fd=parent)
            raise

    def _lock_held(self) -> AbstractContextManager[None]:
        with self._mutex:
            is_ours = self._held is not None
        return nullcontext() if is_ours else self.lock()


def _is_hint(parent: int, name: str) -> bool:
    try:
        return is_component(os.readlink(name, dir_fd=parent))
    except OSError:
        return False


def local_store(run: object) -> LocalStore | None:
    """The directory that a store is, or that is the near tier of one; None for any other.

    Examples:
        >>> local_store(LocalStore("runs/a")), local_store(None)
        (LocalStore('runs/a'), None)
    """
    near = getattr(run, "near", run)
    return near if isinstance(near, LocalStore) else None


def open_store(run: Run) -> Store:
    """The store of a run: a `LocalStore` for a path, an `ObjectStore` for the URL of a bucket; a store is returned as it is.

    In a replay, whatever names the run that is replayed is the directory of its copy (`stand_in`); nothing of it goes to a far tier.

    Raises:
        InvalidArgument: if it is neither, or a path that no filesystem can have.
    """
    if isinstance(run, str | Path):
        if not is_object_url(str(run)):
            return LocalStore(run)
        if (copy := stand_in(str(run))) is not None:
            return LocalStore(copy)
        from trainfold.backends.stores.object_store.open_url import open_url  # late: few runs are in a bucket

        return open_url(str(run))
    if not isinstance(run, Store):
        raise InvalidArgument("run", expected="a path or a store", found=shown(run), fix="name the run's directory")
    tiers = [tier.url for tier in (getattr(run, "far", None), getattr(run, "near", run)) if isinstance(tier, Store)]
    found = None if isinstance(run, LocalStore) else next(filter(None, map(stand_in, tiers)), None)
    return run if found is None else _copy_in_replay(found)


@functools.cache
def _copy_in_replay(place: str) -> LocalStore:
    """One object for each place: the lock that a manager holds with the program's store counts for `save_best` with it."""
    return LocalStore(place)
