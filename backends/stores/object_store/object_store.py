"""`ObjectStore`: a run under a prefix of an object store. A commit is one conditional put; nothing is renamed, and no lock of a filesystem is needed."""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, cast, final

from trainfold.backends.helpers import Helpers
from trainfold.backends.stores.names import is_component, prefix_directory, split_name
from trainfold.backends.stores.object_store.bucket import Bucket, Found, Version, tag_of
from trainfold.backends.stores.object_store.glimpse import HINTS, Glimpse
from trainfold.backends.stores.object_store.killed_uploads import abort_killed_uploads
from trainfold.backends.stores.object_store.pieces_ahead import AT_ONCE, PiecesAhead
from trainfold.backends.stores.object_store.recent_changes import BucketList, RecentChanges
from trainfold.backends.stores.object_store.small_reads import SmallReads
from trainfold.backends.stores.object_store.writer_lease import WriterLease
from trainfold.backends.stores.os_errors import missing, no_space, torn, wrong_size
from trainfold.backends.stores.place import url_parts
from trainfold.backends.stores.protocol import Buffer
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointError,
    CheckpointHostile,
    CheckpointUnreadable,
    CommitConflict,
    InvalidArgument,
    RunLocked,
    SaveFailed,
)
from trainfold.core.format.file_names import MANIFEST

_PROBE: Final = ".probe"
_CHUNK_BYTES: Final = 8 << 20
_PARTS_LIMIT: Final = 9_000  # S3 takes 10,000
_AT_ONCE: Final = 8  # so that 64 MiB are in memory
_LIMIT_BYTES: Final = 1 << 57
_LASTS_SECS: Final = 30.0
_MOST_LISTED: Final = 16_000  # objects, 1,000 in a request; of a larger run only what is asked for is looked at


@final
class ObjectStore:
    """A `Store` in an object store: S3, Google Cloud Storage, Azure, or what speaks like one of them.

    Args:
        store: a store of obstore with the run's prefix.
        url: the location in messages, such as ``s3://bucket/runs/a``.
        lease_secs: how long the lock of a killed writer on another machine stays.

    Examples:
        >>> from obstore.store import MemoryStore
        >>> store = ObjectStore(MemoryStore(), url="memory://run")
        >>> store.commit("step-1/manifest.json", b"{}")
        >>> store.list(), store.read("step-1/manifest.json")
        (['step-1'], b'{}')
    """

    def __init__(self, store: Any, *, url: str, lease_secs: float = _LASTS_SECS) -> None:
        self._url = url.rstrip("/")
        self._client = store
        self._bucket = Bucket(store, self._url)
        self._lease = WriterLease(self._bucket, lease_secs)
        self._changes = RecentChanges()
        self._reads = SmallReads(self._bucket)
        self._mutex = threading.Lock()
        self._is_probed = False

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    @property
    def url(self) -> str:
        """Where the run is, without credentials."""
        return self._url

    @property
    def place(self) -> tuple[str, ...]:
        """The server and the account, as far as the client knows them, and the parts of the URL: equal for two stores of one place, and the beginning for a store around another."""
        settings = getattr(self._client, "config", None)  # of obstore
        if settings is not None:
            server = " ".join(str(settings.get(name, "")) for name in ("endpoint", "account_name"))
        else:  # fsspec has one object for each set of settings; anything else may be in the memory of this process
            server = str(id(getattr(self._client, "filesystem", self._client)))
        return server, *url_parts(self._url)

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`."""
        split_name(name)
        found = self._bucket.get(name, start=start, stop=stop)
        if found is None:
            raise missing(self._bucket.where(name))
        return found.data

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`."""
        split_name(name)
        memory = buffer.cast("B")
        if not memory:
            if self._bucket.head(name) is None:
                raise missing(self._bucket.where(name))
            return
        done = self._bucket.fill(name, memory, start)
        if done < len(memory):
            raise torn(self._bucket.where(name), expected_bytes=start + len(memory), found_bytes=start + done)

    @contextmanager
    def reading(self, name: str, spans: Sequence[tuple[int, int]]) -> Iterator[Callable[[memoryview, int], None]]:
        """See `ReadsAhead`."""
        split_name(name)
        with Helpers(AT_ONCE) as helpers:
            ahead = PiecesAhead(self._bucket, name, spans, helpers)
            try:
                yield ahead.read_into
            finally:
                ahead.close()

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        split_name(name)
        found = self._bucket.head(name)
        return None if found is None else found.size_bytes

    def committed_at(self, name: str) -> float | None:
        """See `Store.committed_at`: by the clock of the store."""
        split_name(name)
        found = self._bucket.head(name)
        return None if found is None else found.modified

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        directory = prefix_directory(prefix)
        doubt = self._learn()
        objects, directories = self._bucket.names(directory)
        if doubt is not None and not (directory or objects or directories):
            raise self._no_list(doubt)
        names = {name for name in {*objects, *directories} if is_component(name)}
        for name in sorted(self._in_doubt(directory, names)):
            names = {*names, name} if self._is_there(f"{directory}/{name}" if directory else name) else names - {name}
        return sorted(names)

    def _learn(self) -> CheckpointError | None:
        """Ask the lease what was committed last, for a list that lags may lack it; its holder knows.

        Returns:
            Why it cannot be read: a list that shows objects does without it.
        """
        if not self._lease.is_held:
            try:
                self._changes.learn(self._lease.recent)
            except CheckpointError as error:
                return error
        return None

    def _no_list(self, doubt: CheckpointError) -> CheckpointError:
        """What is said where a list shows nothing and the lease cannot be read: that is not known to be an empty run."""
        if not isinstance(doubt, CheckpointHostile):
            return doubt
        return CheckpointUnreadable(self._url, expected="a list of the run's objects",
                                    found=f"one without any, and in place of the lease {doubt.found}",
                                    fix="look whether a gateway or a login page answers in place of the store; if the run has no other objects, remove its .lease")  # fmt: skip

    def _in_doubt(self, directory: str, names: set[str]) -> set[str]:
        """The names of which a list says something else than this process has done."""
        above = len(directory) + 1 if directory else 0
        changed = {
            (key[above:].partition("/")[0], found is None) for key, found in self._changes.below(directory).items()
        }
        return {name for name, is_gone in changed if is_gone == (name in names) and is_component(name)}

    def _is_there(self, name: str) -> bool:
        return self._bucket.head(name) is not None or bool((found := self._below(name)) and found.objects)

    def _below(self, directory: str, *, most: int | None = None) -> BucketList | None:
        """All objects below a directory, as a list shows them that hides no commit; None if there are more than ``most``."""
        doubt = self._learn()
        listed = self._bucket.below(directory, most=most)
        if doubt is not None and listed == {} and not directory:
            raise self._no_list(doubt)
        return None if listed is None else self._changes.corrected(listed, directory, self._bucket.head)

    def glimpse(self, directory: str = "") -> Glimpse:
        """See `GivesGlimpses`."""
        return Glimpse(self, partial(self._below, most=_MOST_LISTED), self._reads, directory)

    def writers(self, directories: Sequence[str]) -> dict[str, str]:
        """See `NamesWriters`."""
        return self.glimpse().writers(directories)

    def holder_of(self, changed_at: Mapping[str, float]) -> dict[str, str]:
        """See `Looked`."""
        return self._lease.writers(changed_at)

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`. Large files go up in parts, of which a few are in memory."""
        split_name(name)
        self._lease.check()
        chunk = max(_CHUNK_BYTES, -(-size_bytes // _PARTS_LIMIT))
        chunks = self._chunks(name, parts, size_bytes, chunk)
        if size_bytes <= chunk:
            tag = self._bucket.put(name, b"".join(chunks))
        else:
            tag = self._bucket.put_parts(name, chunks, chunk_bytes=chunk, at_once=_AT_ONCE)
        self._changes.put(name, Found(size_bytes, 0.0, tag))

    def _chunks(self, name: str, parts: Iterable[Buffer], size_bytes: int, chunk_bytes: int) -> Iterator[bytearray]:
        chunk, given = bytearray(), 0
        for part in parts:
            data = memoryview(part).cast("B")
            given += len(data)
            if given > size_bytes:
                raise wrong_size(self._bucket.where(name), planned_bytes=size_bytes, given=f"{given} bytes or more")
            while len(data):
                taken = data[: chunk_bytes - len(chunk)]
                chunk += taken
                data = data[len(taken) :]
                if len(chunk) == chunk_bytes:
                    yield chunk
                    chunk = bytearray()
        if given < size_bytes:
            raise wrong_size(self._bucket.where(name), planned_bytes=size_bytes, given=f"{given} bytes")
        if chunk:
            self._lease.check()  # the object appears with its last part
            yield chunk

    def read_version(self, name: str) -> tuple[bytes, object] | None:
        """See `SwapsFiles`."""
        split_name(name)
        found = self._bucket.get(name)
        return None if found is None else (found.data, found.version)

    def swap(self, name: str, data: bytes, version: object | None) -> object | None:
        """See `SwapsFiles`: one conditional put."""
        split_name(name)
        self._lease.check()
        made = self._bucket.put_if(name, data, cast("Version | None", version))
        if made is not None:
            self._changes.put(name, Found(len(data), 0.0, tag_of(made)))
        return made

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """See `Store.commit`: one conditional put, after the lease was seen to be held."""
        split_name(name)
        self._check_conditional_puts()
        if replaces is None:
            self._lease.confirm(committing=name)
            version = self._bucket.put_if(name, data, None)
            if version is None:
                raise self._conflict(name, "no such name", "one")
            self._lease.check()
            self._note(name, tag_of(version), data)
            self._lease.committed(name, tag_of(version))
            return
        with self._lock_held():
            found = self._bucket.get(name)
            digest = "no such name" if found is None else digest_of(found.data)
            if found is None or digest != replaces:
                raise self._conflict(name, replaces, digest)
            self._lease.confirm(committing=name)
            if found.data == data:
                return
            version = self._bucket.put_if(name, data, found.version)
            if version is None:
                raise self._conflict(name, replaces, "other contents, of another writer")
            self._lease.check()
            self._note(name, tag_of(version), data)

        self._lease.committed(name, tag_of(version))

    def _note(self, name: str, tag: str, data: bytes) -> None:
        self._changes.put(name, Found(len(data), 0.0, tag))
        self._reads.put(name, tag, data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        if not name.endswith("/"):
            split_name(name)
            self._lease.check()
            self._lease.forget(name)
            self._delete([name, f"{HINTS}/{name}"] if "/" not in name else [name])
            return
        directory = prefix_directory(name)
        self._lease.forget(f"{directory}/")
        self._lease.confirm()
        listed = self._below(directory)
        record, found = f"{directory}/{MANIFEST}", {} if listed is None else listed.objects
        deeper = [key for key in found if "/" in key[len(directory) + 1 :]]
        for keys in (
            deeper,
            [record] if record in found else [],
            [key for key in found if key not in {*deeper, record}],
        ):
            self._delete(keys)

    def _delete(self, keys: Sequence[str]) -> None:
        self._bucket.delete(keys)
        self._changes.deleted(*keys)

    def point(self, name: str, target: str) -> None:
        """See `Store.point`: a small object that holds the target."""
        split_name(name), split_name(target)
        key, data = f"{HINTS}/{name}", target.encode()
        with suppress(SaveFailed):  # a hint is never worth a failed save
            self._note(key, self._bucket.put(key, data), data)

    def pointers(self) -> dict[str, str]:
        """See `Store.pointers`."""
        return self.glimpse(HINTS).pointers()

    @property
    def least_revision(self) -> int:
        """See `LosesWriters`: how often the lease was taken from a writer that had not given it back."""
        return self._lease.broken

    # --- the right to write, and room for it -----------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `Store.lock`: a lease, which a thread renews."""
        self._check_conditional_puts()
        with self._mutex:
            if self._lease.is_held:
                raise RunLocked(self._url, expected="no other writer", found="a writer of this store object",
                                fix="close the manager that holds it, or leave its with block")  # fmt: skip
            is_taken_over = self._lease.acquire()
            self._changes.learn(self._lease.recent)
        try:
            if is_taken_over:
                self.abort_uploads()
            yield
        finally:
            self._lease.release()

    def abort_uploads(self) -> int:
        """See `LeavesUploads`."""
        return abort_killed_uploads(self._client, self._url)

    def _lock_held(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lease.is_held else self.lock()

    def reserve(self, size_bytes: int) -> None:
        """See `Store.reserve`: a bucket has no limit; that this process may write there is tried once."""
        if size_bytes > _LIMIT_BYTES:
            raise no_space(self._url, needed_bytes=size_bytes, free_bytes=_LIMIT_BYTES)
        self._lease.check()
        self._check_conditional_puts()

    def _check_conditional_puts(self) -> None:
        """Try once whether the provider refuses what must be refused: some take the condition and do not look at it.

        Raises:
            InvalidArgument: if it does not.
        """
        if self._is_probed:
            return
        probe = f"{_PROBE}-{uuid.uuid4().hex}"
        first = self._bucket.put_if(probe, b"1", None)
        again = self._bucket.takes(probe, b"2", None)
        second = None if first is None else self._bucket.put_if(probe, b"3", first)
        late = first is not None and self._bucket.takes(probe, b"4", first)
        self._bucket.delete_own(probe)
        if first is None or again or second is None or late:
            raise InvalidArgument(self._url, expected="a store that refuses to create an object twice, and to replace one that has changed",
                                  found="one that takes such puts" if again or late else "one that refuses the first",
                                  fix="use a provider with conditional puts: without them two writers cannot be distinguished")  # fmt: skip
        self._is_probed = True

    def _conflict(self, name: str, expected: str, found: str) -> CommitConflict:
        return CommitConflict(self._bucket.where(name), expected=expected, found=found,
                              fix="another writer was first: read what it committed, and plan again")  # fmt: skip
