"""`ReplicaWatch`: compares what ranks have alike each so many steps, in the background, and names the leaf and the ranks that have drifted."""

import logging
from typing import Final, final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.contents import RunContents, view_of
from trainfold.backends.hold.hold import Hold
from trainfold.backends.job import Job
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.runs.alike.held_digests import digests_job, to_compare
from trainfold.backends.runs.alike.replicas import copies_of
from trainfold.core.errors import error_text
from trainfold.core.layout.replica_row import Digests, ReplicaRow, agreed_rows, differing_leaves, drift_error, numbered
from trainfold.core.layout.world import Collectives, PendingRows
from trainfold.core.save.replicas import Proof, component_of_parts
from trainfold.core.state.leaves import leaves_in
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")


@final
@attrs.frozen(eq=False)
class _Check:
    """A comparison that is under way.

    Attributes:
        step: whose values are compared.
        hold: of the leaves.
        job: computes their digests; None where it could not be started.
    """

    step: int
    hold: Hold
    job: Job[Digests] | None

    @property
    def row(self) -> ReplicaRow:
        """What this rank knows now."""
        is_over = self.job is None or self.job.is_over  # before the result, which may come in between
        digests = None if self.job is None else self.job.result
        return ReplicaRow(self.step, digests, is_torn=is_over and digests is None)


@final
class ReplicaWatch:
    """Compares what ranks have alike, each so many steps; nothing in the loop waits for it.

    At the boundary where a comparison is due the leaves are held, as an async save holds them, and a thread digests them: an update that
    overtakes it copies what is not read yet. At each boundary until all have their digests, the ranks start to send one row of whole numbers, and
    read it at the next one. Digests that differ are not believed yet: a write that no hook announces and no version counter shows may have torn
    them. So the leaves in doubt are digested again where all ranks stand at a boundary, and only those that still differ are an error.

    Args:
        world: the ranks; all of them make the same calls.
        contents: reads the run.
        every: compare at each multiple of so many optimizer steps; None for never.
        room: how many bytes the copies may have; None for as many as there are.
    """

    def __init__(self, world: Collectives, contents: RunContents, *, every: int | None, room: int | None) -> None:
        self._world = world
        self._contents = contents
        self._every = every if world.world_size > 1 else None
        self._room = room
        self._check: _Check | None = None
        self._pending: PendingRows | None = None
        self._seen: int | None = None  # the step of the last boundary
        self._equal_at: int | None = None

    def arrive(self, run: Live | TrainState, step: int, *, is_last: bool) -> None:
        """Read what the ranks have sent, and start a comparison if one is due. Call it at a boundary, before a save.

        Args:
            run: at the boundary.
            step: optimizer steps done.
            is_last: whether the run ends here. Then the comparison under way is waited for.

        Raises:
            RanksDisagree: on every rank, if replicas have drifted apart: with the leaf, the ranks in the minority, and the step.
        """
        if self._every is None:
            return
        self._read(run)
        if is_last:
            if self._check is not None:
                if self._check.job is not None:
                    self._check.job.wait()
                self.leave()
                self._read(run)
            return
        before = step - 1 if self._seen is None else self._seen
        self._seen = step
        if step // self._every > before // self._every and self._check is None:
            self._check = self._begun(run, step)

    def leave(self) -> None:
        """Start to send what this rank knows, if a comparison is under way."""
        if self._check is not None and self._pending is None:
            self._pending = self._world.start_gather(self._check.row.numbers(), doing="come to the next boundary")

    def protect(self) -> None:
        """Return when the leaves that are compared may be written to."""
        if self._check is not None:
            self._check.hold.protect()

    def drop(self) -> None:
        """Give up the comparison under way, because the run is about to be overwritten; on every rank. What was sent is read at the next boundary."""
        check, self._check = self._check, None
        if check is not None and check.job is not None:
            check.hold.release()
            check.job.wait()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begun(self, run: Live | TrainState, step: int) -> _Check:
        """A comparison that has started. A failure of this rank is a row for the others, who have started theirs."""
        hold = Hold({})
        try:
            view = view_of(run, is_saved=False)
            snapshot = self._contents.described(run, view)
            found = snapshot.replicated()
            plan = to_compare(found, {name: component_of_parts(name) for name in found})
            named = snapshot.named()
            leaves = {
                leaf: named[leaf] for each in plan.values() for leaf in each.values() if not isinstance(leaf, str)
            }
            apart = self._contents.unannounced(run, view, snapshot, leaves) & leaves.keys()
            hold = Hold(
                leaves, unannounced=apart, max_extra_bytes=self._room, counters=self._contents.counters(run, leaves)
            )
            job = digests_job(plan, hold)
            if isinstance(run, TrainState):
                for each in leaves_in(run):
                    each.lease.add_reader(hold)
            job.start()
            hold.settle()
        except Exception as error:  # noqa: BLE001  # the run goes on
            hold.release()
            _LOG.warning(
                "rank %d: the replicas of step %d are not compared: %s", self._world.rank, step, error_text(error)
            )
            return _Check(step, hold, None)
        return _Check(step, hold, job)

    def _read(self, run: Live | TrainState) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rows, check = pending.wait(), self._check
        if check is None:
            return  # it was dropped meanwhile
        agreed = agreed_rows(rows)
        if not agreed.is_over:
            return
        self._check = None
        self._contents.found_written(check.hold.written())
        digests = {} if check.job is None else check.job.result or {}
        if agreed.is_torn:
            if check.job is not None and check.job.failure is not None:
                text = error_text(check.job.failure)
                _LOG.info("rank %d: the replicas of step %d are not compared: %s", self._world.rank, check.step, text)
        elif not agreed.doubtful:
            self._equal_at = check.step
        else:
            names = [name for number, each in numbered(digests).items() if number in agreed.doubtful for name in each]
            self._look_again(run, check.step, {name: digests[name] for name in names})

    def _look_again(self, run: Live | TrainState, step: int, doubtful: Digests) -> None:
        """Raise if replicas differ now too, where no rank writes to them. What differed at that step is named first.

        Everything is digested: what has flipped in a slot may have reached the weight and left the slot since.
        """
        differed = differing_leaves(self._world.gather(doubtful, doing="compare its replicas", is_vote=True))
        now = differing_leaves(
            on_all_ranks(self._world, lambda: self._digests_now(run), doing="compare its replicas again")
        )
        drifted = {leaf: now[leaf] for leaf in (*(leaf for leaf in differed if leaf in now), *now)}
        if drifted:
            raise drift_error(drifted, step=step, equal_at=self._equal_at)
        if self._world.rank == 0 and differed:
            _LOG.warning("%s differed between ranks at step %d, and is equal now; if that comes back, look for what writes to it between two "
                         "optimizer steps, and call manager.wait_staging() before it does", next(iter(differed))[1], step)  # fmt: skip

    def _digests_now(self, run: Live | TrainState) -> Digests:
        return copies_of(self._contents.described(run, view_of(run, is_saved=False)).replicated(), proof=Proof())
