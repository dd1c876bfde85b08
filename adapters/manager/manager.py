"""`CheckpointManager`: saves a run when it is due, resumes it, and deletes checkpoints that no rule keeps."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final, overload

from trainfold.adapters.flight.flight_recorder import flight_recorder
from trainfold.adapters.flight.pure_steps import B, PureStep, S
from trainfold.adapters.guards.first_save import FirstSave
from trainfold.adapters.guards.rehearsal import rehearsal_of
from trainfold.adapters.guards.unused_manager import UnusedManager
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager import arguments as given
from trainfold.adapters.manager.config import CheckpointConfig, manager_arguments
from trainfold.adapters.manager.lease import RunLease, raise_after
from trainfold.adapters.manager.loading import LoadRunner, RunLoader
from trainfold.adapters.manager.protocol import LoadDecision, Restored, SaveOutcome
from trainfold.adapters.manager.saving import SaveRunner
from trainfold.adapters.manager.triggers import SaveTriggers, auto_cadence
from trainfold.adapters.requests.sources import RequestSource
from trainfold.backends.event_log import EventLog
from trainfold.backends.ranks.launcher import world_given
from trainfold.backends.runs.commit import SaveResult
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.checks import mapping_given
from trainfold.core.component_names import check_likely
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.drift import DriftAction, check_policy
from trainfold.core.save.events import Event
from trainfold.core.save.replicas import Level
from trainfold.core.save.retention import Retention
from trainfold.core.save.triggers import Verdict
from trainfold.core.state.contract import checked_contract
from trainfold.core.state.state import TrainState
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.source import WeightSource


@final
class CheckpointManager:
    """Saves and resumes one run.

    It holds the run's lock until `close`, and checks before each save that the lock is still its own. With ``mode="async"`` a save
    returns at once, and a thread writes the same bytes while the loop continues; see :doc:`/how-to/save-without-stalling`.

    Args:
        run: a directory, or a store.
        every: save at each multiple of so many optimizer steps; None for no such cadence. ``"auto"`` chooses one from what a save costs and how
            long a step takes, and logs it; the first save is due after a minute. With ``every_secs`` that is the only cadence.
        every_secs: save when so many seconds have passed since the last save, by rank 0's clock; None for no such cadence.
        at_end: whether `step` with ``is_last`` and `finish` save the last state.
        start_over: whether this program starts from the beginning on purpose, and leaves the run's checkpoints behind in a timeline of their own.
            Leave it out of a command that restarts by itself: it would start over each time.
        keep_last: keep so many of the newest complete checkpoints, beside what ``save_best`` named; 0 for all, and so does None unless ``keep`` is given.
        keep: what to keep, or what else, such as ``keep_every(10_000)``. The newest checkpoint is always kept.
        keep_left_behind: what to keep of the checkpoints that rewinds have left behind; None for all.
        mode: ``"sync"``: a save is durable when it returns; or ``"async"``.
        max_extra_bytes: memory that an async save may use beside the state, 8 MiB of it for the writer; None for as much as the state.
            With 0 an update waits until everything is written.
        hold_check: whether an async save finds writers that neither a hook nor a version counter shows. It reads the state twice more.
        check_replicas: what is compared of what ranks should have alike. ``"quick"``: all at the first save, then a 16th of each tensor; ``"tensor"``: all
            at each save; ``"full"``: also after each restore; ``"none"``: only structures and contracts. A number: also all, each so many steps, in the background.
        reuse_unchanged: whether a save writes only leaves that have changed, and refers to earlier checkpoints, which then stay, for the others.
        when_busy: what a save does while another is under way: ``"wait"`` for it, or ``"skip"``, which leaves its cadence due; best and last wait.
        components: which components are saved and restored; None for all.
        policy: what to do about each kind of difference at a resume; see ``trainfold.plan``.
        contract: what must be equal at a resume, beside what the run says itself.
        record: write a flight log and a journal of the run beside its checkpoints, with digests of the state each so many steps, 0 for none; see `trainfold page` and `bisect`.
        requests: where requests to save or to stop come from on this rank, such as `SignalRequests()`; closed with the manager.
        on_event: gets each `Event`, in the thread that calls the manager; an exception of it is logged.
        collectives: the ranks, each of which has its own manager and makes the same calls; None for a single process, which is refused
            where torch.distributed or a launcher has several. Pass ``SingleProcess()`` if this rank saves alone on purpose.

    Raises:
        InvalidArgument: for an invalid argument; nothing was touched. UnknownComponent: for a name that nearly is that of a built-in component.
        UnsupportedLeaf: for a value of the contract that has no exact form. CheckpointForeign: if the place holds something other than a run; nothing is written there.
        RunLocked: if another process saves into this run. RanksDisagree: if some ranks have another cadence or mode, or other components.
        SaveFailed: if the place cannot be read or written, or the subclass that fits.

    Examples:
        >>> import torch, trainfold
        >>> from trainfold.stores import MemoryStore
        >>> with CheckpointManager(MemoryStore(), every=2, keep_last=1) as manager:
        ...     live = trainfold.attach(torch.nn.Linear(1, 1))
        ...     fresh = manager.restore(live).is_fresh
        ...     saved = [manager.step(live) for _ in range(4) if live.advance(samples=1)]
        >>> fresh, [outcome and outcome.step for outcome in saved]
        (True, [None, 2, None, 4])
    """

    _lease, _how = RunLease(None), ""  # `close` and `repr` work whatever failed before

    def __init__(  # noqa: PLR0913 (one keyword for each decision)
        self,
        run: Run,
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
        check_replicas: Level | int = "quick",
        reuse_unchanged: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        components: Sequence[str] | None = None,
        policy: Mapping[str, DriftAction] | None = None,
        contract: Mapping[str, Any] | None = None,
        record: int | None = None,
        requests: RequestSource | None = None,
        on_event: Callable[[Event], object] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        given.check_requests(requests)
        with RunLease(requests) as lease:
            world = world_given(collectives, os.environ, where="CheckpointManager.collectives")
            rehearsal = rehearsal_of(os.environ, rank=world.rank)
            retention = given.retention_given(keep_last, keep)
            if rehearsal is not None:
                run, on_event = rehearsal.place(run), rehearsal.listener(on_event)
                retention = rehearsal.retention(retention)
                every, every_secs, at_end, record = rehearsal.orders.every, None, True, rehearsal.records(record)
            triggers, is_auto = given.triggers_given(every, every_secs, at_end=at_end)
            left_behind = None if keep_left_behind is None else given.policy_given("keep_left_behind", keep_left_behind)
            names, start_over = check_likely(components), given.flag("start_over", start_over)
            policy, agreed = check_policy(policy), checked_contract(mapping_given("contract", contract))
            options = given.save_options(components=names, contract=agreed, mode=mode, when_busy=when_busy, max_extra_bytes=max_extra_bytes,
                                   hold_check=hold_check, check_replicas=check_replicas, reuse_unchanged=reuse_unchanged)  # fmt: skip
            store = open_store(run)
            first = FirstSave(store, world, lease.take(store, world), start_over=start_over, components=names)
            self._events = events = EventLog(store.url, on_event, logs=world.rank == 0)
            lease.before_release(events.report_deferred)
            auto = auto_cadence(events, world) if is_auto else None
            self._due = due = SaveTriggers(triggers, requests, world, auto=auto, alike=given.alike(options, every, every_secs, at_end=at_end, place=store.url))  # fmt: skip
            self._asked = asked = UnusedManager(store.url)
            self._saves = SaveRunner(store, world, options, due=due, first=first, events=events, rehearsal=rehearsal, lease=lease,
                                     flight=flight_recorder(store, world.rank, record, rehearsal and rehearsal.orders), pruner=Pruner(store, retention, left_behind))  # fmt: skip
            self._loads = LoadRunner(RunLoader(store, world, names, policy, agreed, proves=options.check_replicas == "full"), self._saves, due, first, asked, events, rehearsal)  # fmt: skip
            self._check_run = given.RunCheck(names)
            self._how = f"{store.url!r}, {mode}, {given.cadence_text(every, every_secs)}, keep: {retention}"
        self._lease = lease

    @classmethod
    def from_config(cls, config: CheckpointConfig, **extra: Any) -> "CheckpointManager":
        """The manager that a config describes; ``extra`` is what a config cannot hold, such as ``requests`` and ``collectives``."""
        return cls(config.run, **manager_arguments(config), **extra)

    def __repr__(self) -> str:
        parts = [self._how, self._saves.describe()] if self._how else []
        return f"CheckpointManager({'; '.join(parts + ([] if self._lease.is_open else ['closed']))})"

    @property
    def should_stop(self) -> bool:
        """Whether a boundary decided that the loop ends: on request, or because the step was the last."""
        return self._due.stops

    def step(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> SaveOutcome | None:
        """Do what is due at this boundary. Call it after each ``live.advance()``, or with each new state.

        Args:
            run: the attached objects, or a state. Inside an accumulation window nothing is saved; the boundary that closes it decides.
            is_last: whether the run ends here.
            is_best: whether this state is the best so far, and is to be saved.

        Returns:
            What was saved, or None; `should_stop` says whether the loop ends.

        Raises:
            IncompleteWindow: if a save is due inside a window, or an optimizer has stepped and `Live.advance` has not counted it.
            RunNotRestored: if the run has checkpoints, and none was restored. RanksDisagree: if ranks for which this one waits have closed their managers.
            SaveFailed: if this save failed; or the one before, in the background: then what is due was done all the same. RanksDisagree: if replicas differ.
        """
        self._check(run)
        if isinstance(run, Live):
            if run.is_in_window:
                if is_last:
                    run.check_boundary()  # raises how to drop the window: the last state must not be lost in silence
                return None
            run.check_counted()
        self._saves.check_first(run)
        with raise_after() as failures:
            verdict = self._saves.decide(run, failures, is_last=is_last, is_best=is_best)
            try:
                if verdict.save:
                    return self._saves.begin(run, failures, may_skip=not verdict.stop and not verdict.must_save)
                self._saves.pass_by(run)
                return None
            finally:
                self._saves.leave(run)

    def should_save(self, run: Live | TrainState, *, is_last: bool = False, is_best: bool = False) -> Verdict:
        """Decide what is due at this boundary, and why; one decision for all ranks. It answers no request, and collects an ended save."""
        self._check(run)
        with raise_after() as failures:
            verdict = self._saves.decide(run, failures, is_last=is_last, is_best=is_best)
            self._saves.leave(run)
            return verdict

    def finish(self, run: Live | TrainState) -> SaveOutcome | None:
        """Save the last state, unless it is saved already or a request aborted the run; then wait until all is durable.

        Call it when the loop is over, however it ended: no more data, the last step, a request to stop. It returns what was saved now.

        Raises:
            SaveFailed: if it failed; or if a save before it did. Then the last state is durable.
        """
        self._check()
        with raise_after() as failures:
            self._saves.end_previous(failures)
            outcome = None if self._due.is_aborted else self.step(run, is_last=True)
            self._saves.finish()
            return outcome

    def save(self, run: Live | TrainState) -> SaveOutcome:
        """Save the attached objects, at a boundary, or a state now, whether it is due or not.

        Raises:
            IncompleteWindow: if the live run is not at a boundary. RunNotRestored: if the run has checkpoints, and none of them was restored.
            SaveFailed: if this save failed; or the one before, in the background: then this one was started all the same.
        """
        self._check(run)
        with raise_after() as failures:
            return self._saves.begin(run, failures)

    def recorded(self, step: PureStep[S, B]) -> PureStep[S, B]:
        """The same pure step, which with ``record=`` also writes what it did, as `FlightLog.recorded` does: of a loop of states, the manager sees no batch."""
        return self._saves.recorded(step)

    def wait_staging(self) -> None:
        """Return when what is being saved may be written to. Optimizers and donating steps call it; call it before other writes to parameters, slots or leaves."""
        self._saves.protect()

    def poll(self) -> SaveResult | None:
        """Return what was saved in the background if that has ended on every rank, else None; every rank calls. It does not wait.

        Raises:
            SaveFailed: if it failed; raised once.
        """
        self._check()
        return self._saves.poll()

    def drain(self) -> SaveResult | None:
        """Wait for the save in the background, and return what it saved; None if none was under way.

        Raises:
            SaveFailed: if it failed; raised once.
        """
        self._check()
        return self._saves.wait()

    def close(self) -> None:
        """Wait for the save under way and release the run; calling it again does nothing. It saves nothing new: see `finish`.

        Raises:
            SaveFailed: if the save in the background failed; the run is released all the same. While another exception is handled, it is logged, and a note on that.
        """
        self._lease.close(self._end, primary=self._lease.in_flight())

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._due.explain(error)
        self._lease.close(self._end, primary=error)

    def should_load(self, run: Live | TrainState, *, step: int | None = None) -> LoadDecision:
        """Decide whether there is something to load, from where, and how; loads nothing. It waits for a save under way.

        Args:
            run: what would be loaded into.
            step: an explicit step; None for the newest.
        """
        self._check(run, asks=False)
        return self._loads.decide(run, step=step)

    @overload
    def load(self, run: Live, decision: LoadDecision | None = None) -> Restored: ...
    @overload
    def load(self, run: S, decision: LoadDecision | None = None) -> S: ...
    @overload
    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored: ...
    def load(self, run: Live | TrainState, decision: LoadDecision | None = None) -> TrainState | Restored:
        """Load what was decided, or the newest checkpoint: return a new state, or write a live run in place and return what was done.

        Args:
            run: what to load into; unchanged if anything is wrong.
            decision: what `should_load` returned; None for the newest.

        Raises:
            InvalidArgument: for a decision not to load, for one of another manager, or for the newest if a newer one is there now. SaveFailed: if a save was under way and failed.
            ResumeRefused: with every reason why a resume would not be exact, or if there is nothing to resume. RestoreRefused: if the live objects cannot take the state.
        """
        self._check(run, asks=False)
        return self._loads.load(run, decision)

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None, in_place: bool = False,  # noqa: PLR0913
                initial: WeightSource | None = None, follow: Sequence[str] = (), transform: Transform | None = None) -> Restored:  # fmt: skip
        """Restore a live run from its newest whole checkpoint. If there is none, leave the run as it is, but for ``initial``, and log a warning.

        Args:
            live: the attached objects; unchanged if anything is wrong.
            step: an explicit step; one that is not there is an error.
            reset: component -> why it starts fresh on purpose.
            in_place: read parameters, buffers and slots straight into their memory; if that fails, they hold two states, and the process must end.
            initial: the weights with which the run begins, such as ``trainfold.weights.HubDirectory(path)``; all else is as the script has it, at step 0, and masters
                are made of these weights. Once the run has a checkpoint of its own, it is ignored, and not asked.
            follow: names under ``extra`` that then come from where these weights come from, such as a tokenizer.
            transform: rules that give the tensors of the checkpoint the names that they have now; see ``trainfold.load``.

        Raises:
            InvalidArgument: for an invalid argument. InvalidState: if ``initial`` does not have the weights of this model; with every reason.
            HalfRestored: with ``in_place``, on every rank, if a read failed: end the process. The next one passes over a damaged checkpoint.
            ResumeRefused: with every reason why a resume would not be exact. RestoreRefused: if the live objects cannot take the state. SaveFailed: if a save was under way and failed.
        """
        self._check()
        self._check_run(live, kinds=Live)
        return self._loads.restore(live, step, reset, in_place=given.flag("restore.in_place", in_place), initial=initial, follows=follow, transform=transform)  # fmt: skip

    @overload
    def load_best(self, run: Live) -> Restored: ...
    @overload
    def load_best(self, run: S) -> S: ...
    def load_best(self, run: Live | TrainState) -> TrainState | Restored:
        """Load the weights of the best checkpoint as `load` does, and nothing else: optimizer, counters and position stay.

        Raises:
            InvalidState: if `save_best` has recorded none. ResumeRefused: if the best checkpoint does not fit.
        """
        self._check(run, asks=False)
        return self._loads.load_best(run)

    def _end(self, failures: list[Exception]) -> None:
        self._events.check_not_calling()
        self._asked.closing()
        self._due.close()
        self._saves.close(failures)

    def _check(self, run: Live | TrainState | None = None, *, asks: bool = True) -> None:
        """Check that the manager is open and the run is one of its kinds. ``asks`` is False for a call that never saves."""
        self._lease.check_open()
        self._events.check_not_calling()
        if run is not None:
            self._check_run(run)
            if asks:
                self._asked.asked()
