"""`Saver`: carries out one save at a time in a thread of its own, and says how it ended."""

import logging
from collections.abc import Callable
from functools import partial
from typing import final

from trainfold.backends.hold.hold import Hold
from trainfold.backends.runs.save import SaveResult
from trainfold.backends.runs.snapshot import Snapshot, save_snapshot
from trainfold.backends.stores.direct_io import release_buffers
from trainfold.backends.stores.protocol import Store
from trainfold.backends.worker_thread import Job, WorkerThread
from trainfold.core.errors import error_text
from trainfold.core.layout.world import Collectives
from trainfold.core.state.descent import Descent

_LOG = logging.getLogger("trainfold")


@final
class Saver:
    """The thread that writes, and the save that is under way in it.

    A Python that ends waits for the save that is under way (P11).

    Args:
        store: the run, whose lock is held.
        collectives: the ranks; nobody else may use them while a save is under way (D09).
    """

    def __init__(self, store: Store, collectives: Collectives) -> None:
        self._store = store
        self._collectives = collectives
        self._worker = WorkerThread("trainfold-save")
        self._under_way: Job[SaveResult] | None = None
        self._last: Job[None] | None = None
        self._protected_bytes = 0  # of the last save: what the next one gets ready for

    @property
    def is_under_way(self) -> bool:
        """Whether a save was begun and nobody was told yet how it ended."""
        return self._under_way is not None

    @property
    def has_ended(self) -> bool:
        """Whether the save under way has ended here; the other ranks may still be at it."""
        return self._under_way is not None and self._under_way.is_over

    def begin(
        self,
        take: Callable[[], Snapshot],
        hold: Hold,
        *,
        descends_from: Descent | None,
        owner: object,
    ) -> None:
        """Save in the background; if this raises, either a save is under way or nothing will be saved.

        Args:
            take: gives the snapshot of the state, or raises what this rank has to tell the others.
            hold: of its tensors; released when the save has ended.
            descends_from: the checkpoint that the state comes from; None where nobody knows.
            owner: who must not go before the save has ended, because it has the run's lock and stands before the updates.
        """
        assert self._under_way is None, "one save at a time (D04)"
        self._under_way = job = Job(partial(self._save, take, hold, descends_from, owner))
        try:
            self._worker.begin(job)
        except BaseException as error:
            if job.withdraw() or job.failure is error:
                self._under_way = None
            raise

    def wait_for_save(self) -> Job[SaveResult]:
        """Return when the save that is under way has ended; it still counts as such, so that an interrupt loses nothing."""
        assert self._under_way is not None, "begin comes first"
        self._under_way.wait()
        return self._under_way

    def forget(self) -> None:
        """How the save ended is known."""
        self._under_way = None

    def then(self, action: Callable[[], None]) -> None:
        """Do something in the background, such as deleting what is old; the next save comes after it."""

        def logged() -> None:
            try:
                action()
            except BaseException:
                _LOG.exception("%s: what follows a save was broken off", self._store.url)
                raise

        self._last = job = Job(logged)
        try:
            self._worker.begin(job)
        except BaseException:
            if job.withdraw():
                self._last = None
            raise

    def wait(self) -> None:
        """Return when what `then` was given last is done."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """Wait for all that was begun, and end the thread; calling it again does nothing."""
        self._worker.close()

    def _save(
        self, take: Callable[[], Snapshot], hold: Hold, descends_from: Descent | None, owner: object
    ) -> SaveResult:
        try:
            hold.prepare(self._protected_bytes)
            return save_snapshot(
                take,
                self._store,
                collectives=self._collectives,
                lock=False,
                hold=hold,
                descends_from=descends_from,
            )
        except BaseException as error:
            # here too, because a program that ends without `close` hears of it nowhere else
            _LOG.error("%s: a save in the background failed: %s", self._store.url, error_text(error))
            raise
        finally:
            hold.release()
            hold.forget()
            self._protected_bytes = hold.protected_bytes
            release_buffers()
            del owner
