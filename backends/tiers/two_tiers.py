"""`TwoTiers`: a run on a disk, whose checkpoints go on to another store in the background, and come back from there where the disk has lost them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import final

from trainfold.backends.stores.local import LocalStore, Run, open_store
from trainfold.backends.stores.place import settled_place
from trainfold.backends.stores.protocol import Buffer, least_revision_of
from trainfold.backends.stores.stand_in import check_only_read
from trainfold.backends.tiers.fetches import Fetches
from trainfold.backends.tiers.sent_logs import SentLogs
from trainfold.backends.tiers.uploads import Uploads
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.checks import count
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    InvalidArgument,
    SaveFailed,
    error_text,
)
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.json_values import shown
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.save.events import Event
from trainfold.core.save.retention import Retention, keep_all


@final
class TwoTiers:
    """A `Store` of two: a save is durable when it is in the near tier, and is sent to the far one in the background.

    While a manager, or a `save`, has the run open, it holds the locks of both tiers. When it opens the run, the newest checkpoint of the far tier is fetched if the near
    one has none that is as new and whole, with the flight logs and the journal, and what the near tier has and the far one lacks is sent. Each of these is an `Event` of the manager: ``committed``, then
    ``uploaded``; ``not_uploaded``; ``fetched``.

    The near tier is what a program reads, and what the retention of its manager is for. A checkpoint that waits for its upload stays there, whatever that keeps. In the
    far tier, retention deletes what ``keep_far`` does not keep.

    Args:
        near: a directory on a disk of this machine, or its store.
        far: another store: a URL, a directory, or a store.
        keep_far: what to keep in the far tier, such as ``keep_last(5)``; None for all.
        most_waiting: how many checkpoints may wait besides the one that is being sent, where uploads are slower than saves. Older ones are given up, each with a warning,
            and the near tier need not keep them then. None for any number.

    Raises:
        InvalidArgument: for an invalid argument.

    Examples:
        >>> import tempfile
        >>> from trainfold import CheckpointManager, Progress, TrainState, load
        >>> from trainfold.stores import MemoryStore
        >>> far = MemoryStore()
        >>> with tempfile.TemporaryDirectory() as disk:
        ...     with CheckpointManager(TwoTiers(disk + "/run", far), keep_last=1) as manager:
        ...         _ = manager.save(TrainState(trainer=Progress(step=1)))
        >>> load(far, like=TrainState(trainer=Progress())).trainer.step
        1
    """

    def __init__(
        self,
        near: str | Path | LocalStore,
        far: Run,
        *,
        keep_far: Retention | None = None,
        most_waiting: int | None = None,
    ) -> None:
        store = open_store(near)
        if not isinstance(store, LocalStore):
            raise InvalidArgument("TwoTiers.near", expected="a directory on a disk of this machine", found=shown(near),
                                  fix="name the bucket as far=")  # fmt: skip
        if keep_far is not None and not isinstance(keep_far, Retention):
            raise InvalidArgument("TwoTiers.keep_far", expected="a retention, or None", found=shown(keep_far),
                                  fix="pass trainfold.retention.keep_last(5)")  # fmt: skip
        if most_waiting is not None:
            count(
                "TwoTiers.most_waiting", most_waiting, fix="pass how many checkpoints may wait, or None for any number"
            )
        self.near, self.far = store, open_store(far)
        if isinstance(self.far, LocalStore):
            places = Path(self.far.url).resolve(), Path(store.url).resolve()
            if places[0].is_relative_to(places[1]) or places[1].is_relative_to(places[0]):
                raise InvalidArgument("TwoTiers.far", expected="another place than the near tier, and neither inside the other", found=f"{self.far.url}, and {store.url} as the near one",
                                      fix="name the place of the copies")  # fmt: skip
        self._keep_far, self._most_waiting = keep_far, most_waiting
        self._uploads: Uploads | None = None
        self._mutex = threading.Lock()
        self._listener: Callable[[Iterable[Event]], object] | None = None
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return f"TwoTiers({self.near.url!r}, {self.far.url!r})"

    @property
    def url(self) -> str:
        """See `Store.url`: that of the near tier."""
        return self.near.url

    @property
    def waiting(self) -> tuple[str, ...]:
        """The checkpoints that are not in the far tier yet, the oldest first; none while this object does not hold the lock."""
        return () if self._uploads is None else tuple(name for name in self._uploads.waiting if name != BEST_FILE)

    @property
    def far_tier(self) -> tuple[str, Retention]:
        """See `HasFarTier`."""
        return settled_place(self.far.url), keep_all() if self._keep_far is None else self._keep_far

    def wait(self) -> None:
        """Return when everything is in the far tier. What fails is tried once more; then the run is as it was.

        Raises:
            SaveFailed: with the names of those that are in the near tier alone.
        """
        if self._uploads is not None:
            self._uploads.wait()

    def report_to(self, listener: Callable[[Iterable[Event]], object]) -> None:
        """See `HasFarTier`."""
        with self._mutex:
            self._listener, events, self._events = listener, self._events, []
        listener(events)

    # --- both tiers --------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See `Store.lock`: both; and fetches and sends what is missing. At its end everything is sent.

        Raises:
            RunLocked: if another writer has one of them.
            CheckpointForeign: if they are of two runs.
            SaveFailed: if the far tier does not answer, or what is fetched cannot be written; or, at the end, with what was not sent.
            NotWritable: in a replay of this run.
        """
        check_only_read(self.near.url, self.far.url)
        with self.near.lock(), self._lock_of_far():
            uploads = Uploads(
                self.near, self.far, keep=self._keep_far, most_waiting=self._most_waiting, report=self._report
            )
            left = self._fetches(uploads.logs).catch_up()
            uploads.compare_logs()
            self._uploads = uploads
            try:
                uploads.add(*left)
                yield
            except BaseException as error:
                try:
                    uploads.wait()
                except SaveFailed as late:
                    error.add_note(f"and besides: {error_text(late)}")
                raise
            else:
                uploads.wait()
            finally:
                self._uploads = None

    @contextmanager
    def _lock_of_far(self) -> Iterator[None]:
        """The lock of the far tier. Without it nothing begins: what is newest there is not guessed."""
        with ExitStack() as held:
            try:
                held.enter_context(self.far.lock())
            except SaveFailed as error:
                if type(error) is not SaveFailed:  # another writer has it, or it may not be written
                    raise
                raise SaveFailed(
                    self.far.url, expected="a far tier that answers: it may have a newer checkpoint than the near one", found=error_text(error),
                    fix=f"start again when it answers; or, if no other machine has continued this run, use {self.near.url} by itself as the run: what it saves is sent when both are used again",
                ) from error  # fmt: skip
            yield

    def _fetches(self, logs: SentLogs) -> Fetches:
        return Fetches(self.near, self.far, logs, self._report)

    def _report(self, event: Event) -> None:
        with self._mutex:
            listener = self._listener
            if listener is None:
                self._events.append(event)
        if listener is not None:
            listener([event])

    def refetch(self, name: str, *, or_older: bool = False) -> str | None:
        """See `HasFarTier`."""
        uploads = self._uploads
        return None if uploads is None else self._fetches(uploads.logs).fetched_again(name, or_older=or_older)

    def commit(self, name: str, data: bytes, *, replaces: str | None = None) -> None:
        """See `Store.commit`: in the near tier; a checkpoint is then sent."""
        self.near.commit(name, data, replaces=replaces)
        self._committed(name, data, replaces)

    def commit_as_old(self, name: str, data: bytes, *, replaces: str) -> None:
        """See `KeepsTime`."""
        self.near.commit_as_old(name, data, replaces=replaces)
        self._committed(name, data, replaces)

    def _committed(self, name: str, data: bytes, replaces: str | None) -> None:
        directory, _, last = name.rpartition("/")
        is_ours = name == BEST_FILE or (last == MANIFEST and step_of(directory) is not None)
        if self._uploads is not None and is_ours and digest_of(data) != replaces:
            self._uploads.add(directory or name)

    def pointers(self) -> dict[str, str]:
        """See `Store.pointers`: with one to each checkpoint that waits for its upload, so that retention keeps it."""
        return {**self.near.pointers(), **{f"upload-of-{name}": name for name in self.waiting}}

    @property
    def least_revision(self) -> int:
        """See `LosesWriters`: a late file of a lost writer in the far tier has no name that a checkpoint has."""
        return max(least_revision_of(self.near), least_revision_of(self.far))

    # --- the near tier -----------------------------------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """See `SharedByRanks`."""
        return self.near.is_shared

    @property
    def prefers(self) -> FilePreference:
        """See `PrefersFiles`."""
        return self.near.prefers

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""
        self.near.write(name, parts, size_bytes=size_bytes)

    def written_unsynced(
        self, name: str, parts: Iterable[Buffer], *, size_bytes: int
    ) -> AbstractContextManager[Callable[[], None]]:
        """See `SyncsLater`."""
        return self.near.written_unsynced(name, parts, size_bytes=size_bytes)

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`."""
        return self.near.read(name, start=start, stop=stop)

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`."""
        self.near.read_into(name, buffer, start=start)

    def opened(self, name: str) -> AbstractContextManager[Callable[[memoryview, int], None]]:
        """See `LocalStore.opened`."""
        return self.near.opened(name)

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self.near.size(name)

    def committed_at(self, name: str) -> float | None:
        """See `Store.committed_at`."""
        return self.near.committed_at(name)

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        return self.near.list(prefix)

    def writers(self, directories: Sequence[str]) -> dict[str, str]:
        """See `NamesWriters`."""
        return self.near.writers(directories)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self.near.delete(name)

    def point(self, name: str, target: str) -> None:
        """See `Store.point`."""
        self.near.point(name, target)

    def reserve(self, size_bytes: int) -> None:
        """See `Store.reserve`."""
        self.near.reserve(size_bytes)
