"""`carry_out`: sends the checkpoints of a plan from one store into another, each by one commit when all of its files are there."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import attrs

from trainfold.backends.formats.native.file_digest import digest_in
from trainfold.backends.runs.best.best_reader import BEST_POINTER, best_bytes, point_to_best, read_best
from trainfold.backends.runs.quarantine_file import end_attempt
from trainfold.backends.runs.reuse.leftovers import leftovers
from trainfold.backends.runs.scan import listed_run, read_root
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.tiers.copy_file import copy_file
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointError, CheckpointTorn, CommitConflict, SaveFailed, TrainfoldError
from trainfold.core.format.file_names import MANIFEST, RUN_FILE
from trainfold.core.history.copy_plan import CheckpointCopy, CopiedFile, CopyPlan
from trainfold.core.history.inventory import Inventory, lineage

_AT_ONCE: Final = 4  # files: a request to a bucket waits longer than it works
_ROOM_BYTES: Final = 1 << 20  # for a manifest


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
    seen = glimpse(target)
    found = listed_run(seen)
    present = lineage(found)
    newest = next(iter(present), None)
    # a hint to an older one, whose files have come just now, would prove that what cannot be read is older still
    if newest is not None and not any(each.may_come_back and newest.name not in each.before for each in found.entries):
        target.point("latest", newest.name)
    is_new = plan.best and not wrong
    if is_new:
        _copy_best(source, target)
    is_rewound = any(each.action == "replaced" for each in plan.checkpoints) or any(
        each.is_candidate and each not in present for each in found.entries
    )
    if is_new or is_rewound:
        _lead_best(target, seen, found, is_new=is_new)
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
        for name in leftovers(target, listed_run(target)).get(plan.name, ()):
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


def _lead_best(target: Store, seen: Store, inventory: Inventory, *, is_new: bool) -> None:
    """Point to the best of those that the run still goes through: neither to what a rewind has left behind, nor to its step, trained again."""
    try:
        best = read_best(target if is_new else seen)
    except CheckpointError:  # a copy leaves it as it is
        return
    pointed = seen.pointers().get(BEST_POINTER)
    if best is not None and (is_new or pointed == best.name):
        point_to_best(target, inventory, best, pointed=pointed)
