"""`CheckpointManager`: saves a run when it is due, resumes it, and keeps the checkpoints that are worth keeping."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Literal, final

from trainfold.adapters.guards.first_save import FirstSave, HeldRun, look
from trainfold.adapters.guards.never_asked import NeverAsked
from trainfold.adapters.guards.rehearsal import rehearsal_of
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.arguments import (
    check_decision,
    check_run,
    check_source,
    flag,
    is_word_auto,
    one_of,
    policy_given,
    retention_given,
    room_given,
)
from trainfold.adapters.manager.auto_cadence import AutoCadence, teller_of
from trainfold.adapters.manager.config import CheckpointConfig, manager_arguments
from trainfold.adapters.manager.events import EventLog
from trainfold.adapters.manager.loading import RunLoader
from trainfold.adapters.manager.protocol import LoadDecision, Restored, SaveOutcome
from trainfold.adapters.manager.retention import Pruner
from trainfold.adapters.manager.saving import SaveRunner, raise_after
from trainfold.adapters.manager.triggers import SaveTriggers
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.ranks.launcher import world_given
from trainfold.backends.runs import api as runs
from trainfold.backends.runs.save import SaveResult
from trainfold.backends.runs.scan import check_place
from trainfold.backends.runs.snapshot import step_of_state
from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.wakeup import Latch
from trainfold.core.checks import mapping_given
from trainfold.core.errors import InvalidArgument, InvalidState, ResumeRefused, RunLocked, error_text
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.drift import DriftAction, check_policy
from trainfold.core.save.events import Event
from trainfold.core.save.replicas import LEVELS, Level, level_of
from trainfold.core.save.retention import Retention
from trainfold.core.save.triggers import Verdict, make_triggers
from trainfold.core.state.components import check_likely, validate_components
from trainfold.core.state.contract import checked_contract
from trainfold.core.state.state import TrainState

_RUNS: Final = Live | TrainState
_LOG = logging.getLogger("trainfold")


@final
class CheckpointManager:
    """Saves and resumes one run.

    It holds the run's lock from its making until `close`, so that no second process writes into the run. Before each
    save it looks whether the lock is still its own: a forked child is refused (`RunLocked`), and so is a save into a
    directory that was removed or replaced meanwhile (`RunReplaced`).

    With ``mode="async"`` a save returns at once, and a thread writes while the loop goes on. Nothing is copied that only an
    update writes to: parameters, slots of attached optimizers, the leaves of a state. Before the next update, be it a step of
    an attached optimizer or a donating step, what is not written yet is copied within ``max_extra_bytes`` and else waited
    for; what changes at other moments (buffers, an average of the weights) is copied in the call, and random streams are read in
    it. Both modes write the same bytes (D01).

    Args:
        run: a directory, or a store.
        every: save at each multiple of so many optimizer steps; None for no such cadence. ``"auto"``, the default, chooses one by what
            a save costs and how long a step takes, and logs it: the first save is due after a minute. Where ``every_secs`` is
            given, it is that cadence alone.
        every_secs: save when so many seconds have passed since the last save, by rank 0's clock; None for no such cadence.
        at_end: whether `step` with ``is_last`` and `finish` save the state that the run ends with.
        start_over: whether this program starts from the beginning on purpose, in a run that has checkpoints. They are left behind
            in a timeline of their own. Without it, a first save of what was not restored from the run is refused. Leave it out of a
            command that restarts by itself: it would start over each time.
        keep_last: keep so many of the newest complete checkpoints; 0 or None for all (E01). What ``save_best`` named stays
            beside them (E02); a save of some components takes no place of a whole one (V06).
        keep: what else to keep, such as ``keep_every(10_000)``; the newest one and those that a rule keeps stay (E07).
        keep_left_behind: what to keep of the checkpoints that rewinds have left behind, such as ``keep_newer(7 * 86_400)``; None for all
            of them. What a pointer or ``best.json`` names stays.
        mode: ``"sync"``: a save is durable when it returns; or ``"async"``.
        max_extra_bytes: memory that an async save may take beside the state; None for as much as the state; 0: an update waits
            until everything is written. 8 MiB of it are the writer's. What changes at any moment and has no room is waited for
            in the call; up to 1 MiB of it is copied in any case.
        hold_check: for an async save: digest what it holds in the call and again before the commit, so that a writer that neither
            a hook nor a version counter shows fails the save by name, and nothing torn is committed (W16). It costs two readings of
            the state in each save; turn it on to try a loop.
        replica_check: how much of what all ranks are to have alike is compared (B06): ``"quick"``, everything at the first save, and
            then a piece of each tensor, so that 16 saves compare all of it; ``"tensor"``, everything at each save; ``"full"``, that, and
            after each restore too; ``"none"``, only structures and contracts: replicas that have drifted apart are saved as rank 0 and
            others happen to have them.
        when_busy: what a save does while another one is under way: ``"wait"`` for it, or ``"skip"`` (D04), which leaves its
            cadence due; the best so far and the last state wait, because they do not come again.
        components: which components are saved and restored; None for all.
        policy: what to do about each kind of difference at a resume; see ``trainfold.plan``.
        contract: what must be equal at a resume, beside what the state, or the live run, says itself.
        requests: where requests to save or to stop come from on this rank, such as `SignalRequests()`, or `StopFile(run)`, which
            rank 0 alone makes; closed with the manager.
        on_event: is told each `Event`, in the thread that calls the manager; what it raises is logged.
        collectives: the ranks, each of which has its own manager and makes the same calls; None for a single process, which is refused
            where torch.distributed or a launcher has several: say ``SingleProcess()`` if this rank saves alone on purpose.

    Raises:
        InvalidArgument: for an argument that cannot be; nothing was touched.
        UnknownComponent: for a name in ``components`` that is all but that of a built-in one.
        UnsupportedLeaf: for a value of the contract that has no exact form.
        CheckpointForeign: if the place holds something else than a run; nothing is written there.
        RunLocked: if another process saves into this run.
        SaveFailed: if the place cannot be read or written to, or the subclass that fits.

    Examples:
        >>> import torch, trainfold
        >>> from trainfold.adapters.live.live import attach
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> store = MemoryStore()
        >>> with CheckpointManager(store, every=2, keep_last=1) as manager:
        ...     live = attach(torch.nn.Linear(1, 1))
        ...     fresh = manager.restore(live).is_fresh
        ...     saved = [manager.step(live) for _ in range(4) if live.advance(samples=1)]
        >>> fresh, [outcome and outcome.step for outcome in saved]
        (True, [None, 2, None, 4])
    """

    _is_open = False
    # the id of what was being handled when it was made; not the exception itself, which keeps frames
    _handled: int | None = None
    _let_go: Latch | None = None  # so that close works whatever failed before (D07)

    def __init__(  # noqa: PLR0913 (one keyword for each decision)
        self,
        run: runs.Run,
        *,
        every: int | Literal["auto"] | None = "auto",
        every_secs: float | None = None,
        at_end: bool = True,
        start_over: bool = False,
        keep_last: int | None = None,
        keep: Retention | None = None,
        keep_left_behind: Retention | None = None,
        mode: Literal["sync", "async"] = "sync",
        max_extra_bytes: int | None = None,
        hold_check: bool = False,
        replica_check: Level = "quick",
        when_busy: Literal["wait", "skip"] = "wait",
        components: Sequence[str] | None = None,
        policy: Mapping[str, DriftAction] | None = None,
        contract: Mapping[str, Any] | None = None,
        requests: RequestSource | None = None,
        on_event: Callable[[Event], object] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self._handled = id(sys.exc_info()[1])
        let_go, kept = Latch(), list[ExitStack]()  # the saves keep the latter, which gets the lock when all is made
        with ExitStack() as making:
            making.callback(let_go.tell)  # the first is the last to be called
            if requests is not None:
                check_source(requests)
                making.callback(requests.close)  # signals that nobody takes any more must not stay caught
            world = world_given(collectives, os.environ, where="CheckpointManager.collectives")
            self._rehearsal = rehearsal_of(os.environ, rank=world.rank)
            if self._rehearsal is not None:
                run, on_event = self._rehearsal.place(run), self._rehearsal.listener(on_event)
                every, every_secs, at_end = self._rehearsal.orders.every, None, True
            is_async = one_of("mode", mode, ("sync", "async")) == "async"
            level = level_of(one_of("replica_check", replica_check, tuple(LEVELS)))
            self._skips = one_of("when_busy", when_busy, ("wait", "skip")) == "skip"
            is_auto = is_word_auto(every)
            triggers = make_triggers(
                every=None if isinstance(every, str) else every, every_secs=every_secs, at_end=at_end
            )
            retention = retention_given(keep_last, keep)
            if self._rehearsal is not None:
                retention = self._rehearsal.retention(retention)
            left_behind = None if keep_left_behind is None else policy_given("keep_left_behind", keep_left_behind)
            room = room_given(max_extra_bytes)
            names, start_over = check_likely(components), flag("start_over", start_over)
            policy = check_policy(policy)
            agreed = checked_contract(mapping_given("contract", contract))
            self._pid = os.getpid()
            self._store = runs.open_store(run)

            def begin() -> HeldRun:
                with named_failures(self._store.url):
                    check_place(self._store)  # before the lock, which is a file
                    making.enter_context(self._store.lock())
                    return look(self._store)

            held = on_rank_zero(world, begin)
            self._components, self._names_are_known = names, names is None
            self._announcer = EventLog(self._store.url, on_event)
            self._resumer = RunLoader(self._store, world, names, policy, agreed, proves=level == "full")
            auto = AutoCadence(teller_of(self._announcer, world)) if is_auto and every_secs is None else None
            self._due = SaveTriggers(triggers, requests, world, auto=auto)
            self._asked = NeverAsked(self._store.url)
            self._first = FirstSave(self._store, world, held, start_over=start_over, components=names)
            self._saves = SaveRunner(self._store, world, components=names, contract=agreed, is_async=is_async, room=room, hold_check=flag("hold_check", hold_check), replica_check=level, due=self._due,
                                first=self._first, keeper=Pruner(self._store, retention, left_behind), announcer=self._announcer, held=kept)  # fmt: skip
            kept.append(making.pop_all())
        self._held, self._is_open, self._let_go = kept[0], True, let_go

    @classmethod
    def from_config(cls, config: CheckpointConfig, **extra: Any) -> "CheckpointManager":
        """The manager that a config describes; ``extra`` is what no config can hold, such as ``requests`` and ``collectives``."""
        return cls(config.run, **manager_arguments(config), **extra)

    # --- at a boundary -----------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether a boundary decided that the loop ends: it was asked to, or the step was the last (R01)."""
        return self._due.stops

    def step(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> SaveOutcome | None:
        """Do what is due at this boundary; call it after each ``live.advance()``, or with each new state.

        Inside an accumulation window nothing is saved; the boundary that closes it decides (A06).

        Args:
            run: the attached objects, or a state.
            is_last: whether the run ends here.
            is_best: whether this state was found to be the best so far, and so is to be saved (E10).

        Returns:
            What was saved, or None; `should_stop` says whether the loop ends.

        Raises:
            IncompleteWindow: if a save is due, and the run is not at a boundary; or, whether one is due or not, if an optimizer has
                stepped and `Live.advance` has not counted it.
            RunNotRestored: if the run has checkpoints, and nothing of them was restored.
            SaveFailed: if this save failed, or one before it in the background, and then what is due was done all the same; the
                checkpoints before are untouched.
        """
        self._check_open()
        self._check_run(run)
        self._asked.asked()
        if isinstance(run, Live):
            if run.is_in_window:
                if is_last:
                    run.check_boundary()  # says how to give the window up: the run's last state must not be lost in silence
                return None
            run.check_counted()
        self._saves.check_first(run)
        with raise_after() as failures:
            verdict = self._decide(run, failures, is_last=is_last, is_best=is_best)
            if verdict.save:
                may_skip = self._skips and not verdict.stop and "best" not in verdict.reasons
                return self._save(run, failures, may_skip=may_skip)
            self._due.answered()
            if self._rehearsal is not None:
                self._rehearsal.ends(run, self.drain)
            return None

    def should_save(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> Verdict:
        """Say what is due at this boundary, and why; one decision for all ranks (R01, R02).

        Requests that have come are remembered until a save or a stop has answered them (P29). A save that has ended in the
        background is told of, as by `poll`.
        """
        self._check_open()
        self._check_run(run)
        self._asked.asked()
        with raise_after() as failures:
            return self._decide(run, failures, is_last=is_last, is_best=is_best)

    def finish(self, run: Live | TrainState) -> SaveOutcome | None:
        """Save the state that the run ends with, unless it is saved already (A14); wait until all is durable.

        A run that was asked to abort is not saved (R02).

        Call it when the loop is over, however it ended: no more data, the last step, a request to stop (T53, M48, M49).

        Returns:
            What was saved now, or None.

        Raises:
            SaveFailed: if it failed; or if a save before it did and nobody was told yet: the last state is durable then.
        """
        self._check_open()
        with raise_after() as failures:
            self._saves.end_previous(failures)
            outcome = None if self._due.is_aborted else self.step(run, is_last=True)
            self.drain()
            return outcome

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, run: Live | TrainState) -> SaveOutcome:
        """Save now, whether it is due or not.

        Args:
            run: the attached objects, at a boundary; or a state.

        Returns:
            What was done.

        Raises:
            IncompleteWindow: if the live run is not at a boundary.
            RunNotRestored: if the run has checkpoints, and nothing of them was restored.
            SaveFailed: if it failed, or the one before did, and then this one was begun all the same; the earlier checkpoints are
                untouched.
        """
        self._check_open()
        self._check_run(run)
        self._asked.asked()
        with raise_after() as failures:
            return self._save(run, failures, may_skip=self._skips)

    def wait_staging(self) -> None:
        """Return when everything that was saved may be written to.

        The optimizers of a live run and donating steps call it themselves; a loop that writes to parameters, slots or leaves
        by other means calls it before (D02).
        """
        self._saves.protect()

    def poll(self) -> SaveResult | None:
        """Say how the save in the background ended, if it has ended on every rank; every rank calls this (D08).

        Returns:
            What was saved, or None if nothing has ended since the last call.

        Raises:
            SaveFailed: if it failed; told once (D05).
        """
        self._check_open()
        return self._saves.end() if self._saves.has_ended_everywhere() else None

    def drain(self) -> SaveResult | None:
        """Wait until the save in the background, if there is one, has ended; what is old by then is deleted a moment later.

        Returns:
            What was saved, or None if nothing was under way.

        Raises:
            SaveFailed: if it failed; told once (D05).
        """
        self._check_open()
        result = self._saves.end() if self._saves.is_under_way else None
        self._announcer.tell_left()
        return result

    def close(self) -> None:
        """Wait for the save under way and let go of the run; calling it again does nothing (D07).

        It saves nothing new: the last state is saved by `finish`, or by a call of `step` or `save` before.

        Raises:
            SaveFailed: if the save in the background failed and nobody was told yet; the run is let go of all the same. Where another
                exception is on its way, in a ``finally`` say, or is handled, it is logged, and becomes a note on that one.
        """
        primary = sys.exc_info()[1]
        self._close_after(None if id(primary) == self._handled else primary)

    def _close_after(self, primary: BaseException | None) -> None:
        try:
            self._close()
        except Exception as failure:
            if primary is None:
                raise
            _LOG.exception("%s: the save under way failed", self._store.url)  # it must not mask what ended the loop
            primary.add_note(f"while this was on its way, a save failed: {error_text(failure)}")

    def _close(self) -> None:
        # a forked child has neither the thread nor the lock
        if self._let_go is None or self._let_go.is_over or os.getpid() != self._pid:
            return
        self._check_not_telling()
        self._asked.closing()
        with raise_after() as failures:
            # where it is interrupted, the manager stays open: it is still being written
            self._saves.end_previous(failures)
            self._saves.close()
            self._is_open = False
            try:
                with self._held:  # where this is interrupted, closing it again lets go of what is left
                    self._announcer.tell_left()
            except Exception as error:  # noqa: BLE001  # raised below, after what a save has to say
                failures.append(error)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """Say whether there is something to resume, from where, and how; loads nothing. A save under way is waited for.

        Args:
            run: what would be loaded into.
            step: an explicit step; None for the newest.

        Returns:
            The decision; true if there is something that can be loaded.

        Raises:
            SaveFailed: if a save was under way and failed.
        """
        self._check_open()
        self._check_run(run)
        if self._first.start_over:
            return LoadDecision(
                can_load=False, step=step, reason="start_over=True: it starts from the beginning on purpose"
            )
        self._saves.settle()  # what is decided for must be there afterwards, and be the newest
        return self._resumer.decide(run, step=step)

    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Load what was decided, or the newest there is.

        Args:
            run: what to load into; it is unchanged if anything is wrong.
            decision: what `should_load` returned; None for the newest.

        Returns:
            A new state; or, for a live run, which is written in place, what was done.

        Raises:
            InvalidArgument: for a decision that there is nothing to load, that another manager has made, or for the newest where a
                newer one is there now.
            SaveFailed: if a save was under way and failed.
            ResumeRefused: with every reason why a resume would not be exact, or if there is nothing to resume.
            RestoreRefused: if the live objects cannot take the state.
        """
        self._check_open()
        self._check_run(run)
        asked = None if decision is None else self._decided(run, decision)
        state = self._load(run, asked, None)
        return self._restored(run) if isinstance(run, Live) else state

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None) -> Restored:
        """Make a live run what its newest whole checkpoint says; where there is none, leave it as it is.

        Args:
            live: the attached objects; unchanged if anything is wrong (V12).
            step: an explicit step; one that is not there is an error (V02).
            reset: component -> why it starts anew on purpose.

        Returns:
            What was done. It is logged as well: a fresh start as a warning, which Python shows by default, because a
            path that was mistyped looks the same.

        Raises:
            InvalidArgument: for an argument that cannot be.
            ResumeRefused: with every reason why a resume would not be exact.
            RestoreRefused: if the live objects cannot take the state.
            SaveFailed: if a save was under way and failed.
        """
        self._check_open()
        check_run(live, Live)
        self._check_run(live)
        if self._first.start_over:
            return self._started_over(live, step, reset)
        try:
            self._load(live, step, mapping_given("reset", reset))
        except ResumeRefused as refused:
            if step is not None or not refused.refusal.finds_nothing:
                raise
            _LOG.warning("%s holds no checkpoint: the run starts fresh", self._store.url)
            self._asked.watch(live)
            return Restored(self._store.url, live.progress.step, is_fresh=True)
        return self._restored(live)

    def load_best(self, run: Live | TrainState) -> TrainState | Restored:
        """Load the weights of the best checkpoint, and nothing else: optimizer, counters and position stay (E15).

        Args:
            run: what to load into, at the end of a run, say.

        Returns:
            A new state; or, for a live run, which is written in place, the step that the weights are of.

        Raises:
            InvalidState: if `save_best` has recorded none.
            ResumeRefused: if the best checkpoint does not fit.
        """
        self._check_open()
        self._check_run(run)
        self._saves.settle()
        state, step = self._resumer.load_best(run)
        self._announcer.tell("restored_best", step=step, detail="its weights, and nothing else")
        return Restored(self._store.url, step, is_fresh=False) if isinstance(run, Live) else state

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close_after(error)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _started_over(self, live: Live, step: int | None, reset: Mapping[str, str] | None) -> Restored:
        if step is not None or reset:
            raise InvalidArgument("start_over", expected="False, to restore a step, or all but a component", found="True",
                                  fix="leave start_over=True out")  # fmt: skip
        self._asked.watch(live)
        left = self._first.left_behind
        _LOG.warning("%s: starts over on purpose; %d checkpoints are left behind", self._store.url, left)
        return Restored(self._store.url, live.progress.step, is_fresh=True)

    def _decided(self, run: Live | TrainState, decision: LoadDecision) -> int | None:
        """The step that a decision asks for; None for the newest, if that is still the one that it was made for."""
        check_decision(decision)
        if decision.source == "step":
            return decision.step
        now = self.should_load(run)
        if now.checkpoint != decision.checkpoint:
            raise InvalidArgument("decision", expected=f"{decision.checkpoint}, the newest when it was made", found=f"{now.checkpoint} is the newest",
                                  fix="call should_load again; with step= it is for one checkpoint, whatever comes after")  # fmt: skip
        return None

    def _load(self, run: Live | TrainState, step: int | None, reset: Mapping[str, str] | None) -> TrainState:
        self._saves.settle()
        if self._rehearsal is not None:
            self._rehearsal.watch(run)
        try:
            state = self._resumer.load(run, step=step, reset=reset)
        except ResumeRefused as refused:
            if step is not None or not refused.refusal.finds_nothing:
                self._announcer.tell("refused", step=step, detail=str(refused))
            raise
        step = None if state.trainer is None else state.trainer.step
        self._due.loaded(step)
        self._first.loaded(run, step)
        self._saves.descends_from = self._resumer.descent
        self._announcer.tell("restored", step=step)
        if self._components is not None and "trainer" not in self._components:
            _LOG.warning(
                "%s: of its checkpoint at step %s only %s is restored, because this manager has components=; the run counts from step %d, "
                "and everything else is as the script made it",
                self._store.url,
                "?" if self._resumer.descent is None else self._resumer.descent.step,
                ", ".join(self._components),
                run.progress.step if isinstance(run, Live) else 0,
            )
        return state

    def _restored(self, live: Live) -> Restored:
        self._asked.watch(live)
        return Restored(self._store.url, live.progress.step, is_fresh=False)

    def _save(self, run: Live | TrainState, failures: list[Exception], *, may_skip: bool) -> SaveOutcome:
        auto, rehearsal, began = self._due.auto, self._rehearsal, time.monotonic()
        if rehearsal is not None:
            rehearsal.begins_save(run)
        outcome = self._saves.save(run, failures, may_skip=may_skip)
        if rehearsal is not None:
            rehearsal.ends(run, self.drain)
        if auto is not None and outcome.status != "skipped":
            auto.begun(time.monotonic() - began, is_durable=outcome.status == "written")
            auto.leave(outcome.step)
        return outcome

    def _decide(self, run: Live | TrainState, failures: list[Exception], *, is_last: bool, is_best: bool) -> Verdict:
        if self._rehearsal is not None:
            is_last = self._rehearsal.is_last(run) or is_last
        step = run.progress.step if isinstance(run, Live) else step_of_state(run)
        auto = self._due.auto
        if auto is not None:
            auto.arrive(step)
        mine = self._due.here(step, is_last=is_last, is_best=is_best, has_ended=self._saves.has_ended)
        boundary = self._due.agreed(mine)
        if boundary.has_ended:
            self._saves.end_previous(failures)
        if auto is not None:
            if boundary.has_ended:
                auto.ended()
            auto.leave(step)
        return self._due.decide(boundary)

    def _check_run(self, run: Live | TrainState) -> None:
        check_run(run, _RUNS)
        if not self._names_are_known:  # of the first run that it sees: what is declared later is looked at by its save
            validate_components(self._components, declared=run.names if isinstance(run, Live) else tuple(run.extra))
            self._names_are_known = True

    def _check_not_telling(self) -> None:
        if self._announcer.is_telling:
            raise InvalidState(
                "CheckpointManager",
                expected="a call from the loop",
                found="one from on_event",
                fix="remember what is to be done, and do it when the manager's call has returned",
            )

    def _check_open(self) -> None:
        if self._is_open:
            self._check_not_telling()
            if os.getpid() != self._pid:
                raise RunLocked(
                    self._store.url,
                    expected=f"process {self._pid}, which made the manager",
                    found=f"process {os.getpid()}, which was forked from it",
                    fix="save there, or make a manager in this process when the other one is closed",
                )
        else:
            raise InvalidState(
                "CheckpointManager",
                expected="an open manager",
                found="a closed one",
                fix="make another manager for the run",
            )
