"""`BackgroundSave`: a save in the background. Its job takes the snapshot in its own thread and reads the leaves through a hold."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import attrs

from trainfold.backends.hold.hold import Hold
from trainfold.backends.job import Job
from trainfold.backends.runs.commit import SaveResult
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.snapshot import Snapshot
from trainfold.backends.stores.direct_io import release_buffers
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import RankFailed, error_text
from trainfold.core.layout.world import Collectives
from trainfold.core.save.reuse.base import Base
from trainfold.core.state.parent_checkpoint import ParentCheckpoint

_LOG = logging.getLogger("trainfold")
_THREAD: Final = "trainfold-save"


@final
@attrs.frozen(kw_only=True, eq=False)
class BackgroundSave:
    """The arguments of a save in the background.

    Attributes:
        store: the run. The caller holds its lock.
        take: makes the snapshot, in the thread, or raises what this rank has to report to the others.
        hold: of the snapshot's tensors. It is released when the save has ended.
        collectives: the ranks. Nothing else may use them while the save is under way.
        descends_from: the checkpoint that the state comes from; None if it is unknown.
        base: what the rank has stored before, and may refer to; None to write everything.
        ready_bytes: memory for copies to get ready, such as the last save needed.
        owner: an object to keep alive until the save has ended, because it holds the run's lock.
    """

    store: Store
    take: Callable[[], Snapshot]
    hold: Hold
    collectives: Collectives
    descends_from: ParentCheckpoint | None
    ready_bytes: int
    base: Base | None
    owner: object

    def job(self, *, after: Job[Any] | None) -> Job[SaveResult]:
        """The save, not started yet: the caller remembers the job first, so that an interrupt loses nothing.

        Args:
            after: a job that has to end first.
        """
        return Job(partial(_save, self), name=_THREAD, after=after)  # no closure: the frames of a failure would keep it


def background_action(store: Store, action: Callable[[], None], *, after: Job[Any] | None) -> Job[None]:
    """A job, not started yet, for work such as deleting old checkpoints. Its failure is logged.

    Args:
        store: the run.
        action: what to do.
        after: a job that has to end first.
    """

    def logged() -> None:
        try:
            action()
        except BaseException:
            _LOG.exception("%s: the work after a save was broken off", store.url)
            raise

    return Job(logged, name=_THREAD, after=after)


def _save(work: BackgroundSave) -> SaveResult:
    hold = work.hold
    try:
        hold.prepare(work.ready_bytes)
        return save_snapshot(
            work.take,
            work.store,
            collectives=work.collectives,
            lock=False,
            hold=hold,
            descends_from=work.descends_from,
            base=work.base,
        )
    except BaseException as error:
        # logged here too: a program that ends without `close` sees it nowhere else
        if work.collectives.rank == 0 or not isinstance(error, RankFailed):  # once a run, unless this rank alone knows
            _LOG.error("%s: a save in the background failed: %s", work.store.url, error_text(error))
        raise
    finally:
        hold.release()
        hold.forget()
        release_buffers()
