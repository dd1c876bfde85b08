"""`Saver`: carries out one save at a time in a thread of its own, and says how it ended."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

from trainfold.backends.direct_io import release_buffers
from trainfold.backends.hold import Hold
from trainfold.backends.protocols import Collectives, Store
from trainfold.backends.run_save import SaveResult
from trainfold.backends.snapshot import Snapshot, save_snapshot


@final
class Saver:
    """The thread that writes, and the save that is under way in it.

    The thread is no daemon: a Python that ends waits for the save that is under way (P11).

    Args:
        store: the run, whose lock is held.
        collectives: the ranks; nobody else may use them while a save is under way (D09).
    """

    def __init__(self, store: Store, collectives: Collectives) -> None:
        self._store = store
        self._collectives = collectives
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[SaveResult] | None = None
        self._protected_bytes = 0  # of the last save: what the next one gets ready for

    @property
    def is_under_way(self) -> bool:
        """Whether a save was begun and nobody was told yet how it ended."""
        return self._under_way is not None

    @property
    def has_ended(self) -> bool:
        """Whether the save under way has ended here; the other ranks may still be at it."""
        return self._under_way is not None and self._under_way.done()

    def begin(self, snapshot: Snapshot, hold: Hold) -> None:
        """Save in the background.

        Args:
            snapshot: of the state.
            hold: of its tensors; released when the save has ended.
        """
        assert self._under_way is None, "one save at a time (D04)"
        self._under_way = self._submit(lambda: self._save(snapshot, hold))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has nothing to save: they wait for it in their threads."""
        self._collectives.fail(error)

    def end(self) -> SaveResult:
        """Wait for the save that is under way.

        Raises:
            SaveFailed: or whatever else ended it; it is told once.
        """
        assert self._under_way is not None, "begin comes first"
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def then(self, action: Callable[[], None]) -> None:
        """Do something in the background, such as deleting what is old; the next save comes after it."""
        self._submit(action)

    def close(self) -> None:
        """Wait for all that was begun, and end the thread; calling it again does nothing."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _save(self, snapshot: Snapshot, hold: Hold) -> SaveResult:
        try:
            hold.prepare(self._protected_bytes)
            return save_snapshot(lambda: snapshot, self._store, collectives=self._collectives, lock=False, hold=hold)
        finally:
            hold.release()
            self._protected_bytes = hold.protected_bytes
            release_buffers()

    def _submit(self, action: Callable[[], Any]) -> "Future[Any]":
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "trainfold-save")
        return self._thread.submit(action)
