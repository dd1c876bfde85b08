"""`planned_copy`: reads what two stores hold, and decides which checkpoints of one go into the other."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

import attrs

from trainfold.backends.runs.best.best_reader import best_bytes, parsed_best
from trainfold.backends.runs.quarantine_file import is_damaged, quarantined
from trainfold.backends.runs.scan import check_place, examine, listed_run, read_root
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.checks import count
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointError,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointTorn,
    CheckpointUnreadable,
    InvalidArgument,
    RunEmpty,
    error_text,
)
from trainfold.core.format.file_names import MANIFEST, directory_of, is_data_file
from trainfold.core.format.manifest import FileRecord, Head, IndexRecord, Manifest
from trainfold.core.history.copy_plan import CopiedFile, CopyPlan, Offered, Present, decide_copy, in_copy_order
from trainfold.core.history.inventory import Inventory, head_order, lineage
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.json_values import shown
from trainfold.core.problem import Problem, error_from, problem_of

DELETED: Final = "deleted from the source meanwhile"
Steps: TypeAlias = Literal["all", "newest"] | Sequence[int]


def planned_copy(
    source: Store, target: Store, *, steps: Steps, replaces: bool = False, lost: Collection[str] = ()
) -> CopyPlan:
    """Plan a copy between opened stores; writes nothing.

    Args:
        source: the run that is read.
        target: the store that would be written.
        steps: ``"all"``, ``"newest"``, or steps.
        replaces: whether later revisions replace earlier ones, and ``best.json`` what is there.
        lost: checkpoints of the target that have not loaded, so that each of their files is compared.

    Raises:
        InvalidArgument: for invalid steps.
        CheckpointError: the matching subclass, if the source is not a run, or the target holds something else.
    """
    source, target = glimpse(source), glimpse(target)
    here, there = inventory_in(source), inventory_in(target, may_be_new=True)
    if there.run_id not in {None, here.run_id}:
        raise CheckpointForeign(target.url, expected=f"run {here.run_id}, as in {source.url}, or nothing", found=f"run {there.run_id}",
                                fix="name another place: one place has the checkpoints of one run")  # fmt: skip
    names, problems, passed = _chosen(source, here, steps)
    order = in_copy_order(here, names)
    offered: dict[str, Offered] = {}
    present: dict[str, Present] = {}
    for name in order:
        try:
            offered[name], found = _compared(source, here, target, there, name, is_lost=name in lost)
        except CheckpointError as error:
            problems[name] = problem_of(_deleted(source, here, name) or error)
        else:
            present |= {} if found is None else {name: found}
    looked_at = [
        file.path
        for name, each in offered.items()
        for file in (*each.beside, *(file for file in each.files if file.directory != name))
    ]
    sizes = side_by_side([partial(target.size, path) for path in looked_at])
    best, best_problem = _best_in(source, target, replaces=replaces)
    plan = decide_copy(
        here,
        there,
        {**order, **dict.fromkeys(problems.keys() - order.keys(), "asked for")},
        offered=offered,
        problems=problems,
        present=present,
        sizes=dict(zip(looked_at, sizes, strict=True)),
        asked=None if steps == "all" else names,
        replaces=replaces,
        best=best,
    )
    more = {name: str(problem) for name, problem in passed.items()}
    more |= {} if best_problem is None else {BEST_FILE: best_problem}
    newest = next(reversed(passed.values()), plan.newest_lost)
    return attrs.evolve(plan, left_out={**plan.left_out, **more}, newest_lost=newest) if more else plan


def unless_empty(plan: CopyPlan, *, fix: str) -> CopyPlan:
    """The plan, refused if there is no checkpoint in it: no run is begun for none.

    Args:
        plan: the plan.
        fix: the next move.
    """
    if plan.checkpoints or plan.refused:
        return plan
    lost = "; ".join(f"{name}: {why}" for name, why in plan.left_out.items())
    error = RunEmpty(plan.source, expected="a complete checkpoint", found=lost or "none", fix=fix)
    return attrs.evolve(plan, refused=(problem_of(error),))


def _best_in(source: Store, target: Store, *, replaces: bool) -> tuple[Mapping[str, int] | None, str | None]:
    """Checkpoint -> timeline, of those that the source's best names, if it is to go along; and what is wrong with the record of one of the two: the checkpoints go without it."""
    try:
        best, old = best_bytes(source), best_bytes(target)
        if best is None or (old is not None and (old == best or not replaces)):
            return None, None
        return parsed_best(source, best).timelines, None
    except CheckpointUnreadable:  # another try may get it
        raise
    except CheckpointError as error:
        return None, error_text(error)


def inventory_in(store: Store, *, may_be_new: bool = False) -> Inventory:
    """The checkpoints in a store, with what is in quarantine.

    Args:
        store: where the run is.
        may_be_new: whether it may be a place where no run is yet.

    Raises:
        CheckpointError: the matching subclass, if it is something else.
    """
    found = listed_run(store)
    if found.problem is not None:
        if not may_be_new or found.problem.error != CheckpointMissing.__name__:
            raise error_from(found.problem)
        check_place(store)
    return with_quarantined(found, quarantined(store))


def newest_whole(store: Store, inventory: Inventory) -> str | None:
    """The checkpoint that a resume tries first, of those whose files are there; None if there is none."""
    return _newest_whole(store, inventory)[0]


def _newest_whole(store: Store, inventory: Inventory) -> tuple[str | None, dict[str, Problem]]:
    """The same, and what is wrong with those that are newer, or may be: a save that is under way is not one of them."""
    for entry in lineage(inventory):
        inventory = examine(store, inventory, entry.name)
        found = inventory.entry(entry.name)
        if found is not None and found.head is not None and found.problem is None:
            return entry.name, _passed_over(inventory, found.head)
    return None, {}


def _passed_over(inventory: Inventory, head: Head) -> dict[str, Problem]:
    begun = CheckpointTorn.__name__
    return {
        each.name: each.problem
        for each in inventory.entries
        if each.problem is not None
        and (each.problem.error != begun if each.head is None else head_order(each.head) > head_order(head))
    }


def _chosen(
    store: Store, inventory: Inventory, steps: Steps
) -> tuple[list[str], dict[str, Problem], dict[str, Problem]]:
    """The names that are to be copied, why some of them cannot be, and what was passed over for them."""
    if steps == "all":
        begun = CheckpointTorn.__name__  # without a manifest: a save that did not finish, or is under way
        wrong = {each.name: each.problem for each in inventory.entries if each.problem is not None}
        whole = [each.name for each in inventory.entries if each.is_candidate]
        return whole, {name: problem for name, problem in wrong.items() if problem.error != begun}, {}
    if steps == "newest":
        name, passed = _newest_whole(store, inventory)
        if name is None:
            raise RunEmpty(inventory.run, expected="a whole checkpoint", found="none", fix=f"see trainfold ls {inventory.run}")  # fmt: skip
        return [name], {}, passed
    if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
        raise InvalidArgument("copy.steps", expected="'all', 'newest' or steps", found=shown(steps), fix="pass steps, such as [100, 200]")  # fmt: skip
    names = [directory_of(count("copy.steps", step, least=0, fix="pass steps, such as [100, 200]")) for step in steps]
    found = {name: _problem_at(inventory, name) for name in names}
    return names, {name: problem for name, problem in found.items() if problem is not None}, {}


def _problem_at(inventory: Inventory, name: str) -> Problem | None:
    entry = inventory.entry(name)
    if entry is not None:
        return entry.problem
    known = [each.name for each in inventory.entries if each.is_candidate]
    error = CheckpointMissing(f"{inventory.run}/{name}", expected="a checkpoint", found=f"none; the run has {', '.join(known[-8:]) or 'none'}",
                              fix=f"see trainfold ls {inventory.run}")  # fmt: skip
    return problem_of(error)


def _compared(  # noqa: PLR0913 - private
    source: Store, here: Inventory, target: Store, there: Inventory, name: str, *, is_lost: bool
) -> tuple[Offered, Present | None]:
    """A checkpoint of the source, and what the target has in its place.

    Raises:
        CheckpointError: the matching subclass, if that of the source is not whole.
    """
    entry = here.entry(name)
    assert entry is not None  # the order is of entries
    if entry.problem is not None:
        raise error_from(entry.problem)
    root = read_root(source, name)
    digest, present = digest_of(root), None
    found = there.entry(name)
    if found is not None and target.size(f"{name}/{MANIFEST}") is not None:
        old = digest_of(read_root(target, name))
        looks = old == digest and found.problem is None and not is_lost
        seen = examine(target, there, name).entry(name) if looks else None
        is_other = old != digest and found.problem is not None and is_damaged(target, name, old)
        present = Present(None if is_other else found.head, old, seen is not None and seen.problem is None)
    files: tuple[CopiedFile, ...] = ()
    if present is None or not present.is_whole:
        proved = examine(source, here, name, root=root).entry(name)
        assert proved is not None  # as above
        if proved.problem is not None:
            raise error_from(proved.problem)
        assert proved.manifest is not None  # without a problem it has one
        entry, files = proved, _files_of(proved.manifest, name)
    assert entry.head is not None  # without a problem it has one
    others = {each: source.size(f"{name}/{each}") for each in source.list(name) if each != MANIFEST and not is_data_file(each)}  # fmt: skip
    beside = tuple(CopiedFile(f"{name}/{each}", size, "") for each, size in others.items() if size is not None)
    folders = tuple(each for each, size in others.items() if size is None)
    return Offered(entry.head, digest, files, beside, folders), present


def _deleted(source: Store, here: Inventory, name: str) -> CheckpointMissing | None:
    """What is wrong with a checkpoint that was whole when the run was listed, and is gone now: a deletion begins with the manifest."""
    entry = here.entry(name)
    if entry is None or entry.problem is not None or source.size(f"{name}/{MANIFEST}") is not None:
        return None
    return CheckpointMissing(f"{here.run}/{name}", expected="a checkpoint that stays until it is copied", found=DELETED, fix="run it again: it copies what is there then")  # fmt: skip


def _files_of(manifest: Manifest, name: str) -> tuple[CopiedFile, ...]:
    records: tuple[FileRecord | IndexRecord, ...] = (*manifest.files, *manifest.indexes)
    return tuple(CopiedFile(each.path(name), each.size_bytes, each.digest) for each in records)
