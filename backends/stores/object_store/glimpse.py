"""`Glimpse`: a run as one list of its objects shows it. It answers which files there are, how large and how old, without a request for each."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol, final

from trainfold.backends.stores.names import is_component, prefix_directory, split_name
from trainfold.backends.stores.object_store.recent_changes import BucketList
from trainfold.backends.stores.object_store.small_reads import SmallReads
from trainfold.backends.stores.os_errors import missing
from trainfold.backends.stores.protocol import Buffer, GivesGlimpses, LeavesUploads, ReadsAhead, Store
from trainfold.core.errors import CheckpointMissing

HINTS: Final = ".hints"
_HINT_BYTES: Final = 256


class Looked(Store, ReadsAhead, GivesGlimpses, LeavesUploads, Protocol):
    """A store of which there are glimpses."""

    def holder_of(self, changed_at: Mapping[str, float]) -> dict[str, str]:
        """The directories into which the holder of the lock may be writing now, each with that process in words.

        Args:
            changed_at: directory -> when an object was put there last, by the store's clock; 0 if that is not known.
        """


@final
class Glimpse:
    """A `Store` that answers from one list of all objects below a directory; other questions it passes on.

    What it says is as old as its first answer, so it lasts for one operation. Whatever is written through it makes it look again.

    Args:
        store: the run.
        listed: lists all objects below a directory with their sizes; None if there are too many.
        reads: reads small objects.
        directory: what is listed; "" for the run.
    """

    def __init__(
        self, store: Looked, listed: Callable[[str], BucketList | None], reads: SmallReads, directory: str = ""
    ) -> None:
        self._store = store
        self._listed = listed
        self._reads = reads
        self._directory = directory
        self._mutex = threading.Lock()
        self._seen: BucketList | None = None
        self._has_looked = False

    def __repr__(self) -> str:
        return f"Glimpse({self._store!r})"

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._store.url

    def glimpse(self, directory: str = "") -> Store:
        """See `GivesGlimpses`: itself, if its list has the directory."""
        return self._store.glimpse(directory) if self._look(directory) is None else self

    def _look(self, name: str) -> BucketList | None:
        """What was seen, if that says something of a name."""
        if self._directory and not f"{name}/".startswith(f"{self._directory}/"):
            return None
        with self._mutex:
            if not self._has_looked:
                self._seen = self._listed(self._directory)
                self._has_looked = True
            return self._seen

    def _may_lack(self, seen: BucketList) -> bool:
        """Whether what is not in the list may be there: other ranks write into a checkpoint's directory too, and a list may lag."""
        return seen.is_late or self._directory != ""

    def _forget(self) -> Looked:
        with self._mutex:
            self._has_looked, self._seen = False, None
        return self._store

    # --- answered from the list --------------------------------------------------------------------------------------

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        split_name(name)
        seen = self._look(name)
        found = None if seen is None else seen.objects.get(name)
        if seen is None or (found is None and self._may_lack(seen)):
            return self._store.size(name)
        return None if found is None else found.size_bytes

    def committed_at(self, name: str) -> float | None:
        """See `Store.committed_at`."""
        split_name(name)
        seen = self._look(name)
        found = None if seen is None else seen.objects.get(name)
        if seen is None or (found is None and self._may_lack(seen)):
            return self._store.committed_at(name)
        return None if found is None else found.modified

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        directory = prefix_directory(prefix)
        seen = self._look(directory)
        if seen is None:
            return self._store.list(prefix)
        start = f"{directory}/" if directory else ""
        names = {key[len(start) :].partition("/")[0] for key in seen.objects if key.startswith(start)}
        return sorted(name for name in names if is_component(name))

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`; a small object is read once."""
        split_name(name)
        seen = self._look(name)
        found = None if seen is None else seen.objects.get(name)
        if seen is None or (found is None and self._may_lack(seen)):
            return self._store.read(name, start=start, stop=stop)
        if found is None:
            raise missing(f"{self.url}/{name}")
        return self._reads.read(name, found, start, stop)

    def reading(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Callable[[memoryview, int], None]]:
        """See `ReadsAhead`."""
        return self._store.reading(name, spans)

    def pointers(self) -> dict[str, str]:
        """See `Store.pointers`."""
        seen = self._look(HINTS)
        if seen is None:
            return self._store.pointers()
        hints = {key: found for key, found in seen.objects.items() if key.startswith(f"{HINTS}/")}
        found = {}
        for key in sorted(hints):
            name = key.removeprefix(f"{HINTS}/")
            if is_component(name):
                with suppress(CheckpointMissing):  # deleted since
                    found[name] = self._reads.read(key, hints[key], 0, _HINT_BYTES).decode(errors="replace")
        return {name: target for name, target in found.items() if is_component(target)}

    def writers(self, directories: Sequence[str]) -> dict[str, str]:
        """See `NamesWriters`."""
        times = {name: [self.committed_at(f"{name}/{each}") or 0.0 for each in self.list(name)] for name in directories}
        return self._store.holder_of({name: max(found, default=0.0) for name, found in times.items()})

    # --- passed on ---------------------------------------------------------------------------------------------------

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`."""
        self._store.read_into(name, buffer, start=start)

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""
        self._forget().write(name, parts, size_bytes=size_bytes)

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """See `Store.commit`."""
        self._forget().commit(name, data, replaces=replaces)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._forget().delete(name)

    def point(self, name: str, target: str) -> None:
        """See `Store.point`."""
        self._forget().point(name, target)

    def abort_uploads(self) -> int:
        """See `LeavesUploads`."""
        return self._store.abort_uploads()

    def lock(self) -> AbstractContextManager[None]:
        """See `Store.lock`."""
        return self._forget().lock()

    def reserve(self, size_bytes: int) -> None:
        """See `Store.reserve`."""
        self._store.reserve(size_bytes)
