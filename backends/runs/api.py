"""`trainfold.save`, `trainfold.plan` and `trainfold.load`: they check their arguments and delegate.

The save itself is `save_snapshot` in `trainfold.backends.runs.save`; the load is `load_run` in `trainfold.backends.runs.load`.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import attrs

from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.ranks.launcher import world_given
from trainfold.backends.ranks.left_out import warn_of_nothing
from trainfold.backends.runs.commit import SaveResult
from trainfold.backends.runs.load import load_run, plan_load
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.scan import check_place
from trainfold.backends.runs.snapshot import Snapshot, check_state, describe_state
from trainfold.backends.stores.local import Run, open_store
from trainfold.core.checks import names_given
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.layout.world import Collectives
from trainfold.core.problem import problem_of
from trainfold.core.resume.drift import DriftAction
from trainfold.core.resume.request import resume_request
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.state.components import all_of, names_to_save
from trainfold.core.state.state import TrainState
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.several.fresh_start import FreshStart, plan_start
from trainfold.core.weights.several.source_text import why_ignored
from trainfold.core.weights.source import WeightSource
from trainfold.core.weights.wrapped import check_begins

S = TypeVar("S", bound=TrainState)


def save(  # noqa: PLR0913 - keywords
    state: TrainState,
    run: Run,
    *,
    components: Sequence[str] | None = None,
    contract: Mapping[str, Any] | None = None,
    collectives: Collectives | None = None,
    lock: bool = True,
) -> SaveResult:
    """Save a state as the checkpoint of its step; it is durable and checked on return.

    The run is created if it does not exist. Saving a step again replaces its checkpoint, and at every instant one of the two is whole. Saving a
    step below the newest one starts a new timeline. A state does not know the checkpoint from which it was loaded: after a rewind, use a
    `CheckpointManager`, which does, if the next save may lie above the newest step. The state is not changed.

    Args:
        state: any state with a trainer component; its tensors may be on any device.
        run: a directory, or a store.
        components: what to save; None for all. Leaving out ``model`` is recorded: the weights are then external.
        contract: what must be equal at a resume, in addition to the contract of the state (`contract_of`).
        collectives: the world; every rank calls with its state. None for a single process, which is refused if torch.distributed or a launcher
            has several ranks. Pass ``SingleProcess()`` if this rank saves alone on purpose.
        lock: False if the caller holds the run's lock already, as a manager does.

    Returns:
        What was saved.

    Raises:
        InvalidState: if the state has no trainer component, and so no step.
        InvalidArgument: if ``state`` is not a state or ``run`` is not a run; or if there are several ranks and no ``collectives``.
        UnknownComponent: for an unknown name.
        StateDonated: if a donating step has consumed the state.
        SaveFailed: or its matching subclass (NoSpace, NotWritable, RunLocked, CommitConflict); SaveFailedElsewhere on the ranks that did not
            fail themselves.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import Progress
        >>> save(TrainState(trainer=Progress(step=3)), MemoryStore()).checkpoint
        'step-00000003'
    """
    check_state(state, "state")

    def take() -> Snapshot:
        found = describe_state(state, components=components, contract=contract)
        warn_of_nothing(names_given(components), all_of(state))
        return found

    return save_snapshot(
        take,
        open_store(run),
        collectives=world_given(collectives, os.environ, where="save.collectives"),
        lock=lock,
    )


@overload
def plan(
    run: Run,
    *,
    like: TrainState,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
    initial: None = None,
) -> ResumePlan | Refusal: ...
@overload
def plan(
    run: Run,
    *,
    like: TrainState,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
    initial: WeightSource | None,
) -> ResumePlan | FreshStart | Refusal: ...
def plan(  # noqa: PLR0913 - keywords
    run: Run,
    *,
    like: TrainState,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
    initial: WeightSource | None = None,
) -> ResumePlan | FreshStart | Refusal:
    """Plan a resume, or a start with weights from elsewhere: read the manifests, and load nothing.

    Args:
        run: a directory, or a store.
        like: a state of the run that resumes. Its structure counts, its values do not.
        step: an explicit step; None for the newest of the current timeline.
        components: the components to load; None for all.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``.
        reset: component -> why it starts from scratch on purpose.
        contract: the contract of this run, in addition to that of ``like``; it is compared with the saved one.
        transform: rules that give the tensors of the checkpoint the names that they have now, as for `load`.
        initial: the weights with which the run would begin (``manager.restore(live, initial=...)``). Where the run has no checkpoint they are asked what they have,
            and the plan says which tensor comes from where. Else they are not asked, and the plan notes that they are ignored.

    Returns:
        A `ResumePlan`; a `FreshStart`, with ``initial`` and no checkpoint; or a `Refusal` with every reason. All of them print.

    Raises:
        InvalidArgument: for an invalid argument, also where ``initial`` would be ignored.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import Progress
        >>> store = MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=3)), store)
        >>> plan(store, like=TrainState(trainer=Progress())).step
        3
    """
    check_state(like, "like")
    if initial is not None:
        check_begins(initial, where="plan", is_outside="model" in like.origin.outside)
    request = resume_request(
        step=step, components=names_to_save(like, components), policy=policy, reset=reset, transform=transform
    )
    store = open_store(run)
    found = plan_load(store, like=like, request=request, contract=contract, collectives=SingleProcess())
    if initial is None or (isinstance(found, Refusal) and (step is not None or not found.finds_nothing)):
        return found
    if isinstance(found, ResumePlan):
        return attrs.evolve(found, notes=(*found.notes, f"initial weights ignored: {why_ignored(initial)}"))
    if like.model is None:
        raise InvalidArgument("plan.like", expected="a state with a model, which begins with initial=", found="one without",
                              fix="pass live.capture() of the run")  # fmt: skip
    try:
        check_place(store)
    except TrainfoldError as error:
        return Refusal(store.url, None, (problem_of(error),))
    start = plan_start(store.url, like, initial)
    return start if isinstance(start, FreshStart) else Refusal(store.url, None, start)


def load(  # noqa: PLR0913 - keywords
    run: Run,
    *,
    like: S,
    step: int | None = None,
    components: Sequence[str] | None = None,
    policy: Mapping[str, DriftAction] | None = None,
    reset: Mapping[str, str] | None = None,
    contract: Mapping[str, Any] | None = None,
    transform: Transform | None = None,
    collectives: Collectives | None = None,
) -> S:
    """Load the newest whole checkpoint of the current timeline, or that of a given step, into a new state.

    Every byte that is used is checked against its digest. If the newest checkpoint is damaged and no step was asked for, the next older one is
    loaded, with a `CheckpointPassedOver` warning each time.

    Args:
        run: a directory, or a store.
        like: a state of the run that resumes. It is never changed.
        step: an explicit step; None for the newest.
        components: the components to load; the others are those of ``like``.
        policy: drift kind -> ``refuse``, ``warn`` or ``adapt``.
        reset: component -> why it starts from scratch on purpose.
        contract: the contract of this run, in addition to that of ``like``.
        transform: rules that give the tensors of the checkpoint the names that they have now, such as ``trainfold.transforms.rename(old, new)``. The optimizer's
            state goes with them, and so do copies of the model under ``extra``. Rules that find nothing do nothing, so they may stay in the script.
        collectives: the world; every rank calls. None for a single process, which is refused if there are several ranks: alone, each rank could
            find another newest checkpoint, or load the streams and the data position of another rank. Pass ``SingleProcess()`` if this rank
            loads alone on purpose.

    Returns:
        The state; its tensors are fresh memory on the devices of ``like``.

    Raises:
        InvalidArgument: if there are several ranks and no ``collectives``.
        ResumeRefused: with every reason, if there is nothing to resume or the resume would not be exact.
        CheckpointDamaged: if the step that was asked for has bytes with another digest.
        CheckpointHostile: if the step that was asked for does not fit into memory.
        RanksDisagree: if ranks see different checkpoints.
        RankFailed: if another rank could not load its part.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> from trainfold import Progress
        >>> store = MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=3, samples=96)), store)
        >>> load(store, like=TrainState(trainer=Progress())).trainer.samples
        96
    """
    check_state(like, "like")
    request = resume_request(
        step=step, components=names_to_save(like, components), policy=policy, reset=reset, transform=transform
    )
    world = world_given(collectives, os.environ, where="load.collectives")
    loaded = load_run(open_store(run), like=like, request=request, contract=contract, collectives=world).state
    return cast("S", loaded)  # it has the type of ``like``
