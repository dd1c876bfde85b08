"""`load_run`: reads a run, plans the resume and carries out the plan. If a checkpoint proves bad, an older one is loaded instead."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import attrs

from trainfold.backends.derived_streams import tell_of_streams, with_derived_streams
from trainfold.backends.formats.native.unread import UnreadTensors
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.library_versions import library_versions
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.ranks.left_out import texts_of_left_out, warn_of_left_out, warn_of_nothing
from trainfold.backends.runs.alike.stages import ruled, united_run
from trainfold.backends.runs.one_view import RunView, examine_for_all, view_for_all
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt
from trainfold.backends.runs.restore import run_resume
from trainfold.backends.runs.shared_reads import SharedReads, may_share
from trainfold.backends.runs.snapshot import full_contract
from trainfold.backends.stores.protocol import HasFarTier, Store, glimpse
from trainfold.backends.user_warning import warn_user
from trainfold.core.errors import (
    CheckpointUnreadable,
    HiddenState,
    RankFailed,
    ResumeRefused,
    TrainfoldError,
    place,
    placed,
    rank_failed,
)
from trainfold.core.format.file_names import step_of
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.outline import announcement_of
from trainfold.core.format.structure.united_contract import contract_digest
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import LoadOutcome, outcome_of
from trainfold.core.layout.stage import Stage
from trainfold.core.layout.world import Collectives, World
from trainfold.core.printable import printable
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.fall_back import (
    Decided,
    Failure,
    after_failure,
    decided,
    disagreement,
    failure_of,
    lists_again,
    may_be_deleted,
    outcome_of_all,
    with_failed,
    without_optional,
)
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.reads import needs_of
from trainfold.core.resume.request import ResumeRequest, Target
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.audit import not_restored_text
from trainfold.core.state.components import components_of
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import TrainState

_LOG: Final = logging.getLogger("trainfold")
_OPTIONAL: Final = "it is optional, and left out"  # the reason of such a reset


class CheckpointPassedOver(UserWarning):
    """The checkpoint to resume cannot be used, and an older one is loaded."""


class ResumeDrift(UserWarning):
    """The checkpoint and the run differ, and the policy lets the difference pass."""


@final
@attrs.frozen(eq=False)
class Loaded:
    """A loaded state, and the checkpoint from which it descends; the same on every rank.

    Attributes:
        state: the state.
        descent: what a state that continues from it descends from.
        checkpoint: its directory.
        left_out: the optional components that are not from the checkpoint; rank 0 has warned of them.
        manifest: of the checkpoint, as this rank has opened it.
        drifts: what differed and was accepted.
    """

    state: TrainState
    descent: ParentCheckpoint
    checkpoint: str
    left_out: frozenset[str] = frozenset()
    manifest: Manifest | None = None
    drifts: tuple[Drift, ...] = ()


@final
class Quarantine:
    """Counts the attempts to load each checkpoint, so that a checkpoint that kills its loader is not tried for ever.

    Rank 0 writes the count into the run, whose lock it holds.
    """

    def begin(self, store: Store, world: Collectives, name: str) -> None:
        """Record an attempt before it starts."""
        on_rank_zero(world, lambda: begin_attempt(store, name), doing="note the attempt to load", is_vote=True)

    def end(
        self,
        store: Store,
        world: Collectives,
        name: str,
        outcome: LoadOutcome,
        *,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Remove the record of an attempt, or record what failed; then rank 0 does what else is its own, such as to warn."""

        def note() -> None:
            end_attempt(store, name, outcome)
            if then is not None:
                then()

        on_rank_zero(world, note, doing="note how the load ended", is_vote=True)

    def leave(self, store: Store, world: Collectives, name: str, error: BaseException) -> None:
        """Record an attempt that ended with an error for which no rank waits, such as Ctrl-C."""
        if world.rank == 0:
            end_attempt(store, name, outcome_of(error))


def plan_load(  # noqa: PLR0913 - keywords
    store: Store,
    *,
    like: TrainState,
    request: ResumeRequest,
    contract: Mapping[str, Any] | None,
    collectives: Collectives,
    optional: Mapping[str, str | None] | None = None,
) -> ResumePlan | Refusal:
    """The plan that `load_run` would carry out for the same arguments, without its warnings; see `trainfold.plan`."""
    target = resume_target(like, contract, collectives)
    request, target, wanted, lacking, _ = _requested(request, target, optional, like.stage, collectives)
    request = _without(request, texts_of_left_out(lacking))
    view = view_for_all(store, request, collectives, wanted=wanted, needs=_needs(like, request, collectives))
    return _planned(view.inventory, target, request, collectives, warns=False)[0]


def load_run(  # noqa: PLR0913 - keywords
    store: Store,
    *,
    like: TrainState,
    request: ResumeRequest,
    contract: Mapping[str, Any] | None,
    collectives: Collectives,
    quarantine: Quarantine | None = None,
    share: int | None = None,
    unread: UnreadTensors | None = None,
    optional: Mapping[str, str | None] | None = None,
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
        share: of the data that this rank reads, for random streams that belong to other ranks; None for the one that ``like`` names, or else one a rank.
        unread: gets what is left unread; then the caller reads it, and ends the attempt in the quarantine. None to read everything.
        optional: components that the run can do without -> why ``like`` lacks them, or None. If one cannot be restored on some rank, no rank
            restores it, and rank 0 warns.
    """
    world, target = collectives, resume_target(like, contract, collectives)
    shares = unread is None and may_share(store, world)
    request, target, wanted, lacking, is_shared = _requested(
        request, target, optional, like.stage, world, shares=shares
    )
    request = _without(request, _warned(lacking, world))
    needs = _needs(like, request, world)
    view = view_for_all(store, request, world, wanted=wanted, needs=needs)
    inventory, seen, relistings, mended = view.inventory, view.seen, 0, set[str]()
    while True:
        outcome = _planned_alike(store, inventory, target, request, world)
        look = partial(view_for_all, store, request, world, wanted=wanted, needs=needs)
        again = _seen_anew(outcome, inventory, partial(look, before=view))
        if again is not None and lists_again(relistings, again is not view):
            view, seen, relistings = again, again.seen, relistings + 1
            known = with_failed(again.inventory, inventory)
            inventory = examine_for_all(seen, known, request, world, wanted=wanted, needs=needs)
            continue
        if isinstance(outcome, Refusal):
            raise _at_checkpoint(ResumeRefused(store.url, outcome), outcome)
        with placed(step=outcome.step):
            if quarantine is not None:
                quarantine.begin(store, world, outcome.checkpoint)
            try:
                sharing = SharedReads(store, world) if is_shared else None
                state, failure = _attempt(outcome, like, seen, world, unread, sharing=sharing)
                told = world.gather(
                    None if failure is None else failure_of(failure), doing="read its part of the checkpoint"
                )
                failures = [each for each in told if each is not None]
            except BaseException as error:
                if quarantine is not None:
                    quarantine.leave(store, world, outcome.checkpoint, error)
                raise
            _end(store, outcome, failures, world, quarantine=quarantine, is_read=unread is None)
            if not failures and state is not None:
                head = outcome.manifest.head
                state = with_derived_streams(state, outcome, share=share, rank=world.rank)
                tell_of_streams(outcome, world)
                warn_of_nothing(request.components, [each.name for each in outcome.actions])
                left_out = frozenset(each.name for each in outcome.actions if each.note == _OPTIONAL)
                descent = ParentCheckpoint(head.timeline, head.step, head.forks)
                return Loaded(state, descent, outcome.checkpoint, left_out, outcome.manifest, outcome.drifts)
            without = after_failure(inventory, request, outcome.checkpoint, failures)
            if quarantine is not None and outcome.checkpoint not in mended:
                mended.add(outcome.checkpoint)
                without = _with_fetched(store, outcome.checkpoint, inventory, without, world, look=look)
            if without is None:
                first = next(rank for rank, each in enumerate(told) if each is not None)
                reason = failure or _elsewhere(store, first, failures[0].problem)
                place(reason, rank=world.rank if failure is not None and world.world_size > 1 else None)
                raise reason
        inventory, seen = examine_for_all(store, without, request, world, wanted=wanted, needs=needs), store


def _seen_anew(outcome: ResumePlan | Refusal, inventory: Inventory, look: Callable[[], RunView]) -> RunView | None:
    """The run as it is now, if the outcome may be due to another process that saves and deletes; every rank calls."""
    return look() if isinstance(outcome, Refusal) or may_be_deleted(inventory) else None


def _with_fetched(  # noqa: PLR0913 - of one call
    store: Store,
    name: str,
    inventory: Inventory,
    without: Inventory | None,
    world: Collectives,
    *,
    look: Callable[[], RunView],
) -> Inventory | None:
    """The inventory to plan with after a checkpoint did not load, and another tier was asked for it, or for an older one; every rank calls.

    Args:
        store: the run.
        name: the checkpoint.
        inventory: in which it is whole.
        without: in which it has its problem; None if no older one is tried.
        world: the ranks.
        look: lists the run again.
    """
    if not isinstance(store, HasFarTier):
        return without
    failed = None if without is None else without.entry(name)
    or_older = failed is not None and not failed.is_unreadable
    fetched = on_rank_zero(world, lambda: store.refetch(name, or_older=or_older), doing="fetch it again")
    if fetched == name:
        return inventory
    return without if fetched is None or failed is None else look().inventory.with_entry(failed)


def _needs(like: TrainState, request: ResumeRequest, world: Collectives) -> Needs | None:
    here = World(world.rank, world.world_size)
    is_renamed = request.transform is not None  # then its names are not those of the checkpoint
    return (
        None
        if world.world_size == 1 or is_renamed
        else needs_of(components_of(like), here, is_stage=like.stage is not None and not _may_have_short_names(like))
    )


def _may_have_short_names(like: TrainState) -> bool:
    """Whether its model has other names in an older checkpoint (ADR-0056): then every rank looks at all of it."""
    return like.model is not None and any(canonical_name(name) != name for name in like.model.params)


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


def _whole_target(target: Target, stages: Sequence[Stage | None], world: Collectives) -> Target:
    """The run that resumes, with the stages of all ranks as one model; all ranks call."""
    if not any(stages):
        return target
    here, stage = World(world.rank, world.world_size), stages[world.rank]
    components = ruled(target.components, here, stage)
    mine = announcement_of(components, stage=stage, contract=contract_digest(target.contract))
    whole = united_run(components, target.contract, world.gather(mine, doing="describe its state", is_vote=True), world)
    assert whole is not None, "some rank has a stage"
    return attrs.evolve(target, components=whole.described, contract=whole.contract)


def _requested(  # noqa: PLR0913 - of two calls
    request: ResumeRequest,
    target: Target,
    optional: Mapping[str, str | None] | None,
    stage: Stage | None,
    world: Collectives,
    *,
    shares: bool = False,
) -> tuple[ResumeRequest, Target, set[str], list[Mapping[str, str]], bool]:
    """Ask the other ranks what they have, what they lack of what is optional, and whether they read for each other.

    Returns:
        The request with the optional components; the target with the stages of all ranks as one model; the components that any rank has; by rank,
        the optional ones that it lacks, with the reasons; and whether all ranks read for each other.
    """
    lacking = {name: why for name, why in (optional or {}).items() if why}
    told = world.gather((sorted(target.components), lacking, stage, shares), doing="name its components", is_vote=True)
    request = attrs.evolve(request, optional=frozenset(optional or ()))
    whole = _whole_target(target, [each for _, _, each, _ in told], world)
    names = {name for names, *_ in told for name in names}
    return request, whole, names, [each for _, each, *_ in told], all(each for *_, each in told)


def _warned(told: Sequence[Mapping[str, str]], world: Collectives) -> dict[str, str]:
    """The optional components that any rank leaves out; rank 0 warns of them."""
    texts = texts_of_left_out(told)
    warn_of_left_out(texts, world)
    return texts


def _without(request: ResumeRequest, names: Iterable[str]) -> ResumeRequest:
    return attrs.evolve(request, reset={**request.reset, **dict.fromkeys(names, _OPTIONAL)})


def _planned(
    inventory: Inventory, target: Target, request: ResumeRequest, world: Collectives, *, warns: bool
) -> tuple[ResumePlan | Refusal, list[Decided]]:
    """The plan or refusal of this rank, and what each rank has decided.

    An optional component that some rank cannot restore is restored on none, and if the streams of one rank are not its own, all derive new ones.
    """
    mine: list[ResumePlan | Refusal] = []

    def plan() -> Decided:
        mine[:] = [without_collecting(plan_resume)(inventory, target, request)]
        return decided(mine[0], request.optional - request.reset.keys())

    while True:
        told = on_all_ranks(world, plan, doing="plan the resume")
        if not request.new_streams and len({each.new_streams for each in told}) > 1:
            request = attrs.evolve(request, new_streams=True)
            continue
        owing = without_optional(told)
        if not owing:
            return mine[0], told
        request = _without(request, _warned(owing, world) if warns else texts_of_left_out(owing))


def _planned_alike(
    store: Store, inventory: Inventory, target: Target, request: ResumeRequest, world: Collectives
) -> ResumePlan | Refusal:
    """The plan or refusal; raises on all ranks unless all decide the same, which they compare by digest."""
    mine, told = _planned(inventory, target, request, world, warns=True)
    error = disagreement(store.url, told, mine)
    if error is not None:
        place(error, rank=world.rank if isinstance(error, ResumeRefused) else None)
        raise _at_checkpoint(error, mine)
    return mine


def _at_checkpoint(error: TrainfoldError, outcome: ResumePlan | Refusal) -> TrainfoldError:
    """The error, with the step of the checkpoint that it is about."""
    place(error, step=None if outcome.checkpoint is None else step_of(outcome.checkpoint))
    return error


def _attempt(  # noqa: PLR0913 - of one call
    outcome: ResumePlan,
    like: TrainState,
    seen: Store,
    world: Collectives,
    unread: UnreadTensors | None,
    *,
    sharing: SharedReads | None,
) -> tuple[TrainState | None, TrainfoldError | None]:
    """The state, or the error. The error is not raised here, because the other ranks wait for the result."""
    if unread is not None:
        unread.forget()  # those of a checkpoint that did not load
    try:
        return run_resume(outcome, like, store=glimpse(seen, outcome.checkpoint), unread=unread, sharing=sharing), None
    except (TrainfoldError, OSError) as error:
        if sharing is not None and error is sharing.broken:
            raise  # of a call of the ranks, after which none makes another one
        if isinstance(error, TrainfoldError):
            return None, None if isinstance(error, RankFailed) else error  # that rank says why in the next call
        where = f"{seen.url}/{outcome.checkpoint}"  # of a store that names no error of its own
        fix = "look at the store, and try again; this does not prove damage"
        return None, CheckpointUnreadable(where, expected="files that can be read", found=error, fix=fix)
    except BaseException as error:
        world.fail(error)  # or the others would wait for this rank
        raise


def _end(  # noqa: PLR0913 - of one call
    store: Store,
    outcome: ResumePlan,
    failures: Sequence[Failure],
    world: Collectives,
    *,
    quarantine: Quarantine | None,
    is_read: bool,
) -> None:
    """End an attempt in the quarantine, unless the caller reads on; rank 0 warns once a run of what has loaded, in the same call, and that may raise."""
    warns = None if failures else partial(_warn, outcome)
    if quarantine is not None and (failures or is_read):
        quarantine.end(store, world, outcome.checkpoint, outcome_of_all(failures), then=warns)
    elif warns is not None:
        on_rank_zero(world, warns, doing="warn", is_vote=True)


def _elsewhere(store: Store, rank: int, problem: Problem) -> RankFailed:
    return rank_failed(rank, store.url, expected="every rank to load its part", found=problem, fix=problem.fix)


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
