"""`load_run`: reads a run, plans the resume, and loads what was planned; what turns out to be bad is passed over for an older one."""

import logging
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias, final

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt, quarantined
from trainfold.backends.runs.restore import run_resume
from trainfold.backends.runs.save import library_versions
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.runs.snapshot import full_contract
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import (
    CheckpointError,
    CheckpointUnreadable,
    HiddenState,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    TrainfoldError,
    place,
)
from trainfold.core.format.structure.describe import describe
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import Outcome, outcome_of, with_quarantined, worst_outcome
from trainfold.core.layout.world import Collectives
from trainfold.core.printable import printable
from trainfold.core.problem import Problem, problem_of
from trainfold.core.resume.choose import next_to_examine
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.request import ResumeRequest, Target
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.audit import not_restored_text
from trainfold.core.state.components import components_of
from trainfold.core.state.descent import Descent
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")
_RELISTINGS: Final = 5
_Told: TypeAlias = tuple[Problem, bool, Outcome]


class CheckpointPassedOver(UserWarning):
    """A checkpoint that should have been resumed cannot be used, and an older one is taken."""


class ResumeDrift(UserWarning):
    """Something differs between the checkpoint and the run, and the policy lets it pass."""


@final
@attrs.frozen(eq=False)
class Loaded:
    """A state that was loaded, and what it descends from: the checkpoint; the same on every rank."""

    state: TrainState
    descent: Descent


@final
class Quarantine:
    """Counts the attempts to load each checkpoint, so that one that kills its loader is not tried for ever (P07).

    Rank 0 keeps the count in the run, which it has locked.
    """

    def begin(self, store: Store, world: Collectives, name: str) -> None:
        """Note an attempt, before it."""
        on_rank_zero(world, lambda: begin_attempt(store, name))

    def end(self, store: Store, world: Collectives, name: str, outcome: Outcome) -> None:
        """Take it back, or note what was wrong."""
        on_rank_zero(world, lambda: end_attempt(store, name, outcome))

    def leave(self, store: Store, world: Collectives, name: str, error: BaseException) -> None:
        """Note that the attempt ended with something that no rank waits to hear of, such as Ctrl-C."""
        if world.rank == 0:
            end_attempt(store, name, outcome_of(error))


def plan_run(
    store: Store,
    *,
    like: TrainState,
    request: ResumeRequest,
    contract: Mapping[str, Any] | None,
    collectives: Collectives,
) -> ResumePlan | Refusal:
    """Say what `load_run` would do; see `trainfold.plan`. The arguments are those of `load_run`."""
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
) -> Loaded:
    """Load what a request asks for; see `trainfold.load`.

    Args:
        store: the run.
        like: a state of the run that wants to resume.
        request: the step, the components, the policy.
        contract: what this run says of itself beside what ``like`` says.
        collectives: the world; every rank calls.
        quarantine: what counts the attempts; None for a reader that may not write into the run. What is in quarantine is passed
            over by all, unless its step is asked for.
    """
    world, target = collectives, resume_target(like, contract, collectives)
    known = passed_over(store, request, world)
    inventory = listed = read_inventory(store)
    relistings = 0
    while True:
        inventory, outcome = _planned(store, with_quarantined(inventory, known), target, request)
        _agree(outcome, store, world)
        if isinstance(outcome, Refusal):
            relisted = read_inventory(store)
            if relistings < _RELISTINGS and any(world.gather(relisted != listed)):
                inventory, listed, relistings = relisted, relisted, relistings + 1
                continue  # somebody saved or deleted meanwhile: what was refused may be gone, and a newer one there
            raise ResumeRefused(store.url, outcome)
        if quarantine is not None:
            quarantine.begin(store, world, outcome.checkpoint)
        try:
            state, failure = _attempt(outcome, like, store)
            failed = [each for each in world.gather(None if failure is None else _told(failure)) if each is not None]
        except BaseException as error:
            if quarantine is not None:
                quarantine.leave(store, world, outcome.checkpoint, error)
            raise
        if quarantine is not None:
            quarantine.end(store, world, outcome.checkpoint, worst_outcome(how for _, _, how in failed))
        if not failed and state is not None:
            _warn(outcome)
            head = outcome.manifest.head
            return Loaded(state, Descent(head.timeline, head.step, head.forks))
        if request.step is not None or not all(may_fall_back for _, may_fall_back, _ in failed):
            told = failure or _elsewhere(store, failed[0][0])
            place(told, step=outcome.step, rank=world.rank if failure is not None and world.world_size > 1 else None)
            raise told
        inventory = _without(inventory, outcome.checkpoint, failed[0][0])


def passed_over(store: Store, request: ResumeRequest, world: Collectives) -> Mapping[str, Problem]:
    """What is in quarantine, for `with_quarantined`; nothing where a step is asked for, which takes it out."""
    return {} if request.step is not None else on_rank_zero(world, lambda: quarantined(store))


@without_collecting
def resume_target(
    like: TrainState, contract: Mapping[str, Any] | None = None, world: Collectives | None = None
) -> Target:
    """Say what a run that looks like this wants to resume.

    Args:
        like: a state with its components, shapes and dtypes; no value is looked at.
        contract: what must be equal beside what ``like`` says.
        world: which ranks there are; None for one process.

    Examples:
        >>> from trainfold.core.state.state import Progress
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
    """Read the manifests that matter, and plan; the inventory with what is known of them now, and the plan."""
    inventory = examined(store, inventory, request, target.components)
    return inventory, plan_resume(inventory, target, request)


def examined(store: Store, inventory: Inventory, request: ResumeRequest, wanted: Collection[str] = ()) -> Inventory:
    """Read the manifests that a request needs, newest first, until one can do what it asks for.

    Args:
        store: the run.
        inventory: from `read_inventory`.
        request: from `resume_request`.
        wanted: the components of the run that wants to resume.
    """
    while (name := next_to_examine(inventory, request, wanted)) is not None:
        inventory = examine(store, inventory, name)
    return inventory


def _agree(outcome: ResumePlan | Refusal, store: Store, world: Collectives) -> None:
    """Raise unless all ranks decide alike; a rank that alone has reasons against a checkpoint says them, and the others who it is."""
    if isinstance(outcome, Refusal):
        decided, reasons = f"refused:\n{outcome}", "; ".join(map(str, outcome.reasons)) if outcome.checkpoint else ""
    else:
        decided, reasons = outcome.digest(), ""
    told = world.gather((decided, outcome.checkpoint, reasons))
    odd = [rank for rank, (each, _, _) in enumerate(told) if each != told[0][0]]
    if not odd:
        return
    refusing = next((rank for rank, (_, _, each) in enumerate(told) if each), None)
    if refusing is None or len({checkpoint for _, checkpoint, _ in told}) > 1:
        raise RanksDisagree(
            store.url,
            expected="the same plan on every rank",
            found=f"another one on ranks {odd} than on rank 0",
            fix="let every rank see the same files (no node-local or stale copies), and build the same state",
        )
    if isinstance(outcome, Refusal):
        raise ResumeRefused(store.url, outcome)
    raise RankFailed(
        f"rank {refusing}",
        expected="every rank to resume",
        found=f"reasons against {outcome.checkpoint} on it: {told[refusing][2]}",
        fix="do what that rank's own error says, on every rank",
    )


def _attempt(outcome: ResumePlan, like: TrainState, store: Store) -> tuple[TrainState | None, TrainfoldError | None]:
    """The state, or what was in the way; it is not raised yet, since the other ranks wait to hear of it."""
    try:
        return run_resume(outcome, like, store=store), None
    except TrainfoldError as error:
        return None, error
    except OSError as error:
        where = f"{store.url}/{outcome.checkpoint}"
        fix = "look at the device and its log, or load another checkpoint"
        return None, CheckpointUnreadable(where, expected="files that can be read", found=error, fix=fix)


def _told(failure: TrainfoldError) -> _Told:
    """What the other ranks hear: the problem, whether an older checkpoint may be free of it, and what it says of this one."""
    return problem_of(failure), isinstance(failure, CheckpointError), outcome_of(failure)


def _elsewhere(store: Store, problem: Problem) -> RankFailed:
    return RankFailed(store.url, expected="every rank to load its part", found=problem, fix=problem.fix)


def _without(inventory: Inventory, name: str, problem: Problem | None) -> Inventory:
    entry = inventory.entry(name)
    return inventory if entry is None else inventory.with_entry(attrs.evolve(entry, problem=problem))


def _warn(outcome: ResumePlan) -> None:
    for problem in outcome.passed_over:
        warnings.warn(str(problem), CheckpointPassedOver, stacklevel=4)
    for drift in outcome.drifts:
        if drift.verdict == "warn":
            warnings.warn(str(drift), ResumeDrift, stacklevel=4)
    for text in outcome.losses:
        _LOG.warning("%s", text)
    if outcome.unsaved:
        text = not_restored_text(outcome.unsaved, checkpoint=f"{outcome.run}/{outcome.checkpoint}")
        warnings.warn(printable(text, keep="\n"), HiddenState, stacklevel=4)
