"""`carried_out`: a copy from its plan to its end: the lock of the target, the plan again, and what was deleted from the source meanwhile."""

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from trainfold.backends.runs.scan import listed_run
from trainfold.backends.stores.os_errors import locked
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.tiers.compare_runs import DELETED
from trainfold.backends.tiers.copy_checkpoints import carry_out
from trainfold.core.errors import CheckpointMissing, TrainfoldError, error_text
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.problem import error_from


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
    referred = {other for entry in listed_run(glimpse(target)).entries for other in entry.refers}
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


def _raise_all(wrong: Sequence[TrainfoldError]) -> None:
    """Raise the first error, with the others as notes; nothing if there is none."""
    if wrong:
        for other in wrong[1:]:
            wrong[0].add_note(f"and besides: {error_text(other)}")
        raise wrong[0]
