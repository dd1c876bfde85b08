"""A run on a store: `save`, `plan` and `load` a state. The loop of reading, deciding and acting; each is elsewhere."""

import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from trainfold.backends.collectives import SingleProcess
from trainfold.backends.inventory import RUN_FILE, check_place, examine, read_inventory, read_run_id, run_document
from trainfold.backends.local import LocalStore
from trainfold.backends.protocols import Collectives, Store
from trainfold.backends.run_resume import run_resume
from trainfold.backends.run_save import SaveResult, library_versions, run_save
from trainfold.backends.together import on_all_ranks, on_rank_zero
from trainfold.core.components import components_of, select
from trainfold.core.contract import checked_contract, contract_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CommitConflict,
    InvalidArgument,
    InvalidState,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    TrainfoldError,
)
from trainfold.core.given import mapping_given
from trainfold.core.inventory import Inventory, Problem, next_head, problem_of
from trainfold.core.manifest import Head
from trainfold.core.node_kinds import check_kinds
from trainfold.core.request import Request, Target, make_request
from trainfold.core.resume_plan import Refusal, ResumePlan
from trainfold.core.resume_planner import next_to_examine, plan_resume
from trainfold.core.save_plan import MANIFEST, directory_of, plan_save
from trainfold.core.scalars import shown
from trainfold.core.state import TrainState
from trainfold.core.structure import Described, describe

Run: TypeAlias = "str | Path | Store"
_MANIFEST_ROOM_BYTES = 2**20
_RELISTINGS = 5


class CheckpointPassedOver(UserWarning):
    """A checkpoint that should have been resumed cannot be used, and an older one is taken."""


class ResumeDrift(UserWarning):
    """Something differs between the checkpoint and the run, and the policy lets it pass."""


def open_store(run: Run) -> Store:
    """The store of a run: a `LocalStore` for a path; a store is returned as it is.

    Raises:
        InvalidArgument: if it is neither, or a path that no filesystem can have.
    """
    if isinstance(run, str | Path):
        return LocalStore(run)
    if not isinstance(run, Store):
        raise InvalidArgument("run", expected="a path or a store", found=shown(run), mend="name the run's directory")
    return run


def _check_state(state: object, argument: str) -> None:
    if not isinstance(state, TrainState):
        raise InvalidArgument(
            argument,
            expected="a TrainState",
            found=shown(state),
            mend="give the state of the run, such as init_state(...) makes or live.capture() returns",
        )


def save(  # noqa: PLR0913 - keywords
    state: TrainState,
    run: Run,
    *,
    components: Sequence[str] | None = None,
    contract: Mapping[str, Any] | None = None,
    collectives: Collectives | None = None,
    lock: bool = True,
) -> SaveResult:
    """Save a state as the checkpoint of its step; durable and checked when it returns.

    The run is made if it is not there. Saving a step again replaces it without a moment in which neither is there.
    Saving a step below the newest one starts a new timeline (E16). Nothing of the state is changed (C14).

    Args:
        state: any state with a trainer component; its tensors may be on any device.
        run: a directory, or a store.
        components: what to save; None for all. Leaving out ``model`` is recorded: the weights are then external.
        contract: what must be equal at resume, beside what the state itself says (`contract_of`).
        collectives: the world; every rank calls with its state. None for a single process.
        lock: False where the caller holds the run's lock already, as a manager does.

    Returns:
        What was saved.

    Raises:
        InvalidState: if the state has no trainer component, and so no step.
        InvalidArgument: if the state or the run is none.
        UnknownComponent: for an unknown name.
        StateDonated: if a donating step has consumed the state.
        SaveFailed: or the subclass that fits (NoSpace, NotWritable, RunLocked, CommitConflict).

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> from trainfold.core.state import Progress
        >>> save(TrainState(trainer=Progress(step=3)), MemoryStore()).checkpoint
        'step-00000003'
    """
    world = collectives or SingleProcess()
    _check_state(state, "state")
    if state.trainer is None:
        raise InvalidState(
            "state.trainer", expected="a Progress", found="none", mend="give the state a trainer component"
        )
    store = open_store(run)
    chosen = select(state, components)
    omitted = tuple(name for name in components_of(state) if name not in components_of(chosen))
    pairs: dict[str, Any] = {}

    def described() -> dict[str, Described]:
        pairs.update({name: describe(component, name) for name, component in components_of(chosen).items()})
        for name, (each, _) in pairs.items():
            check_kinds(each.node, name)
        return {name: each for name, (each, _) in pairs.items()}

    ranks = on_all_ranks(world, described)
    agreed = checked_contract({**contract_of(state), **mapping_given("contract", contract)})
    step = int(state.trainer.step)
    with ExitStack() as held:

        def begin() -> tuple[Head, bytes | None]:
            check_place(store)  # before the lock, which is a file
            if lock:
                held.enter_context(store.lock())
            return _decide(store, step)

        head, old = on_rank_zero(world, begin)
        decided = plan_save(ranks, step=step, revision=head.revision)
        on_rank_zero(world, lambda: store.reserve(decided.size_bytes + _MANIFEST_ROOM_BYTES))
        return run_save(
            decided,
            {name: tensors for name, (_, tensors) in pairs.items()},
            head=head,
            store=store,
            collectives=world,
            contract=agreed,
            omitted=omitted,
            replaces=old,
        )


def plan(  # noqa: PLR0913 - keywords
    run: Run,
    *,
    like: TrainState,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, str] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
) -> ResumePlan | Refusal:
    """Say what a resume would do; reads manifests, loads nothing (V18).

    Args:
        run: a directory, or a store.
        like: a state of the run that wants to resume: its structure counts, its values do not.
        step: an explicit step; None for the newest of the current timeline.
        components: the components to load; None for all.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``.
        reset: component -> why it starts anew on purpose.
        contract: what this run says of itself beside what ``like`` says; compared with what was saved.

    Returns:
        A `ResumePlan`, or a `Refusal` with every reason; both print.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> from trainfold.core.state import Progress
        >>> store = MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=3)), store)
        >>> plan(store, like=TrainState(trainer=Progress())).step
        3
    """
    _check_state(like, "like")
    request = make_request(step=step, components=components, policy=policy, reset=reset)
    store = open_store(run)
    return _plan(store, read_inventory(store), _target(like, contract, SingleProcess()), request)[1]


def load(  # noqa: PLR0913 - keywords
    run: Run,
    *,
    like: TrainState,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, str] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
    collectives: Collectives | None = None,
) -> TrainState:
    """Load the newest whole checkpoint of the current timeline, or the step asked for, into a new state.

    Every byte that is used is checked against its digest. Where the newest checkpoint turns out to be damaged and no step
    was asked for, the next older one is taken, with a `CheckpointPassedOver` warning each time (V03).

    Args:
        run: a directory, or a store.
        like: a state of the run that wants to resume; it is left as it is, whatever happens (V12).
        step: an explicit step; None for the newest.
        components: the components to load; the others are those of ``like``.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``.
        reset: component -> why it starts anew on purpose.
        contract: what this run says of itself beside what ``like`` says.
        collectives: the world; every rank calls. None for a single process.

    Returns:
        The state; its tensors are fresh memory on the devices of ``like``.

    Raises:
        ResumeRefused: with every reason, when there is nothing to resume or it would not be exact.
        CheckpointDamaged: if the step asked for has bytes with another digest.
        CheckpointHostile: if what it says of itself cannot be, such as a data position beyond the data.
        RanksDisagree: if ranks see different checkpoints (V05).
        RankFailed: if another rank could not load its part.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> from trainfold.core.state import Progress
        >>> store = MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=3, samples=96)), store)
        >>> load(store, like=TrainState(trainer=Progress())).trainer.samples
        96
    """
    _check_state(like, "like")
    request = make_request(step=step, components=components, policy=policy, reset=reset)
    world = collectives or SingleProcess()
    store = open_store(run)
    target = _target(like, contract, world)
    inventory = listed = read_inventory(store)
    relistings = 0
    while True:
        inventory, outcome = _plan(store, inventory, target, request)
        _agree(outcome, store, world)
        if isinstance(outcome, Refusal):
            relisted = read_inventory(store)
            if relistings < _RELISTINGS and any(world.gather(relisted != listed)):
                inventory, listed, relistings = relisted, relisted, relistings + 1
                continue  # somebody saved or deleted meanwhile: what was refused may be gone, and a newer one there
            raise ResumeRefused(store.url, outcome)
        state, failure = _attempt(outcome, like, store)
        failed = [each for each in world.gather(None if failure is None else _told(failure)) if each is not None]
        if not failed and state is not None:
            _warn(outcome)
            return state
        if step is not None or not all(may_fall_back for _, may_fall_back in failed):
            raise failure or _elsewhere(store, failed[0][0])
        inventory = _without(inventory, outcome.checkpoint, failed[0][0])


def _decide(store: Store, step: int) -> tuple[Head, bytes | None]:
    """The head of the next checkpoint, and the manifest that it replaces; the run is made here if it is new."""
    run_id = read_run_id(store)
    if run_id is None:
        check_place(store)
        with suppress(CommitConflict):  # somebody made the run in the meantime: theirs is the id
            store.commit(RUN_FILE, run_document(uuid.uuid4().hex))
        run_id = read_run_id(store)
    assert run_id is not None  # it was committed just now
    head = next_head(read_inventory(store), run_id, step)
    name = f"{directory_of(step)}/{MANIFEST}"
    size = store.size(name)
    if size is None:
        return head, None
    old = store.read(name, start=0, stop=size)
    return attrs.evolve(head, revision=_revision(store, step) + 1), old


def _revision(store: Store, step: int) -> int:
    """The revision to go beyond: that of the manifest there, or, if it is unreadable, that of the file names there."""
    entry = examine(store, read_inventory(store), directory_of(step)).entry(directory_of(step))
    if entry is not None and entry.head is not None:
        return entry.head.revision
    names = store.list(directory_of(step))
    return max(
        (int(part[1:]) for name in names for part in name.split(".") if part[:1] == "r" and part[1:].isdecimal()),
        default=0,
    )


def _target(like: TrainState, contract: Mapping[str, Any] | None, world: Collectives) -> Target:
    components = {name: describe(component, name)[0] for name, component in components_of(like).items()}
    agreed = checked_contract({**contract_of(like), **mapping_given("contract", contract)})
    return Target(components, agreed, world.rank, world.world_size, library_versions())


def _plan(
    store: Store, inventory: Inventory, target: Target, request: Request
) -> tuple[Inventory, ResumePlan | Refusal]:
    while (name := next_to_examine(inventory, request)) is not None:
        inventory = examine(store, inventory, name)
    return inventory, plan_resume(inventory, target, request)


def _agree(outcome: ResumePlan | Refusal, store: Store, world: Collectives) -> None:
    digests = world.gather(outcome.digest() if isinstance(outcome, ResumePlan) else f"refused:\n{outcome}")
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd and isinstance(outcome, ResumePlan | Refusal):
        raise RanksDisagree(
            store.url,
            expected="the same plan on every rank",
            found=f"another one on ranks {odd} than on rank 0",
            mend="let every rank see the same files (no node-local or stale copies), and build the same state",
        )


def _attempt(outcome: ResumePlan, like: TrainState, store: Store) -> tuple[TrainState | None, TrainfoldError | None]:
    """The state, or what was in the way; it is not raised yet, since the other ranks wait to hear of it."""
    try:
        return run_resume(outcome, like, store=store), None
    except TrainfoldError as error:
        return None, error
    except OSError as error:
        where = f"{store.url}/{outcome.checkpoint}"
        mend = "look at the device and its log, or load another checkpoint"
        return None, CheckpointDamaged(where, expected="files that can be read", found=error, mend=mend)


def _told(failure: TrainfoldError) -> tuple[Problem, bool]:
    """What the other ranks hear: the problem, and whether an older checkpoint may be free of it."""
    return problem_of(failure), isinstance(failure, CheckpointError)


def _elsewhere(store: Store, problem: Problem) -> RankFailed:
    return RankFailed(store.url, expected="every rank to load its part", found=problem, mend=problem.mend)


def _without(inventory: Inventory, name: str, problem: Problem | None) -> Inventory:
    entry = inventory.entry(name)
    return inventory if entry is None else inventory.with_entry(attrs.evolve(entry, problem=problem))


def _warn(outcome: ResumePlan) -> None:
    for problem in outcome.passed_over:
        warnings.warn(str(problem), CheckpointPassedOver, stacklevel=3)
    for drift in outcome.drifts:
        if drift.verdict == "warn":
            warnings.warn(str(drift), ResumeDrift, stacklevel=3)
