"""`RunLoader`: loads a run's checkpoints into a live run or a state; `LoadRunner`: does so for a manager."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import attrs

from trainfold.adapters.guards.first_save import FirstSave
from trainfold.adapters.guards.rehearsal import Rehearsal
from trainfold.adapters.guards.unused_manager import UnusedManager
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.arguments import check_decision
from trainfold.adapters.manager.protocol import LoadDecision, Restored, load_decision
from trainfold.adapters.manager.saving import SaveRunner
from trainfold.adapters.manager.triggers import SaveTriggers
from trainfold.adapters.outside.follow import check_follow, take_followers
from trainfold.adapters.parallel.share import share_of_rank
from trainfold.backends.event_log import EventLog
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.runs.best.best_reader import measured_best
from trainfold.backends.runs.load import Loaded, Quarantine, load_run, plan_load
from trainfold.backends.runs.snapshot import describe_state, prove_alike
from trainfold.backends.stores.protocol import Store
from trainfold.core.checks import mapping_given
from trainfold.core.errors import (
    HalfRestored,
    InvalidArgument,
    InvalidState,
    ResumeRefused,
    error_text,
    placed,
)
from trainfold.core.format.file_names import step_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.quarantine import outcome_of
from trainfold.core.layout.world import Collectives
from trainfold.core.resume.drift import Drift, DriftAction
from trainfold.core.resume.fall_back import decided, disagreement
from trainfold.core.resume.request import resume_request
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.save.reuse.base import NO_BASE, base_from
from trainfold.core.state.components import names_to_save
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import TrainState
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.several.source_text import described, why_ignored
from trainfold.core.weights.source import WeightSource

_LOG = logging.getLogger("trainfold")
_COMPONENTS = "CheckpointManager.components"


@final
@attrs.define(eq=False)
class RunLoader:
    """Loads a run's checkpoints.

    Attributes:
        store: the run, whose lock is held.
        collectives: the ranks.
        components: which components are restored; None for all.
        policy: what to do about each kind of difference.
        contract: what must be equal, beside what the run says itself.
        proves: whether the ranks compare what a restore has made.
        descent: the checkpoint that was loaded last, the same on every rank: what the state in memory descends from. None before
            the first load has succeeded. Loading the best weights alone does not change it.
        source: the manifest of that checkpoint, as this rank has opened it, and its directory, until they are taken.
        drifts: what differed at the last load, and was accepted.
    """

    store: Store
    collectives: Collectives
    components: tuple[str, ...] | None
    policy: Mapping[str, DriftAction] | None
    contract: Mapping[str, Any]
    proves: bool = attrs.field(default=False, kw_only=True)
    descent: ParentCheckpoint | None = attrs.field(default=None, init=False)
    source: tuple[Manifest | None, str] = attrs.field(default=(None, ""), init=False, repr=False)
    drifts: tuple[Drift, ...] = attrs.field(default=(), init=False, repr=False)

    def decide(self, run: Live | TrainState, *, step: int | None) -> tuple[LoadDecision, bool]:
        """Decide whether there is something to resume, and return whether there is something that is refused, too; loads nothing."""
        names, like, optional = self._like(run)
        request = resume_request(step=step, components=names, policy=self.policy, reset=_resets(run))
        outcome = plan_load(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives,
                            optional=optional)  # fmt: skip
        mine = load_decision(outcome, step=step)
        is_refused = isinstance(outcome, Refusal) and not outcome.finds_nothing
        told = self.collectives.gather((mine, decided(outcome), is_refused), doing="decide what to load")
        error = disagreement(self.store.url, [each for _, each, _ in told], outcome)
        if all(each for each, _, _ in told) and error is not None:
            raise error
        return next(((each, bad) for each, _, bad in told if not each), (mine, False))

    def load(
        self,
        run: Live | TrainState,
        *,
        step: int | None,
        reset: Mapping[str, str] | None,
        in_place: bool = False,
        transform: Transform | None = None,
    ) -> TrainState:
        """Load a state, and write it into a live run.

        Args:
            run: the live run, or a state like the one to load.
            step: an explicit step; None for the newest.
            reset: component -> why it starts fresh on purpose.
            in_place: whether the tensors of a live run are read straight into its memory; the result has meta tensors for them.
            transform: gives the tensors of the checkpoint other names.

        Raises:
            HalfRestored: if a read in place fails.
            ResumeRefused: with every reason why a resume would not be exact, or if there is nothing.
            RestoreRefused: if the live objects cannot take the state.
            RankFailed: if those of another rank cannot; it names the rank.
        """
        if isinstance(run, Live):
            run.check_resets(reset or ())
        names, like, optional = self._like(run)
        request = resume_request(
            step=step, components=names, policy=self.policy, reset=_resets(run) | dict(reset or {}), transform=transform
        )
        share = share_of_rank(run, self.collectives) if isinstance(run, Live) else None
        unread = run.may_stay_unread(names) if isinstance(run, Live) and in_place else None
        with placed(step=step):
            loaded = load_run(self.store, like=like, request=request, contract=self.contract, collectives=self.collectives,
                              quarantine=Quarantine(), share=share, unread=unread, optional=optional)  # fmt: skip
        if isinstance(run, Live):
            with placed(step=step_of(loaded.checkpoint)):
                with self._read_in_place(run, loaded, unread):
                    run.restore(loaded.state, components=names, policy=self.policy, collectives=self.collectives, without=loaded.left_out)  # fmt: skip
                if self.proves and self.collectives.world_size > 1:
                    prove_alike(lambda: describe_state(run.read(view=False).state, components=names), self.collectives)
        self.descent = loaded.descent
        is_renamed = loaded.manifest is not None and loaded.manifest.written is not None
        self.source = (None if is_renamed else loaded.manifest), loaded.checkpoint
        self.drifts = loaded.drifts
        return loaded.state

    @contextmanager
    def _read_in_place(self, run: Live, loaded: Loaded, unread: UnreadTensors | None) -> Iterator[None]:
        """Let the run read what was left unread, and then end the attempt to load, so that a damaged checkpoint is passed over next time."""
        run.unread, attempt, store = unread, Quarantine(), self.store
        try:
            yield
        except HalfRestored as error:
            if unread is not None and unread.outcome is not None:  # every rank knows how all have ended
                try:
                    attempt.end(store, self.collectives, loaded.checkpoint, unread.outcome)
                except Exception as late:  # noqa: BLE001 - that the objects hold parts of two states is what every rank has to hear
                    error.add_note(error_text(late))
            elif unread is not None:
                attempt.leave(store, self.collectives, loaded.checkpoint, error.__cause__ or error)
            raise
        except BaseException as error:
            if unread is not None:
                attempt.leave(store, self.collectives, loaded.checkpoint, error)
            raise
        else:
            if unread is not None:
                attempt.end(store, self.collectives, loaded.checkpoint, outcome_of(None))
        finally:
            run.unread = None

    def load_best(self, run: Live | TrainState) -> tuple[TrainState, int]:
        """Load the model of the checkpoint that ``best.json`` names, and nothing else; return the state and the best's step.

        Raises:
            InvalidState: if the run has no best, or a rewind has left it behind, or replaced it.
        """
        with placed(step=_step_of(run)):
            name = on_rank_zero(self.collectives, lambda: measured_best(self.store), doing="look for the best")
        if name is None:
            raise InvalidState(
                f"{self.store.url}/best.json", expected="a best", found="none", fix="call save_best first"
            )
        _, like, _ = self._like(run)
        step = step_of(name)
        assert step is not None  # the name was made from it
        request = resume_request(step=step, components=["model"], policy=self.policy)
        with placed(step=step):
            state = load_run(
                self.store, like=like, request=request, contract=self.contract, collectives=self.collectives
            ).state
            if isinstance(run, Live):
                run.restore(state, components=["model"], collectives=self.collectives)
        return state, step

    def names_of(self, run: Live | TrainState) -> tuple[str, ...] | None:
        """The components of a run that are restored; None for all."""
        return run.selected(self.components, where=_COMPONENTS) if isinstance(run, Live) else self.components

    def _like(self, run: Live | TrainState) -> tuple[tuple[str, ...] | None, TrainState, Mapping[str, str | None]]:
        """The components to load, the state to load them for, and the optional ones with why this rank cannot capture them, if it cannot."""
        if isinstance(run, TrainState):
            return names_to_save(run, self.components), run, {}
        names = self.names_of(run)
        run.check_selected(names, where=_COMPONENTS)
        run.will_save(names)
        if run.outside is not None and not run.outside.is_current:
            run.take_weights(self.collectives)  # first: their fingerprint is compared with the checkpoint's
        read = run.read(view=False)
        captured = read.state
        # This run does not want what is pending, or its settings, yet: `register` compares them.
        extra = {name: value for name, value in captured.extra.items() if name not in run.pending}
        theirs = tuple(f"attached.{name}." for name in run.pending)
        contract = {key: value for key, value in captured.contract.items() if not key.startswith(theirs)}
        if run.outside is not None:
            captured = run.outside.without(captured)
        optional = {name: read.left_out.get(name) for name in sorted(run.optional) if names is None or name in names}
        return names, captured.evolve(extra=extra, contract=contract), optional


@final
@attrs.define(eq=False)
class LoadRunner:
    """Loads for a manager: when nothing is being written, and so that its saves continue from what was loaded.

    Attributes:
        loader: reads the run.
        saves: the saves of the manager.
        due: what decides when to save.
        first: what is checked before the first save.
        asked: notices a loop that never calls the manager again.
        events: gets what happens.
        rehearsal: what `trainfold rehearse` changes; None without one.
    """

    loader: RunLoader
    saves: SaveRunner
    due: SaveTriggers
    first: FirstSave
    asked: UnusedManager
    events: EventLog
    rehearsal: Rehearsal | None

    def decide(self, run: Live | TrainState, *, step: int | None) -> LoadDecision:
        """Decide whether there is something to load; see `CheckpointManager.should_load`."""
        if self.first.start_over:
            reason = "start_over=True: it starts from the beginning on purpose"
            decision = LoadDecision(can_load=False, step=step, reason=reason)
        else:
            self.saves.settle()  # what it decides on must be there afterwards, and be the newest
            decision, is_refused = self.loader.decide(run, step=step)
            if (
                is_refused
            ):  # a loop that asks `if manager.should_load(state)` would start from scratch, and never hear why
                self._warn("%s: %s", self.loader.store.url, decision)
        if not decision and isinstance(run, Live):
            run.meet(self.loader.collectives)  # nothing is restored before the loop
        return decision

    def load(self, run: Live | TrainState, decision: LoadDecision | None) -> TrainState | Restored:
        """Load what was decided, or the newest; see `CheckpointManager.load`."""
        step = None if decision is None else self._decided_step(run, decision)
        state = self._load(run, step, None)
        return self._restored(run) if isinstance(run, Live) else state

    def restore(  # noqa: PLR0913 - those of the manager
        self,
        live: Live,
        step: int | None,
        reset: Mapping[str, str] | None,
        *,
        in_place: bool = False,
        initial: WeightSource | None = None,
        follows: Sequence[str] = (),
        transform: Transform | None = None,
    ) -> Restored:
        """Restore a live run, or start fresh; see `CheckpointManager.restore`."""
        if initial is not None:
            live.check_initial(initial)
        follows = check_follow(live, follows, initial, self.loader.names_of(live))
        if self.first.start_over:
            return self._start_over(live, step, reset, initial, follows)
        try:
            self._load(live, step, mapping_given("reset", reset), in_place=in_place, transform=transform)
        except ResumeRefused as refused:
            if step is not None or not refused.refusal.finds_nothing:
                raise
            is_fresh = True
        else:
            is_fresh = False
        # not above, where its errors would seem to come from a refusal
        if is_fresh:
            return self._begin(live, initial, follows, "holds no checkpoint: the run starts fresh")
        ignored = () if initial is None else (why_ignored(initial),)
        if ignored and self.loader.collectives.rank == 0:
            _LOG.info("%s: initial weights ignored: %s", self.loader.store.url, *ignored)
        return attrs.evolve(self._restored(live), ignored=ignored)

    def _begin(self, live: Live, initial: WeightSource | None, follows: Sequence[str], why: str) -> Restored:
        """Start fresh, with the weights of a source if there is one."""
        if initial is None:
            self._warn("%s %s", self.loader.store.url, why)
            return self._restored(live, is_fresh=True)
        world = self.loader.collectives
        plan, copies = live.take_initial(initial, world, follows=follows)
        take_followers(live, follows, plan.source, world)
        also = f"; so has {', '.join(copies)}, which was a copy of the model" if copies else ""
        self._warn("%s %s, with weights from %s%s", self.loader.store.url, why, described(plan.source), also)
        return attrs.evolve(self._restored(live, is_fresh=True), weights=plan.coverage, copies=copies)

    def load_best(self, run: Live | TrainState) -> TrainState | Restored:
        """Load the weights of the best checkpoint; see `CheckpointManager.load_best`."""
        self.saves.settle()
        state, step = self.loader.load_best(run)
        self.events.report("restored_best", step=step, detail="its weights, and nothing else")
        return Restored(self.loader.store.url, step, is_fresh=False) if isinstance(run, Live) else state

    def _start_over(
        self,
        live: Live,
        step: int | None,
        reset: Mapping[str, str] | None,
        initial: WeightSource | None,
        follows: Sequence[str],
    ) -> Restored:
        if step is not None or reset:
            raise InvalidArgument("start_over", expected="False, to restore a step, or all but a component", found="True",
                                  fix="leave start_over=True out")  # fmt: skip
        if live.outside is not None:
            live.take_weights(self.loader.collectives)
        left = self.first.left_behind
        return self._begin(live, initial, follows, f"starts over on purpose; {left} checkpoints are left behind")

    def _decided_step(self, run: Live | TrainState, decision: LoadDecision) -> int | None:
        """The step that a decision is for; None for the newest, if that is still the one that it was made for."""
        check_decision(decision)
        if decision.source == "step":
            return decision.step
        now = self.decide(run, step=None)
        if now.checkpoint != decision.checkpoint:
            raise InvalidArgument("decision", expected=f"{decision.checkpoint}, the newest when it was made", found=f"{now.checkpoint} is the newest",
                                  fix="call should_load again; with step= it is for one checkpoint, whatever comes after")  # fmt: skip
        return None

    def _load(
        self,
        run: Live | TrainState,
        step: int | None,
        reset: Mapping[str, str] | None,
        *,
        in_place: bool = False,
        transform: Transform | None = None,
    ) -> TrainState:
        self.saves.settle()
        if self.rehearsal is not None:
            self.rehearsal.watch(run)
        began = time.monotonic()
        try:
            state = self.loader.load(run, step=step, reset=reset, in_place=in_place, transform=transform)
        except ResumeRefused as refused:
            if step is not None or not refused.refusal.finds_nothing:
                self.events.report("refused", step=step, detail=str(refused))
            raise
        step = _step_of(state)
        self.due.loaded(step)
        self.first.loaded(run, step)
        self.saves.descends_from = self.loader.descent
        (manifest, checkpoint), self.loader.source = self.loader.source, (None, "")
        if self.saves.base is not None:
            rank = self.loader.collectives.rank
            self.saves.base = NO_BASE if manifest is None else without_collecting(base_from)(manifest, checkpoint, rank)
        self.events.report("restored", step=step, secs=time.monotonic() - began)
        self.saves.met(step, self.loader.drifts)
        names = self.loader.names_of(run)
        if names is not None and "trainer" not in names:
            self._warn(
                "%s: of its checkpoint at step %s only %s is restored, because of components=; the run counts from step %d, "
                "and everything else is as the script made it",
                self.loader.store.url,
                "?" if self.loader.descent is None else self.loader.descent.step,
                ", ".join(names) or "nothing",
                _step_of(run) or 0,
            )
        return state

    def _warn(self, text: str, *about: object) -> None:
        """Log a warning once a run, not once a rank."""
        if self.loader.collectives.rank == 0:
            _LOG.warning(text, *about)

    def _restored(self, live: Live, *, is_fresh: bool = False) -> Restored:
        live.meet(self.loader.collectives)
        self.asked.watch(live)
        self.saves.watch(live)
        return Restored(self.loader.store.url, live.progress.step, is_fresh=is_fresh)


def _resets(run: Live | TrainState) -> dict[str, str]:
    """The components that no load touches."""
    return run.outside.resets() if isinstance(run, Live) and run.outside is not None else {}


def _step_of(run: Live | TrainState) -> int | None:
    """The step of the run's own objects; None for a state that does not count."""
    if isinstance(run, Live):
        return run.progress.step
    return None if run.trainer is None else run.trainer.step
