"""`ContinuedWrites`: large files of a run, each of which is written on where a killed process stopped. `WholeWrites`: those of a store that cannot write on."""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import BinaryIO, Final, final

import attrs
import xxhash

from trainfold.backends.formats.staged_record import NOTE_BYTES, digest_of_first
from trainfold.backends.stores.names import split_name
from trainfold.backends.stores.os_errors import named_failures, wrong_size
from trainfold.backends.stores.protocol import Buffer, Store
from trainfold.backends.stores.staged_files import make_directories, open_directory, path_of
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.strict_json import strict_json

_RECORD_BYTES: Final = 1 << 20
_READ_BYTES: Final = 4 << 20
_OPEN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@final
@attrs.frozen
class Kept:
    """The first bytes of a file that an earlier process has written, as they were noted.

    Attributes:
        size_bytes: how many; 0 for none.
        read: returns the bytes from a start to a stop.
    """

    size_bytes: int
    read: Callable[[int, int], bytearray]


_NOTHING_KEPT: Final = Kept(0, lambda start, stop: bytearray())  # noqa: ARG005


@final
class ContinuedWrites:
    """The files of a block, which have their names after `finish`. What a killed process has written of them stays, and is not written again.

    While a file grows it is ``.NAME.partial`` in its directory, beside ``.NAME.record``. Only a writer with the same plan goes on with it, and only after
    the bytes that were noted have been read and have the noted digest. An error keeps them too: the next process continues.

    Args:
        root: the run's directory. The caller holds its lock.
        plan: what is written, as a text such as a digest.
    """

    def __init__(self, root: str, plan: str) -> None:
        self._url = root
        self._plan = plan
        self._finish: list[Callable[[], None]] = []
        self._known: dict[str, Kept] = {}
        self._opened = ExitStack()

    @property
    def url(self) -> str:
        """The run."""
        return self._url

    def __enter__(self) -> "ContinuedWrites":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the files; what is not finished keeps its other name."""
        self._opened.close()

    def kept(self, name: str) -> Kept:
        """What is there of a file.

        Args:
            name: of the file, with its directory.
        """
        if name not in self._known:
            self._known[name] = self._read_kept(name)
        return self._known[name]

    def _read_kept(self, name: str) -> Kept:
        directory, last = split_name(name)
        with named_failures(f"{self._url}/{name}"), suppress(FileNotFoundError):
            parent = self._opened.enter_context(open_directory(self._url, directory))
            noted, digest = _last_note(parent, last, self._plan)
            if noted:
                if not _exists(_partial(last), parent):  # the process was killed between a rename and the commit
                    os.rename(last, _partial(last), src_dir_fd=parent, dst_dir_fd=parent)
                fd = os.open(_partial(last), os.O_RDONLY | _OPEN, dir_fd=parent)
                self._opened.callback(os.close, fd)
                if _is_plain(fd) and os.fstat(fd).st_size >= noted and digest_of_first(fd, noted)[0] == digest:
                    return Kept(noted, lambda start, stop: _read(fd, start, stop))
        return _NOTHING_KEPT

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """Write a file, from where `kept` says that it ends.

        Args:
            name: of the file, with its directory.
            parts: all of its bytes, also those that are kept, which are not written again.
            size_bytes: how many they are in all.

        Raises:
            SaveFailed: or its matching subclass, as from `Store.write`; what was noted stays.
        """
        directory, last = split_name(name)
        kept = self.kept(name).size_bytes
        with named_failures(f"{self._url}/{name}"):
            make_directories(self._url, directory)
            parent = self._opened.enter_context(open_directory(self._url, directory))
            fd = os.open(_partial(last), os.O_RDWR | os.O_CREAT | _OPEN, 0o666, dir_fd=parent)
            file: BinaryIO = self._opened.enter_context(os.fdopen(fd, "r+b", buffering=1 << 20))
            if not _is_plain(fd):
                raise _planted(f"{path_of(self._url, directory)}/{_partial(last)}")
            os.ftruncate(fd, kept)
            with _notes(parent, last, self._plan, is_new=not kept) as note:
                given = _append(file, parts, kept=kept, size_bytes=size_bytes, note=note)
            if given != size_bytes:
                raise wrong_size(f"{self._url}/{name}", planned_bytes=size_bytes, given=f"{given} bytes")

        def finish() -> None:
            with named_failures(f"{self._url}/{name}"):
                os.rename(_partial(last), last, src_dir_fd=parent, dst_dir_fd=parent)

        self._finish.append(finish)

    def finish(self) -> None:
        """Give all files their names. Their bytes are durable already, and their names are with the next commit in the directory."""
        for finish in self._finish:
            finish()

    def forget(self, names: Iterable[str]) -> None:
        """Remove the records of files, after they were committed."""
        for name in names:
            directory, last = split_name(name)
            with suppress(OSError), open_directory(self._url, directory) as parent:
                os.unlink(_record(last), dir_fd=parent)


@final
class WholeWrites:
    """The same for a store that has no half-written files: each is written from its beginning, and is there when `write` returns.

    Args:
        store: the run. The caller holds its lock.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The run."""
        return self._store.url

    def __enter__(self) -> "WholeWrites":
        return self

    def __exit__(self, *_: object) -> None:
        """What was written stays, under names that only a manifest makes a checkpoint."""

    def kept(self, name: str) -> Kept:  # noqa: ARG002
        """Nothing."""
        return _NOTHING_KEPT

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""
        self._store.write(name, parts, size_bytes=size_bytes)

    def finish(self) -> None:
        """Nothing is left to do."""

    def forget(self, names: Iterable[str]) -> None:
        """Nothing was noted."""


def _append(
    file: BinaryIO, parts: Iterable[Buffer], *, kept: int, size_bytes: int, note: Callable[[int, str], None]
) -> int:
    """Write what is not kept, and note it from time to time; return how many bytes the parts had."""
    whole, position, noted = xxhash.xxh3_128(), 0, kept
    file.seek(kept)
    for part in parts:
        view = memoryview(part).cast("B")
        if position + len(view) > size_bytes:
            return position + len(view)
        whole.update(view)
        file.write(view[max(0, kept - position) :])
        position += len(view)
        if position - noted >= NOTE_BYTES:
            _sync(file)
            note(position, whole.hexdigest())
            noted = position
    if position == size_bytes:
        _sync(file)
        note(position, whole.hexdigest())
    return position


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _notes(parent: int, last: str, plan: str, *, is_new: bool) -> Iterator[Callable[[int, str], None]]:
    """Gives a function that notes how many bytes of a file are durable, and their digest."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _OPEN | (os.O_TRUNC if is_new else 0)
    fd = os.open(_record(last), flags, 0o666, dir_fd=parent)

    def add(entry: dict[str, object]) -> None:
        os.write(fd, f"{json.dumps(entry)}\n".encode())
        os.fsync(fd)

    try:
        if is_new:
            add({"plan": plan})
            os.fsync(parent)
        yield lambda until, digest: add({"until": until, "digest": DIGEST_PREFIX + digest})
    finally:
        os.close(fd)


def _last_note(parent: int, last: str, plan: str) -> tuple[int, str]:
    """How many bytes are noted, and their digest; 0 for another plan, and for a record that is not one."""
    fd = os.open(_record(last), os.O_RDONLY | _OPEN, dir_fd=parent)
    try:
        size = os.fstat(fd).st_size
        lines = os.pread(fd, size, 0).split(b"\n")[:-1] if _is_plain(fd) and size <= _RECORD_BYTES else []
    finally:
        os.close(fd)
    found = 0, ""
    with suppress(CheckpointHostile, KeyError, TypeError, ValueError):
        if lines and strict_json(lines[0], last)["plan"] == plan:
            for line in lines[1:]:
                entry = strict_json(line, last)
                found = int(entry["until"]), str(entry["digest"])
    return found


def _read(fd: int, start: int, stop: int) -> bytearray:
    """Bytes of a file that are there. One call of the system reads at most 2 GB."""
    found = bytearray(stop - start)
    view, done = memoryview(found), 0
    while done < len(found) and (size := os.preadv(fd, [view[done : done + _READ_BYTES]], start + done)):
        done += size
    return found


def _is_plain(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _partial(last: str) -> str:
    return f".{last}.partial"


def _record(last: str) -> str:
    return f".{last}.record"


def _planted(where: str) -> CheckpointHostile:
    return CheckpointHostile(
        where, expected="a file of this user", found="something else", fix="find out what put it there, and remove it"
    )
