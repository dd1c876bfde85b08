"""`load_run`: reads a run, plans the resume and carries out the plan. If a checkpoint proves bad, an older one is loaded instead."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, TypeVar, final

import attrs

from trainfold.backends.derived_streams import with_derived_streams
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt, quarantined
from trainfold.backends.runs.restore import run_resume
from trainfold.backends.runs.save import library_versions
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.runs.snapshot import full_contract
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.protocol import Store
from trainfold.backends.user_warning import warn_user
from trainfold.core.errors import (
    CheckpointUnreadable,
    HiddenState,
    RankFailed,
    ResumeRefused,
    TrainfoldError,
    place,
)
from trainfold.core.format.structure.describe import describe
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import LoadOutcome, outcome_of, with_quarantined
from trainfold.core.layout.world import Collectives
from trainfold.core.printable import printable
from trainfold.core.problem import Problem
from trainfold.core.resume.choose import next_to_examine
from trainfold.core.resume.fall_back import (
    Decided,
    after_failure,
    decided,
    disagreement,
    failure_of,
    lists_again,
    outcome_of_all,
)
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.request import ResumeRequest, Target
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.resume.resumed import seed_of_other_ranks
from trainfold.core.state.audit import not_restored_text
from trainfold.core.state.components import components_of
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import TrainState

T = TypeVar("T")
_LOG: Final = logging.getLogger("trainfold")


class CheckpointPassedOver(UserWarning):
    """The checkpoint to resume cannot be used, and an older one is loaded."""


class ResumeDrift(UserWarning):
    """The checkpoint and the run differ, and the policy lets the difference pass."""


@final
@attrs.frozen(eq=False)
class Loaded:
    """A loaded state, and the checkpoint from which it descends; the same on every rank."""

    state: TrainState
    descent: ParentCheckpoint


@final
class Quarantine:
    """Counts the attempts to load each checkpoint, so that a checkpoint that kills its loader is not tried for ever.

    Rank 0 writes the count into the run, whose lock it holds.
    """

    def begin(self, store: Store, world: Collectives, name: str) -> None:
        """Record an attempt before it starts."""
        on_rank_zero(world, lambda: begin_attempt(store, name), doing="note the attempt to load", is_vote=True)

    def end(self, store: Store, world: Collectives, name: str, outcome: LoadOutcome) -> None:
        """Remove the record of an attempt, or record what failed."""
        on_rank_zero(world, lambda: end_attempt(store, name, outcome), doing="note how the load ended", is_vote=True)

    def leave(self, store: Store, world: Collectives, name: str, error: BaseException) -> None:
        """Record an attempt that ended with an error for which no rank waits, such as Ctrl-C."""
        if world.rank == 0:
            end_attempt(store, name, outcome_of(error))


def plan_load(
    store: Store,
    *,
    like: TrainState,
    request: ResumeRequest,
    contract: Mapping[str, Any] | None,
    collectives: Collectives,
) -> ResumePlan | Refusal:
    """The plan that `load_run` would carry out for the same arguments; see `trainfold.plan`."""
    known = passed_over(store, request, collectives)
    target = resume_target(like, contract, collectives)
    return _planned(store, with_quarantined(read_inventory(store), known), target, request)[1]


def load_run(  # noqa: PLR0913 - keywords
    store: Store,
    *,
    like: TrainState,
    request: ResumeRequest,
    contract: Mapping[str, Any] | None,
    collectives: Collectives,
    quarantine: Quarantine | None = None,
    share: int | None = None,
) -> Loaded:
    """Load what a request asks for; see `trainfold.load`.

    Args:
        store: the run.
        like: a state of the run that resumes.
        request: the step, the components, the policy.
        contract: the contract of this run, in addition to that of ``like``.
        collectives: the world; every rank calls.
        quarantine: counts the attempts; None for a reader that may not write into the run. Every reader passes over checkpoints in quarantine,
            unless their step is asked for.
        share: of the data that this rank reads, for random streams that belong to another number of ranks; None for one a rank.
    """
    world, target = collectives, resume_target(like, contract, collectives)
    known = passed_over(store, request, world)
    (listed,) = _everywhere(world, lambda: read_inventory(store), doing="list the run")
    inventory, relistings = listed, 0
    while True:
        inventory, outcome = _planned_alike(store, with_quarantined(inventory, known), target, request, world)
        if isinstance(outcome, Refusal):
            (relisted,) = _everywhere(world, lambda: read_inventory(store), doing="list the run again")
            if not lists_again(relistings, world.gather(relisted != listed, doing="compare the lists", is_vote=True)):
                raise ResumeRefused(store.url, outcome)
            inventory, listed, relistings = relisted, relisted, relistings + 1
            continue
        if quarantine is not None:
            quarantine.begin(store, world, outcome.checkpoint)
        try:
            state, failure = _attempt(outcome, like, store, world)
            told = world.gather(
                None if failure is None else failure_of(failure), doing="read its part of the checkpoint"
            )
            failures = [each for each in told if each is not None]
        except BaseException as error:
            if quarantine is not None:
                quarantine.leave(store, world, outcome.checkpoint, error)
            raise
        if quarantine is not None:
            quarantine.end(store, world, outcome.checkpoint, outcome_of_all(failures))
        if not failures and state is not None:
            on_rank_zero(world, partial(_warn, outcome), doing="warn", is_vote=True)  # once a run; it may raise
            head = outcome.manifest.head
            state = with_derived_streams(state, outcome, share=world.rank if share is None else share)
            _tell_of_streams(outcome, world)
            return Loaded(state, ParentCheckpoint(head.timeline, head.step, head.forks))
        without = after_failure(inventory, request, outcome.checkpoint, failures)
        if without is None:
            reason = failure or _elsewhere(store, failures[0].problem)
            place(reason, step=outcome.step, rank=world.rank if failure is not None and world.world_size > 1 else None)
            raise reason
        inventory = without


def passed_over(store: Store, request: ResumeRequest, world: Collectives) -> Mapping[str, Problem]:
    """The checkpoints in quarantine, for `with_quarantined`; empty if a step is requested, because the request overrides the quarantine."""
    return (
        {}
        if request.step is not None
        else on_rank_zero(world, lambda: quarantined(store), doing="look for checkpoints in quarantine")
    )


@without_collecting
def resume_target(
    like: TrainState, contract: Mapping[str, Any] | None = None, world: Collectives | None = None
) -> Target:
    """The `Target` of a run with this state.

    Args:
        like: a state with its components, shapes and dtypes; values are not read.
        contract: what must be equal, in addition to the contract of ``like``.
        world: the ranks; None for one process.

    Examples:
        >>> from trainfold import Progress
        >>> sorted(resume_target(TrainState(trainer=Progress())).components)
        ['trainer']
    """
    rank, world_size = (0, 1) if world is None else (world.rank, world.world_size)
    components = {name: describe(component, name)[0] for name, component in components_of(like).items()}
    return Target(components, full_contract(like, contract), rank, world_size, library_versions())


@without_collecting
def _planned(
    store: Store, inventory: Inventory, target: Target, request: ResumeRequest
) -> tuple[Inventory, ResumePlan | Refusal]:
    """Read the manifests that are needed, and plan. Returns the inventory with these manifests, and the plan."""
    inventory = examined(store, inventory, request, target.components)
    return inventory, plan_resume(inventory, target, request)


def examined(run: Run, inventory: Inventory, request: ResumeRequest, wanted: Collection[str] = ()) -> Inventory:
    """Read the manifests that a request needs, newest first, until one of them satisfies it.

    Args:
        run: a directory, or a store.
        inventory: from `read_inventory`.
        request: from `resume_request`.
        wanted: the components of the run that resumes.
    """
    store = open_store(run)
    while (name := next_to_examine(inventory, request, wanted)) is not None:
        inventory = examine(store, inventory, name)
    return inventory


def _planned_alike(
    store: Store, inventory: Inventory, target: Target, request: ResumeRequest, world: Collectives
) -> tuple[Inventory, ResumePlan | Refusal]:
    """`_planned`, on every rank; raises on all unless all decide the same, which they compare by digest."""
    mine: list[tuple[Inventory, ResumePlan | Refusal]] = []

    def plan() -> Decided:
        mine.append(_planned(store, inventory, target, request))
        return decided(mine[0][1])

    error = disagreement(store.url, on_all_ranks(world, plan, doing="plan the resume"), mine[0][1])
    if error is not None:
        raise error
    return mine[0]


def _everywhere(world: Collectives, read: Callable[[], T], *, doing: str) -> list[T]:
    """What this rank reads, if all ranks could read."""
    mine: list[T] = []
    on_all_ranks(world, lambda: mine.append(read()), doing=doing)
    return mine


def _attempt(
    outcome: ResumePlan, like: TrainState, store: Store, world: Collectives
) -> tuple[TrainState | None, TrainfoldError | None]:
    """The state, or the error. The error is not raised here, because the other ranks wait for the result."""
    try:
        return run_resume(outcome, like, store=store), None
    except TrainfoldError as error:
        return None, error
    except OSError as error:
        where = f"{store.url}/{outcome.checkpoint}"
        fix = "check the device and its log, or load another checkpoint"
        return None, CheckpointUnreadable(where, expected="files that can be read", found=error, fix=fix)
    except BaseException as error:
        world.fail(error)  # or the others would wait for this rank
        raise


def _elsewhere(store: Store, problem: Problem) -> RankFailed:
    return RankFailed(store.url, expected="every rank to load its part", found=problem, fix=problem.fix)


def _tell_of_streams(outcome: ResumePlan, world: Collectives) -> None:
    seed = seed_of_other_ranks(outcome)
    if seed is not None and world.rank == 0:
        _LOG.warning(
            "%s: the saved random streams belong to %d ranks and cannot continue on %d; new ones are derived from seed %d, step %d and the share of the "
            "data that a rank reads: equal on ranks with the same share, and the same at each resume from this checkpoint",
            f"{outcome.run}/{outcome.checkpoint}", outcome.manifest.world_size, world.world_size, seed, outcome.step,
        )  # fmt: skip


def _warn(outcome: ResumePlan) -> None:
    for problem in outcome.passed_over:
        warn_user(str(problem), CheckpointPassedOver)
    for drift in outcome.drifts:
        if drift.verdict == "warn":
            warn_user(str(drift), ResumeDrift)
    for text in outcome.losses:
        _LOG.warning("%s", text)
    if outcome.unsaved:
        text = not_restored_text(outcome.unsaved, checkpoint=f"{outcome.run}/{outcome.checkpoint}")
        warn_user(printable(text, keep="\n"), HiddenState)
