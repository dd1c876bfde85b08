"""`trainfold prune RUN`: deletes old checkpoints by the rules of a manager's retention, or shows what it would delete."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.adapters.cli.locate import nothing_complete, open_run
from trainfold.adapters.cli.terminal.output import Answer, Table, UsageError
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.reuse.leftovers import leftovers
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.os_errors import locked
from trainfold.backends.stores.protocol import LeavesUploads, Store
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.errors import CheckpointError, InvalidArgument, TrainfoldError
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.printable import bytes_text
from trainfold.core.problem import error_from, problem_of
from trainfold.core.save.events import Event
from trainfold.core.save.pruning import UNFINISHED, Pruning, held_back, newest_complete, newest_to_examine
from trainfold.core.save.retention import Retention, Saved, keep_best, keep_every, keep_last, keep_newer

_COMMAND: Final = "trainfold prune"
_WAIT: Final = "wait until it ends, or stop it: the lock ends with the process; --dry-run needs no lock"  # no other run can be used here
_LEAST: Final = {  # the least value of each rule, and what to do about a lower one
    "--keep-last": ("0", "give how many of the newest checkpoints stay, or 0 for all"),
    "--keep-every": ("1", "give a number of steps, such as 10000"),
    "--keep-best": ("1", "give how many of the best checkpoints stay"),
    "--keep-newer": ("0s", "give a duration, such as 7d"),
    "--left-behind-last": ("0", "give how many of the newest checkpoints stay, or 0 for all"),
    "--left-behind-newer": ("0s", "give a duration, such as 7d"),
}
_WRITTEN: Final = "just written"  # as a plan calls the newest, which a manager has just saved


@final
@attrs.frozen(kw_only=True)
class Keep:
    """The options of `trainfold prune` for what stays. Each is the argument of a manager's rule; None for no such rule.

    Attributes:
        last: as `keep_last`; 0 for all.
        every: as `keep_every`.
        best: as `keep_best`, in the direction that the run's ``best.json`` has.
        newer_secs: as `keep_newer`.
        left_behind_last: as `keep_last`, of the checkpoints that rewinds have left behind.
        left_behind_newer_secs: as `keep_newer`, of these.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    newer_secs: float | None = None
    left_behind_last: int | None = None
    left_behind_newer_secs: float | None = None


def prune_run(run: Path, keep: Keep, *, dry_run: bool, flatten: bool = False) -> Answer:
    """Delete what no rule keeps, as a manager does after each save.

    The newest complete checkpoint stays, and so does what a pointer or ``best.json`` names. It is read whole before another one is
    deleted. What is left of older saves and deletions that did not finish goes. A newer one stays, because it may be a save under way.
    What no rule counts, such as a damaged checkpoint, stays, and is in the answer with the reason.

    Args:
        run: the directory.
        keep: the rules; at least one of the present lineage.
        dry_run: whether nothing is deleted. Only a deletion needs the run's lock.
        flatten: whether the checkpoints that stay and refer to files of others are written again first, so that the others may go.

    Returns:
        What stays, and what went or would go. Nothing is deleted, and the answer has the error, if the newest checkpoint proves damaged, which
        must not be the only one left, or if it is not known to what a checkpoint refers, because its manifest cannot be read.

    Raises:
        UsageError: without a rule, or for a value that a rule cannot have.
        RunEmpty: if nothing in the run is complete.
        RunLocked: while another program may save into the run.
        CheckpointError: the matching subclass, if the directory is not a run, or its ``best.json`` cannot be read.
        SaveFailed: if something cannot be deleted, or written again.
    """
    store, inventory = open_run(run)
    policy, left_behind = _policies(store, keep)
    pruner, now = Pruner(store, policy, left_behind), time.time()
    events: list[Event] = []
    with nullcontext() if dry_run else locked(store, lambda _: _WAIT):
        written = _newest(store, inventory if dry_run else open_run(run)[1])
        plan = pruner.plan(written, now=now)
        alone, wrong, grown = (
            _stood_alone(store, plan, dry_run=dry_run) if flatten and plan.held is None else ([], [], 0)
        )
        if alone or wrong:
            plan = pruner.plan(written, alone=alone, now=now)
        damage = _damage(run, written, plan)
        if damage is not None and plan.held is None:
            plan = held_back(plan, written.name, problem_of(damage))
        sizes = _sizes(store, plan)
        gone = {*plan.deleted, *plan.torn}
        left = {} if damage is not None else leftovers(store, read_inventory(store))
        left = {name: files for name, files in left.items() if name not in gone}
        if not dry_run and damage is None:
            pruner.prune(written, events, now=now)
            pruner.clear(left)
        aborted = store.abort_uploads() if not dry_run and isinstance(store, LeavesUploads) else 0
    deleted = plan.deleted if dry_run else tuple(each.checkpoint for each in events if each.checkpoint is not None)
    return attrs.evolve(
        _answer(inventory, plan, deleted, sizes, alone=alone, left=left, grown=grown, aborted=aborted, dry_run=dry_run),
        error=damage or next(iter(wrong), None),
    )


def _stood_alone(store: Store, plan: Pruning, *, dry_run: bool) -> tuple[list[str], list[CheckpointError], int]:
    """The checkpoints that are written again without references, or would be; what is wrong with others; and how many bytes more they have then."""
    # late: other pruning writes no checkpoint
    from trainfold.backends.runs.reuse.stand_alone import grows_bytes, write_all_alone
    from trainfold.core.save.reuse.stand_alone import to_stand_alone

    names = [*to_stand_alone(plan)]
    if not names:
        return [], [], 0
    if dry_run:
        return names, [], sum(grows_bytes(store, name) for name in names)
    before = _bytes_in(store, names)
    done, wrong = write_all_alone(store, names)
    return done, wrong, _bytes_in(store, names) - before


def _bytes_in(store: Store, names: Iterable[str]) -> int:
    return sum(store.size(f"{name}/{file}") or 0 for name in names for file in store.list(name))


def _policies(store: Store, keep: Keep) -> tuple[Retention, Retention | None]:
    rules = (
        ("--keep-last", keep.last, keep_last),
        ("--keep-every", keep.every, keep_every),
        ("--keep-newer", keep.newer_secs, keep_newer),
    )
    policy = _added(None, rules)
    if keep.best is not None:
        file = read_best(store)
        if file is None:
            raise UsageError(f"{_COMMAND} --keep-best", expected="a run with a best.json", found="none",
                             fix="leave --keep-best out: no score of this run is recorded")  # fmt: skip
        best = _rule("--keep-best", partial(keep_best, direction=file.record.direction), keep.best)
        policy = best if policy is None else policy | best
    if policy is None:
        raise UsageError(_COMMAND, expected="at least one rule for what stays", found="none",
                         fix="for example: --keep-last 3, --keep-every 10000, --keep-best 3 or --keep-newer 7d")  # fmt: skip
    left = (
        ("--left-behind-last", keep.left_behind_last, keep_last),
        ("--left-behind-newer", keep.left_behind_newer_secs, keep_newer),
    )
    return policy, _added(None, left)


def _added(policy: Retention | None, rules: Sequence[tuple[str, Any, Callable[[Any], Retention]]]) -> Retention | None:
    for option, value, make in rules:
        if value is not None:
            rule = _rule(option, make, value)
            policy = rule if policy is None else policy | rule
    return policy


def _rule(option: str, make: Callable[[Any], Retention], value: Any) -> Retention:
    try:
        return make(value)
    except InvalidArgument as error:
        least, fix = _LEAST[option]
        raise UsageError(f"{_COMMAND} {option}", expected=f"{least} or more", found=error.found, fix=fix) from None


def _newest(store: Store, inventory: Inventory) -> Saved:
    """The newest checkpoint that has all its files.

    Raises:
        RunEmpty: if there is none.
    """
    inventory = with_quarantined(inventory, quarantined(store))
    while (name := newest_to_examine(inventory)) is not None:
        inventory = examine(store, inventory, name)
    found = newest_complete(inventory)
    if found is None:
        raise nothing_complete(inventory)
    return found


def _damage(run: Path, newest: Saved, plan: Pruning) -> TrainfoldError | None:
    """Why nothing goes. The newest is read whole if others are to be deleted: a manager has just written its own, but this one may be damaged."""
    if plan.held is not None:
        return error_from(plan.held)
    return verify_checkpoint(run / newest.name).error if plan.deleted else None


def _sizes(store: Store, plan: Pruning) -> dict[str, int]:
    """How many bytes each directory that goes has in its files."""
    return {name: _bytes_in(store, [name]) for name in (*plan.deleted, *plan.torn)}


def _answer(  # noqa: PLR0913 - of one call
    inventory: Inventory,
    plan: Pruning,
    deleted: tuple[str, ...],
    sizes: Mapping[str, int],
    *,
    alone: Sequence[str],
    left: Mapping[str, Mapping[str, int]],
    grown: int,
    aborted: int,
    dry_run: bool,
) -> Answer:
    planned = {**plan.lineage.kept, **plan.left_behind.kept}
    kept = {name: ["the newest" if each == _WRITTEN else each for each in why] for name, why in planned.items()}
    verb = "goes" if dry_run else "gone"
    again = dict.fromkeys(alone, f"; {'would be' if dry_run else 'was'} written again, without references")
    rows = [(name, "stays", "", "; ".join(why) + again.get(name, "")) for name, why in kept.items()]
    rows += [(name, verb, bytes_text(sizes[name]), "nothing keeps it") for name in deleted]
    rows += [(name, verb, bytes_text(sizes[name]), UNFINISHED) for name in plan.torn]
    rows += [(name, "stays", "", why + again.get(name, "")) for name, why in plan.left_alone.items()]
    rows += [
        (name, verb, bytes_text(sum(files.values())), f"{len(files)} files: {UNFINISHED}")
        for name, files in left.items()
    ]
    if aborted:
        rows.append(("uploads", verb, "", f"{aborted} {'that was' if aborted == 1 else 'that were'} killed"))
    freed = (
        sum(sizes[name] for name in (*deleted, *plan.torn)) + sum(sum(each.values()) for each in left.values()) - grown
    )
    what = (
        f"{'would free' if dry_run else 'freed'} {bytes_text(freed)}"
        if freed >= 0
        else f"{'would take' if dry_run else 'takes'} {bytes_text(-freed)} more than before"
    )
    title = f"{inventory.run}: {what}"
    data = {
        "run": inventory.run,
        "dry_run": dry_run,
        "kept": [{"name": name, "why": why} for name, why in kept.items()],
        "deleted": [{"name": name, "size_bytes": sizes[name]} for name in deleted],
        "torn": [{"name": name, "size_bytes": sizes[name]} for name in plan.torn],
        "left_alone": [{"name": name, "why": why} for name, why in plan.left_alone.items()],
        "flattened": list(alone),
        "leftovers": [
            {"name": name, "files": list(files), "size_bytes": sum(files.values())} for name, files in left.items()
        ],
        "aborted_uploads": aborted,
        "freed_bytes": freed,
    }
    return Answer(data, (Table(title, ("checkpoint", "what", "size", "why"), tuple(rows)),))
