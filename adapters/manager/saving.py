"""`SaveRunner`: begins the saves of a run, in the caller's thread or in the background, and tells how each of them ended."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, final

import attrs

from trainfold.adapters.guards.first_save import FirstSave
from trainfold.adapters.live.live import Live
from trainfold.adapters.live.view import LiveView
from trainfold.adapters.manager.events import EventLog
from trainfold.adapters.manager.protocol import SaveOutcome
from trainfold.adapters.manager.retention import Pruner
from trainfold.adapters.manager.triggers import Before, SaveTriggers
from trainfold.adapters.manager.update_hooks import UpdateGate
from trainfold.adapters.parallel.ddp import sent_buffers
from trainfold.backends.hold.hold import Hold
from trainfold.backends.runs.background import Saver
from trainfold.backends.runs.save import SaveResult
from trainfold.backends.runs.snapshot import Snapshot, describe_state, save_snapshot, step_of_state
from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import error_text
from trainfold.core.format.structure.describe import Describer
from trainfold.core.layout.world import Collectives
from trainfold.core.save.replicas import Level, proof_of
from trainfold.core.state.components import validate_components
from trainfold.core.state.descent import Descent
from trainfold.core.state.state import TrainState


@final
class SaveRunner:
    """One save at a time, however it is carried out (D04).

    Args:
        store: the run, whose lock is held.
        world: the ranks, each of which makes the same calls.
        components: which components are saved; None for all.
        contract: what must be equal at a resume, beside what the run says itself.
        is_async: whether a save goes on in the background.
        room: how many bytes the copies of an async save may have; None for as many as the state.
        replica_check: how much of what all ranks are to have alike each save compares (B06).
        hold_check: whether the bytes of what an async save holds are compared at the commit (W16).
        due: what a save answers, and what is due again if it fails.
        first: what is checked before the first save.
        keeper: deletes what is old after each commit.
        announcer: is told.
        held: what must not go before the save under way has ended, such as the run's lock.

    Attributes:
        descends_from: the checkpoint that the run goes on from, loaded or saved last; None where nobody knows (E16).
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        store: Store,
        world: Collectives,
        *,
        components: tuple[str, ...] | None,
        contract: Mapping[str, Any],
        is_async: bool,
        room: int | None,
        hold_check: bool,
        replica_check: Level,
        due: SaveTriggers,
        first: FirstSave,
        keeper: Pruner,
        announcer: EventLog,
        held: object,
    ) -> None:
        self.descends_from: Descent | None = None
        self._store = store
        self._world = world
        self._components = components
        self._contract = contract
        self._is_async = is_async
        self._room = room
        self._hold_check = hold_check
        self._due = due
        self._first = first
        self._keeper = keeper
        self._announcer = announcer
        self._held = held
        self._gate = UpdateGate()
        self._describer = Describer()
        self._saver = Saver(store, world.duplicate() if is_async else world)
        self._saved_in: dict[str, Descent] = {}  # of the live run that is being saved
        self._before: Before | None = None  # what the save under way answers
        self._retention: Callable[[], None] | None = None  # of what was committed last, not begun yet
        self._replica_check = replica_check
        self._proofs = 0  # saves that have shown that the ranks have the same
        self._told: BaseException | None = None  # what the call that began it has raised already

    @property
    def is_under_way(self) -> bool:
        """Whether a save was begun and nobody was told yet how it ended."""
        return self._saver.is_under_way

    @property
    def has_ended(self) -> bool:
        """Whether the save under way has ended here; the other ranks may still be at it."""
        return self._saver.has_ended

    def has_ended_everywhere(self) -> bool:
        """Whether it has ended on every rank; every rank calls."""
        return all(self._world.gather(self._saver.has_ended))

    def save(self, run: Live | TrainState, failures: list[Exception], *, may_skip: bool) -> SaveOutcome:
        """Begin a save, and carry it out where it is not async.

        Args:
            run: what to save.
            failures: gets that of the save before, which is waited for.
            may_skip: whether to do nothing where one is under way.

        Raises:
            SaveFailed: if this one failed.
        """
        step = run.progress.step if isinstance(run, Live) else step_of_state(run)
        self.check_first(run)
        self._due.see(step)
        if self.is_under_way:
            if may_skip and not self.has_ended_everywhere():
                self._announcer.tell("skipped", step=step, detail="another save is under way")
                return SaveOutcome("skipped", step)
            self._end_previous(failures)
        self._saved_in = run.saved_in if isinstance(run, Live) else {}
        last = self._due.last_saved
        if self.descends_from is not None and last is not None and last < self.descends_from.step:
            self.descends_from = attrs.evolve(self.descends_from, step=last)  # it went back in memory
        try:
            return self._stage(run, step) if self._is_async else self._write(run, step)
        finally:
            self._retain()  # unless the save that was begun does it first

    def check_first(self, run: Live | TrainState) -> None:
        """Refuse what does not come from the run, if the run has checkpoints; looks once, so every rank calls."""
        self.descends_from = self._first.check(run) or self.descends_from

    def end_previous(self, failures: list[Exception]) -> None:
        """Wait for the save under way, if there is one; its failure is added and not raised, so that what is next is done first."""
        self._end_previous(failures)
        self._retain()

    def end(self) -> SaveResult | None:
        """Wait for the save under way, and tell what came of it: callbacks first, and then what is old goes (D06).

        Raises:
            SaveFailed: if it failed; told once.
        """
        try:
            return self._end()
        finally:
            self._retain()

    def settle(self) -> None:
        """End the save under way, and return when nothing is being deleted: who reads the run must not do so meanwhile."""
        if self.is_under_way:
            self.end()
        self.wait_for_deletions()

    def wait_for_deletions(self) -> None:
        """Return when what was old after the last commit that was told of is deleted."""
        self._retain()
        self._saver.wait()

    def protect(self) -> None:
        """Return when everything that was saved may be written to."""
        self._gate.protect()

    def close(self) -> None:
        """Let go of the thread and of the optimizers; nothing is under way any more."""
        self._saver.close()
        self._gate.remove()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _end_previous(self, failures: list[Exception]) -> None:
        if self.is_under_way:
            try:
                self._end()
            except Exception as error:
                if self.is_under_way:
                    raise  # the waiting was interrupted, and not the save
                failures.append(error)

    def _end(self) -> SaveResult | None:
        before = self._before
        assert before is not None, "begin comes first"
        ended = self._saver.wait_for_save()
        # until it is forgotten, whatever interrupts this can be followed by the same once more
        self._gate.open()
        result, failure = ended.result, ended.failure
        if result is None:
            assert failure is not None, "a job returns or raises"
            self._due.undone(before)
            told, self._told = self._told, None
            self._saver.forget()
            if told is failure:
                return None  # the call that began it has raised it
            self._announcer.tell("failed", step=before.step, detail=error_text(failure))
            try:
                raise failure
            finally:
                del ended, failure  # its traceback leads here, and to the tensors
        self.descends_from = self._saved_in[result.run_id] = result.descent
        if self._world.rank == 0:
            self._retention = lambda: self._announcer.leave(self._keeper.retain(result))
        self._saver.forget()
        self._tell_committed(result)
        return result

    def _retain(self) -> None:
        """Delete what is old, in the background: there it would hold up a save that is being begun."""
        retention = self._retention
        if retention is not None:
            self._saver.then(retention)
            self._retention = None  # not before: an interrupt in between has it done twice, and not never

    def _write(self, run: Live | TrainState, step: int) -> SaveOutcome:
        """Save in the thread of the caller."""
        try:
            result = save_snapshot(
                lambda: self._whole_snapshot(run),
                self._store,
                collectives=self._world,
                lock=False,
                descends_from=self.descends_from,
            )
        except Exception as error:
            self._announcer.tell("failed", step=step, detail=error_text(error))
            raise
        self.descends_from = self._saved_in[result.run_id] = result.descent
        self._due.begun(step)
        self._tell_committed(result)
        if self._world.rank == 0:
            self._announcer.leave(self._keeper.retain(result))
        self._announcer.tell_left()
        return SaveOutcome("written", step, result)

    def _stage(self, run: Live | TrainState, step: int) -> SaveOutcome:
        """Hold the state, and leave the rest to the thread."""
        try:
            lent = _lent(run)
            snapshot = self._snapshot(run, lent)
            leaves = snapshot.named()
            unannounced = self._gate.changing(run, lent, leaves) | snapshot.arrays()
            with named_failures(self._store.url):
                hold = Hold(leaves, unannounced=unannounced, max_extra_bytes=self._room, check=self._hold_check)
        except Exception as error:
            self._announcer.tell("failed", step=step, detail=error_text(error))
            if self._world.world_size > 1:  # the other ranks wait in their threads for what this one has to say
                self._begin(_raising(error), Hold({}), step)
                self._told = error
            raise
        # the writer frees what the call has made: Torch lets go of the interpreter to free a tensor, and a writer that waits for
        # it then has it for milliseconds
        made = (snapshot, leaves, lent if isinstance(run, Live) else None)
        try:
            self._gate.close_for(hold, run)
            streams = lent.rng
            self._begin(lambda: self._with_streams(made[0], streams), hold, step)
        except BaseException:
            if not self.is_under_way:  # else an interrupt came when it was begun already
                hold.release()
                self._gate.open()
            raise
        try:
            hold.settle()
        except BaseException:
            hold.release()  # the save fails: what nobody announces may change from now on, and is not read
            raise
        self._announcer.tell("saved", step=step, detail=f"{hold.copied_bytes} bytes copied, the others held")
        return SaveOutcome("staged", step)

    def _begin(self, take: Callable[[], Snapshot], hold: Hold, step: int) -> None:
        self._before = before = self._due.before(step)
        try:
            self._due.begun(step)
            self._retain()  # the thread does one thing after another: what is old goes before more is written
            self._saver.begin(take, hold, descends_from=self.descends_from, owner=self)
        except BaseException:
            if not self.is_under_way:
                self._due.undone(before)
            raise

    def _snapshot(self, run: Live | TrainState, lent: LiveView) -> Snapshot:
        state, modules = lent.state, lent.modules
        if isinstance(run, Live) and self._world.world_size > 1 and not self._proofs:
            run.check_whole()  # again, because what is attached may have been wrapped since
        names = validate_components(self._components, declared=run.names) if isinstance(run, Live) else self._components
        found = describe_state(state, components=names, contract=self._contract, describe=self._describer.describe)
        if self._world.world_size == 1:
            return found
        if isinstance(run, Live):
            found = attrs.evolve(found, optional=run.optional)
        sent = sent_buffers(run, modules, self._world) if isinstance(run, Live) else {}
        return found.with_copies(proof_of(self._replica_check, saves=self._proofs), sent=sent)

    def _whole_snapshot(self, run: Live | TrainState) -> Snapshot:
        lent = _lent(run)
        return self._with_streams(self._snapshot(run, lent), lent.rng)

    def _with_streams(self, snapshot: Snapshot, streams: Callable[[], Any] | None) -> Snapshot:
        """With what was only read so far; in the background it is the thread that does this."""
        if streams is None:
            return snapshot
        is_saved = self._components is None or "rng" in self._components
        return snapshot.with_own("rng", streams(), is_saved=is_saved)

    def _tell_committed(self, result: SaveResult) -> None:
        self._proofs += 1
        self._announcer.tell(
            "committed", step=result.step, checkpoint=result.checkpoint, detail=f"{result.size_bytes} bytes"
        )


def _lent(run: Live | TrainState) -> LiveView:
    return run.view() if isinstance(run, Live) else LiveView(run)


def _raising(error: Exception) -> Callable[[], Snapshot]:
    def take() -> Snapshot:
        raise error

    return take


@final
class raise_after:  # noqa: N801 (used as a function; a generator would cost each boundary ten times as much)
    """Raise what was added to the list at the end; what fails in between is raised first, with a note about each of them.

    Examples:
        >>> with raise_after() as failures:
        ...     failures.append(ValueError("the save before"))
        ...     print("the next one is begun")
        Traceback (most recent call last):
            ...
        ValueError: the save before
    """

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    def __enter__(self) -> list[Exception]:
        return self._failures

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _note(error, self._failures)
        elif self._failures:
            _note(self._failures[0], self._failures[1:])
            raise self._failures[0]


def _note(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"and besides: {error_text(other)}")
