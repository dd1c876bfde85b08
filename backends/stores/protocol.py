"""`Store`: the few verbs over names that a store of checkpoints must have. `contracts.check_store` tests an implementation.

A `Place` is memory into which a store wants the next bytes; it is not the location of a run, which is `Store.url`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from trainfold.core.errors import CheckpointMissing, InvalidArgument
from trainfold.core.layout.file_preference import NO_PREFERENCE, FilePreference

if TYPE_CHECKING:
    from trainfold.core.save.events import Event
    from trainfold.core.save.retention import Retention

__all__ = [
    "Buffer",
    "GivesGlimpses",
    "HasFarTier",
    "KeepsTime",
    "LosesWriters",
    "NamesWriters",
    "Place",
    "Placeable",
    "PrefersFiles",
    "ReadsAhead",
    "SharedByRanks",
    "Store",
    "SwapsFiles",
    "SyncsLater",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

Place: TypeAlias = Callable[[int], memoryview]
"""Memory to write into: called with a size, it returns room for at most that many bytes, and waits until there is some."""


@runtime_checkable
class Placeable(Protocol):
    """Parts of a file. A `Store` iterates over them, or has them written into memory of its choice, which saves a copy."""

    def __iter__(self) -> Iterator[Buffer]:
        """The parts."""

    def placed(self, place: Place) -> Iterator[Buffer]:
        """The same parts; a part that is not in memory yet is made in the memory returned by ``place``."""


@runtime_checkable
class SharedByRanks(Protocol):
    """A `Store` that may be slower than the ranks' own network. This property is optional."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks that need the same bytes read them once, and send them to each other (ADR-0037)."""


class PrefersFiles(Protocol):
    """A `Store` that prefers fewer and larger files than a save makes of itself. This property is optional; that of rank 0's store counts."""

    @property
    def prefers(self) -> FilePreference:
        """The files that it prefers (ADR-0048)."""


def preference_of(store: object) -> FilePreference:
    """The files that a store prefers; those of a save itself for one that does not say.

    Raises:
        InvalidArgument: if it says it with something else.

    Examples:
        >>> preference_of(None)
        FilePreference(one_a_rank_from=1024, object_bytes=0)
    """
    found = getattr(store, "prefers", NO_PREFERENCE)  # also of an object that forwards to a store
    if not isinstance(found, FilePreference):
        raise InvalidArgument(
            "store.prefers",
            expected="a trainfold.stores.FilePreference",
            found=repr(found),
            fix="return one, or leave the property out",
        )
    return found


class LosesWriters(Protocol):
    """A `Store` whose lock can be lost by a writer that lives and may still write. This property is optional."""

    @property
    def least_revision(self) -> int:
        """The revision that files of a new checkpoint have at least, so that no file of a writer that has lost the lock has the name of one (ADR-0055)."""


def least_revision_of(store: object) -> int:
    """The revision that new files must have at least in a store; 0 for one whose lock is never lost.

    Examples:
        >>> least_revision_of(None)
        0
    """
    return int(getattr(store, "least_revision", 0))


class SwapsFiles(Protocol):
    """A `Store` into which processes write that hold no lock, as each rank writes a log. These methods are optional; a store has both."""

    def read_version(self, name: str) -> tuple[bytes, object] | None:
        """The bytes of a small file, and what distinguishes this version of it from others; None if there is none."""

    def swap(self, name: str, data: bytes, version: object | None) -> object | None:
        """Write a small file if it has this version, or if there is none, for None.

        Returns:
            The new version; None if the file has another version, and nothing was written.
        """


def read_version(store: "Store", name: str) -> tuple[bytes, object] | None:
    """The bytes of a small file with its version; None if there is none."""
    if (read := getattr(store, "read_version", None)) is not None:  # also of an object that forwards to a store
        found: tuple[bytes, object] | None = read(name)
        return found
    try:
        return store.read(name), ""
    except CheckpointMissing:
        return None


def swap(store: "Store", name: str, data: bytes, version: object | None) -> object | None:
    """Write a small file if it has this version; in a store that cannot compare, in any case. Returns the new version, or None.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> swap(store, "a.log", b"1", None) is None, read_version(store, "a.log")
        (False, (b'1', ''))
    """
    if (swaps := getattr(store, "swap", None)) is not None:
        made: object | None = swaps(name, data, version)
        return made
    store.write(name, [data], size_bytes=len(data))
    return ""


@runtime_checkable
class GivesGlimpses(Protocol):
    """A `Store` in which a list of everything is one request, and a look at a file another one. This method is optional."""

    def glimpse(self, directory: str = "") -> "Store":
        """The run, which answers which files there are, with their sizes and times, from one list of what is below a directory; "" for all of it."""


def glimpse(store: "Store", directory: str = "") -> "Store":
    """A store for one operation that looks at many files; the store itself where that makes no difference.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> glimpse(store) is store
        True
    """
    return store.glimpse(directory) if isinstance(store, GivesGlimpses) else store


@runtime_checkable
class ReadsAhead(Protocol):
    """A `Store` in which a request takes longer than many bytes. This method is optional."""

    def reading(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Callable[[memoryview, int], None]]:
        """Gives a function ``(buffer, start)`` that does what `Store.read_into` does, for ranges of a file that will be read.

        Args:
            name: the file.
            spans: the ranges, as (first byte, one past the last). They are best read in the order of their bytes.
        """


@runtime_checkable
class LeavesUploads(Protocol):
    """A `Store` in which a killed writer leaves uploads that no list of files shows. This method is optional."""

    def abort_uploads(self) -> int:
        """Abort them; returns how many. The caller holds the lock, and no save is under way. What cannot be aborted is logged as a warning."""


@runtime_checkable
class HasFarTier(Protocol):
    """A `Store` whose checkpoints are sent to another place, in the background. These methods are optional."""

    def report_to(self, listener: "Callable[[Iterable[Event]], object]") -> None:
        """Give what happens from here on, and what has happened, to a function that any thread may call."""

    def wait(self) -> None:
        """Return when everything is sent.

        Raises:
            SaveFailed: if something cannot be sent, with its name.
        """

    @property
    def far_tier(self) -> "tuple[str, Retention]":
        """Where the other place is, as `settled_place` has it, and what stays there."""

    def refetch(self, name: str, *, or_older: bool = False) -> str | None:
        """Fetch again what is damaged or lost of a checkpoint. The caller holds the lock.

        Args:
            name: the checkpoint.
            or_older: whether the newest before it is fetched where it cannot be had, unless the newest whole one before it is here.

        Returns:
            The checkpoint that was fetched, all of which is there now; None if nothing was.
        """


class NamesWriters(Protocol):
    """A `Store` that can say who may be writing, without taking its lock. This method is optional."""

    def writers(self, directories: Sequence[str]) -> dict[str, str]:
        """Of some directories, those into which a process may be writing now, each with that process in words.

        Args:
            directories: of saves without a manifest.
        """


def writers_in(store: "Store", directories: Sequence[str]) -> dict[str, str]:
    """Of some directories of a store, those into which a process may be writing now, with that process; none of a store that does not say.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> writers_in(MemoryStore(), ["step-00000002"])
        {}
    """
    says = getattr(store, "writers", None) if directories else None  # also of an object that forwards to a store
    found: dict[str, str] = {} if says is None else says(directories)
    return found


class SyncsLater(Protocol):
    """A `Store` that can make several files durable together, which takes a disk less time. This method is optional; the class must have it."""

    def written_unsynced(
        self, name: str, parts: Iterable[Buffer], *, size_bytes: int
    ) -> AbstractContextManager[Callable[[], None]]:
        """Write the bytes of a file as `Store.write` does.

        The context gives a function that makes the file durable under its name. If it was not called, nothing of the file is left
        when the context ends.
        """


@runtime_checkable
class KeepsTime(Protocol):
    """A `Store` that can replace a committed name by something as old. This method is optional."""

    def commit_as_old(self, name: str, data: bytes, *, replaces: str) -> None:
        """Commit as `Store.commit` does, and in the same step let `Store.committed_at` answer as it did before."""


@runtime_checkable
class Store(Protocol):
    """Where the bytes of one run are: a directory, a prefix in an object store, a dict.

    Names are relative: ``file`` or ``directory/file``, each component one or more of ``A-Z a-z 0-9 . _ -`` and not
    starting with a dot. Any other name, and a link or special file anywhere on the way, raises `CheckpointHostile`.
    No caller creates or removes directories: a directory exists while a name below it does.

    Every method may be called from several threads at once; writers of different names do not disturb each other.
    Only `commit` decides between two writers of one name. A method that raises has changed nothing.

    Over an object store, `write` is a (multipart) put, `commit` is a put with ``If-None-Match: *`` or
    ``If-Match: <etag>``, and a lease object serves as the lock.
    """

    @property
    def url(self) -> str:
        """The location of the run in messages, such as a path or ``s3://bucket/run``."""

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """Write a file whose contents are durable on return; its directory entry is durable after the next `commit` in it.

        A file of that name is replaced at the end of the write, and not at all if the write fails. No reader may
        rely on a written file: only a commit makes it part of a checkpoint.

        Args:
            name: the file.
            parts: its bytes in order; each part is used before the next one is asked for, so one buffer can serve. They may
                be `Placeable`.
            size_bytes: how many bytes the parts have in all.

        Raises:
            NoSpace: if the place is full; nothing of this write is left.
            NotWritable: if this process may not write there.
            SaveFailed: if the device failed, or the parts have another size; nothing of this write is left.
        """

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)``, like a slice: fewer if the file ends before ``stop``.

        Raises:
            CheckpointMissing: if there is no such file.
        """

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            CheckpointMissing: if there is no such file.
            CheckpointTorn: if the file ends before the buffer is full.
        """

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if there is no such file, or ``name`` is a directory."""

    def committed_at(self, name: str) -> float | None:
        """When a committed name got its contents, in seconds since 1970; None if there is no such name, or the store does not know.

        A commit of the same contents again does not change the time.

        A hint for rules such as "keep what is newer than a day", never proof that a checkpoint is valid: clocks are set, and a copy
        of the run may have the time of its copying.
        """

    def list(self, prefix: str = "") -> list[str]:
        """The names one level below ``prefix`` (a directory, or "" for the top), sorted, without the prefix.

        Temporary files, locks and the hints that `point` makes are left out. An absent directory has no names.
        """

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """Make ``name`` appear with ``data`` in one atomic step, durably; put-if-absent, or compare-and-swap.

        Before the name becomes visible, everything written in the same directory and the directory itself are
        durable. When this returns, the name is durable too.

        Args:
            name: the commit record, such as ``step-00000120/manifest.json``.
            data: its contents.
            replaces: None if the name must be absent. Else the digest (`trainfold.core.digest.digest_of`) of the contents that must be
                there now; they are replaced, and a crash at any point leaves either the old or the new contents.

        Raises:
            CommitConflict: if the name is there (or, with ``replaces``, has other contents); nothing changed.
            RunLocked: with ``replaces``, if another writer holds the lock.
            NoSpace, NotWritable, SaveFailed: as for `write`.
        """

    def delete(self, name: str) -> None:
        """Remove a file, a hint, or ``directory/`` with all that is below, durably. An absent name is fine, and stays absent after a crash.

        Of the files in a directory, ``manifest.json`` goes first and durably, so that no crash leaves a committed half. If a store
        has directories inside a checkpoint's, such as a user's exports, they go before it: if one cannot be removed, the checkpoint
        is still complete.
        """

    def point(self, name: str, target: str) -> None:
        """Replace the hint ``name``, such as ``latest``, by one to ``target``: best effort, for people; nothing depends on it."""

    def pointers(self) -> dict[str, str]:
        """The hints in this store, from any program: name -> target. Retention keeps their targets."""

    def lock(self) -> AbstractContextManager[None]:
        """Hold the right to commit into this run, until the ``with`` block or the process ends.

        Entering removes what dead writers left behind.

        Raises:
            RunLocked: at once, naming the holder, if another writer has it; another store object of this process is one too.
        """

    def reserve(self, size_bytes: int) -> None:
        """Check, before anything is written, that so many bytes fit. Changes nothing.

        A place without a limit, such as a bucket, has the limit of all machines: it too refuses ``2**62`` bytes.

        Raises:
            NoSpace: with the bytes needed and free.
            NotWritable: if this process may not write there.
        """
