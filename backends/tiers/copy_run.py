"""`plan_copy` and `copy_run`: copy checkpoints of a run into another store, verified, and continued where a copy before was cut off."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import attrs

from trainfold.backends.formats.native.file_digest import digest_in
from trainfold.backends.runs.best.best_reader import BEST_POINTER, best_bytes, parsed_best
from trainfold.backends.runs.quarantine_file import end_attempt
from trainfold.backends.runs.reuse.leftovers import leftovers
from trainfold.backends.runs.scan import read_inventory, read_root
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.local import LocalStore, Run, open_store
from trainfold.backends.stores.os_errors import locked
from trainfold.backends.stores.place import is_object_url, local_path, url_parts
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.tiers.compare_runs import DELETED, Steps, planned_copy, unless_empty
from trainfold.backends.tiers.copy_file import copy_file
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointMissing,
    CheckpointTorn,
    CommitConflict,
    InvalidArgument,
    SaveFailed,
    TrainfoldError,
    error_text,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE
from trainfold.core.history.copy_plan import CheckpointCopy, CopiedFile, CopyPlan
from trainfold.core.history.inventory import lineage
from trainfold.core.json_values import shown
from trainfold.core.problem import error_from

_AT_ONCE: Final = 4  # files: a request to a bucket waits longer than it works
_ROOM_BYTES: Final = 1 << 20  # for a manifest


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


def carried_out(
    planned: Callable[[], CopyPlan],
    source: Store,
    target: Store,
    *,
    again: Callable[[TrainfoldError], bool] = lambda _: False,
    advance: Callable[[int], object] = lambda _: None,
) -> CopyPlan:
    """Plan, take the lock of the target, plan again, and carry that plan out.

    Args:
        planned: makes the plan.
        source: what is read.
        target: the store that is written.
        again: whether there is another place from which what was wrong can be read, and that is taken now.
        advance: gets the number of bytes that are done.

    Returns:
        The plan that was carried out.

    Raises:
        TrainfoldError: as `copy_run` does.
    """
    check_copy(planned())
    with locked(target, lambda _: "wait until it ends, or stop it: a copy is the only writer of its target"):
        first = plan = planned()  # another writer was there until now
        deleted: dict[str, str] = {}
        while True:
            check_copy(plan)
            wrong = carry_out(plan, source, target, advance=advance)
            gone = {name: DELETED for name in wrong if source.size(f"{name}/{MANIFEST}") is None}
            _tidy(target, plan, gone)
            is_again = bool([error for error in wrong.values() if again(error)]) or (bool(gone) and not deleted)
            deleted |= gone
            if gone:
                first = attrs.evolve(
                    first, checkpoints=tuple(each for each in first.checkpoints if each.name not in wrong)
                )
            if not is_again:
                _raise_all([error for name, error in wrong.items() if name not in deleted])
                return _without(deleted, first, plan)
            plan = planned()
            if deleted and plan.refused:
                raise _deleted_error(source.url, deleted)


def _without(deleted: Mapping[str, str], first: CopyPlan, last: CopyPlan) -> CopyPlan:
    """The plan that was carried out, in two parts if checkpoints were deleted meanwhile.

    Raises:
        CheckpointMissing: if nothing newer than those was copied.
    """
    if not deleted:
        return first
    both = {each.name: each for each in (*last.checkpoints, *first.checkpoints) if each.name not in deleted}
    if max(both, default="") < max(deleted):
        raise _deleted_error(first.source, deleted)
    copies = tuple(both[name] for name in sorted(both))
    return attrs.evolve(last, makes_run=first.makes_run, checkpoints=copies, left_out={**last.left_out, **deleted})


def _deleted_error(source: str, deleted: Mapping[str, str]) -> CheckpointMissing:
    names = ", ".join(sorted(deleted))
    return CheckpointMissing(source, expected="checkpoints that stay until they are copied", found=f"{names}: {DELETED}",
                             fix="run it again: it copies what is there then")  # fmt: skip


def _tidy(target: Store, plan: CopyPlan, gone: Collection[str]) -> None:
    """Delete from the target what was sent of checkpoints that no source has any more."""
    if not gone:
        return
    referred = {other for entry in read_inventory(glimpse(target)).entries for other in entry.refers}
    for each in plan.checkpoints:
        if each.name in gone and each.action == "copied" and each.name not in referred:
            sent = {file.path for file in each.files}
            if sent.issuperset(f"{each.name}/{name}" for name in target.list(each.name)):
                target.delete(f"{each.name}/")


def check_copy(plan: CopyPlan) -> None:
    """Check that nothing is refused.

    Raises:
        TrainfoldError: the first reason, with the others as notes.
    """
    _raise_all([error_from(each) for each in plan.refused])


def carry_out(
    plan: CopyPlan, source: Store, target: Store, *, advance: Callable[[int], object] = lambda _: None
) -> dict[str, TrainfoldError]:
    """Carry out a plan that refuses nothing. The caller holds the lock of the target.

    Args:
        plan: the plan.
        source: the run that is read.
        target: the store that is written.
        advance: gets the number of bytes that are done.

    Returns:
        Name -> what is wrong with it, of checkpoints of the source that could not be copied. The others are there.

    Raises:
        SaveFailed: if the target cannot be written.
    """
    if plan.makes_run:
        with suppress(CommitConflict):  # by the same copy, which was cut off: another run was refused
            target.commit(RUN_FILE, source.read(RUN_FILE))
    wrong: dict[str, TrainfoldError] = {}
    for each in plan.checkpoints:
        if each.action == "there":
            continue
        try:
            if lost := [name for name in each.refers if name in wrong]:
                raise CheckpointTorn(f"{source.url}/{each.name}", expected=f"{lost[0]}, to whose files it refers",
                                     found="one that could not be copied", fix=wrong[lost[0]].fix)  # fmt: skip
            _copy(each, source, target, advance)
        except SaveFailed:
            raise
        except TrainfoldError as error:
            wrong[each.name] = _saved_again(each, source) or error
    newest = next(iter(lineage(read_inventory(glimpse(target)))), None)
    if newest is not None:
        target.point("latest", newest.name)
    if plan.best and not wrong:
        _copy_best(source, target)
    return wrong


def _copy(plan: CheckpointCopy, source: Store, target: Store, advance: Callable[[int], object]) -> None:
    """Copy the files of one checkpoint, and commit it."""
    target.reserve(plan.size_bytes + _ROOM_BYTES)
    files = [_with_digest(source, file) for file in plan.files]
    at_once([partial(copy_file, source, target, file, advance) for file in files], threads=_AT_ONCE)
    root = read_root(source, plan.name)
    if (error := _another(plan, source, root)) is not None:
        raise error
    # the same bytes again make the names of files durable that came into its directory now
    target.commit(f"{plan.name}/{MANIFEST}", root, replaces=plan.replaces or None)
    if plan.action == "completed":
        end_attempt(target, plan.name)  # its files were verified
    if plan.action == "replaced":
        for name in leftovers(target, read_inventory(target)).get(plan.name, ()):
            target.delete(f"{plan.name}/{name}")


def _another(plan: CheckpointCopy, source: Store, root: bytes) -> CheckpointTorn | None:
    """The error for a step that has another manifest than it was planned with."""
    if digest_of(root) == plan.digest:
        return None
    return CheckpointTorn(f"{source.url}/{plan.name}", expected=f"the manifest {plan.digest}", found="another one: the step was saved again meanwhile",
                          fix="copy it again")  # fmt: skip


def _saved_again(plan: CheckpointCopy, source: Store) -> CheckpointTorn | None:
    """The same, after an error: files that are gone, or have other bytes, are those of another save; None if the manifest is the one that was planned, or none."""
    try:
        return _another(plan, source, read_root(source, plan.name))
    except TrainfoldError:
        return None


def _with_digest(store: Store, file: CopiedFile) -> CopiedFile:
    """A file with a digest of its bytes: of one that no manifest names, of those that it has now."""
    return file if file.digest else attrs.evolve(file, digest=digest_in(store, file.path, file.size_bytes))


def _copy_best(source: Store, target: Store) -> None:
    data, old = best_bytes(source), best_bytes(target)
    if data is not None:
        target.commit(BEST_FILE, data, replaces=None if old is None else digest_of(old))
        target.point(BEST_POINTER, parsed_best(source, data).name)


def _planned(source: Store, target: Store, steps: Steps) -> CopyPlan:
    return unless_empty(planned_copy(source, target, steps=steps), fix=f"see trainfold ls {source.url}")


def _opened(source: Run, target: Run) -> tuple[Store, Store]:
    places = _place(source), _place(target)
    shorter, longer = sorted([place or () for place in places], key=len)
    if source is target or (shorter and longer[: len(shorter)] == shorter):
        raise InvalidArgument("copy.target", expected="another place than the source, and neither inside the other", found=target if isinstance(target, str) else shown(target),
                              fix="name the place of the copy")  # fmt: skip
    return open_store(source), open_store(target)


def _place(run: Run) -> tuple[str, ...]:
    """The parts of a location, whatever way it is written; none of a store that only its object knows."""
    if isinstance(run, LocalStore):
        run = run.url
    if not isinstance(run, str | Path):
        return ()
    if not is_object_url(str(run)):
        return Path(local_path(run)).resolve().parts
    return url_parts(str(run))


def _raise_all(wrong: Sequence[TrainfoldError]) -> None:
    """Raise the first error, with the others as notes; nothing if there is none."""
    if wrong:
        for other in wrong[1:]:
            wrong[0].add_note(f"and besides: {error_text(other)}")
        raise wrong[0]
