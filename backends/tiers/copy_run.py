"""`plan_copy` and `copy_run`: copy checkpoints of a run into another store, verified, and continued where a copy before was cut off."""

from collections.abc import Callable
from pathlib import Path

from trainfold.backends.stores.local import Run, local_store, open_store
from trainfold.backends.stores.place import is_object_url, local_path, url_parts
from trainfold.backends.stores.protocol import Store
from trainfold.backends.tiers.carried_copy import carried_out
from trainfold.backends.tiers.compare_runs import Steps, planned_copy, unless_empty
from trainfold.core.errors import InvalidArgument
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.json_values import shown


def plan_copy(source: Run, target: Run, *, steps: Steps = "all") -> CopyPlan:
    """Plan a copy of checkpoints: reads manifests and sizes, and writes nothing.

    Args:
        source: the run that is read: a directory, the URL of a bucket, or a store.
        target: where they go, named in the same way; a place for a new run, or one that holds the same run, such as an earlier copy.
        steps: ``"all"`` for each whole checkpoint; ``"newest"`` for the one that a resume tries first; or the steps. Checkpoints to whose files one of these refers
            go with it.

    Returns:
        What is done, and what keeps the rest from going. It prints.

    Raises:
        InvalidArgument: for an invalid argument, or a target that is the source, or of which one lies inside the other.
        CheckpointError: the matching subclass, if the source is not a run, or the target holds something else.

    Examples:
        >>> from trainfold import Progress, TrainState, save
        >>> from trainfold.stores import MemoryStore
        >>> run = MemoryStore()
        >>> for step in (1, 2):
        ...     _ = save(TrainState(trainer=Progress(step=step)), run)
        >>> [(each.name, each.action) for each in plan_copy(run, MemoryStore(), steps="newest").checkpoints]
        [('step-00000002', 'copied')]
    """
    return _planned(*_opened(source, target), steps)


def copy_run(
    source: Run, target: Run, *, steps: Steps = "all", advance: Callable[[int], object] = lambda _: None
) -> CopyPlan:
    """Copy checkpoints of a run into another store, with the same manifests, so that lineage and digests hold.

    Each byte is compared with the digest in its manifest while it passes. A checkpoint is there when all of its files are: by one commit, as a save. A copy that was cut
    off, or killed, is continued by the same call: files that are there and have their digests are not sent again. Nothing that the target has is overwritten.

    The source is not locked: a checkpoint that a program deletes meanwhile is left out and named, and it is planned again once. The target is, so nothing else may save there.

    Args:
        source: see `plan_copy`.
        target: see `plan_copy`.
        steps: see `plan_copy`.
        advance: gets the number of bytes that are done, as they pass; from several threads.

    Returns:
        The plan that was carried out.

    Raises:
        InvalidArgument, CheckpointError: as `plan_copy` does.
        RunEmpty: if no checkpoint is whole; then nothing is made.
        CommitConflict: if the target has another checkpoint of a step; then nothing is copied.
        CheckpointMissing: if a checkpoint that was asked for was deleted meanwhile, or one after which nothing newer could be copied.
        CheckpointDamaged: if bytes of the source have another digest, or CheckpointTorn, if they are gone. The other checkpoints are copied all the same.
        RunLocked: if another program saves into the target.
        SaveFailed: if it cannot be written; what is there stays, and the same call goes on.

    Examples:
        >>> from trainfold import Progress, TrainState, load, save
        >>> from trainfold.stores import MemoryStore
        >>> run, bucket = MemoryStore(), MemoryStore()
        >>> _ = save(TrainState(trainer=Progress(step=2)), run)
        >>> [(each.name, each.action) for each in copy_run(run, bucket).checkpoints]
        [('step-00000002', 'copied')]
        >>> load(bucket, like=TrainState(trainer=Progress())).trainer.step
        2
    """
    first, second = _opened(source, target)
    return carried_out(lambda: _planned(first, second, steps), first, second, advance=advance)


def _planned(source: Store, target: Store, steps: Steps) -> CopyPlan:
    return unless_empty(planned_copy(source, target, steps=steps), fix=f"see trainfold ls {source.url}")


def _opened(source: Run, target: Run) -> tuple[Store, Store]:
    # before anything is opened, which a bucket needs a package for
    _check_apart(source is target, _named(source), _named(target), target)
    first, second = open_store(source), open_store(target)
    _check_apart(first is second, _place(first), _place(second), target)
    return first, second


def _check_apart(is_same: bool, source: tuple[str, ...], target: tuple[str, ...], given: Run) -> None:  # noqa: FBT001
    shorter, longer = sorted([source, target], key=len)
    if is_same or (shorter and longer[: len(shorter)] == shorter):
        raise InvalidArgument("copy.target", expected="another place than the source, and neither inside the other", found=given if isinstance(given, str) else shown(given),
                              fix="name the place of the copy")  # fmt: skip


def _named(run: Run) -> tuple[str, ...]:
    """The parts of the location that a path or a URL names, whatever way it is written; none of a store."""
    if not isinstance(run, str | Path):
        return ()
    return url_parts(str(run)) if is_object_url(str(run)) else Path(local_path(run)).resolve().parts


def _place(store: Store) -> tuple[str, ...]:
    """The parts of the location of a store; none of one that only its object knows."""
    local = local_store(store)
    if local is not None:
        return _named(local.url)
    found: tuple[str, ...] = getattr(store, "place", ())
    return found
