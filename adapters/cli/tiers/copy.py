"""`trainfold copy A B`: copies checkpoints of a run into another store, or shows what it would copy."""

from collections.abc import Callable
from pathlib import Path

import attrs

from trainfold.adapters.cli.terminal.output import Answer, Table, UsageError
from trainfold.adapters.cli.terminal.reading import Advance, reading
from trainfold.backends.stores.local import open_store
from trainfold.backends.tiers.compare_runs import Steps
from trainfold.backends.tiers.copy_run import copy_run, plan_copy
from trainfold.core.history.copy_plan import CopyPlan
from trainfold.core.printable import bytes_text
from trainfold.core.problem import error_from


def copy_path(
    source: Path, target: Path, *, steps: tuple[int, ...] | None = None, newest: bool = False, dry_run: bool = False
) -> Answer:
    """Copy checkpoints, or plan to.

    Args:
        source: the run.
        target: where they go.
        steps: which ones; None for all.
        newest: whether the newest alone is copied.
        dry_run: whether nothing is written.

    Returns:
        The plan. What refuses it, in a dry run, is the error; or why the newest checkpoint is left out.

    Raises:
        UsageError: for both ``steps`` and ``newest``.
        CheckpointError: the matching subclass; see `copy_run`.
    """
    if steps is not None and newest:
        raise UsageError("trainfold copy", expected="--steps or --newest", found="both", fix="leave one of them out")
    wanted: Steps = "newest" if newest else "all" if steps is None else steps
    first, second = open_store(str(source)), open_store(str(target))
    return carried_out_or_shown(
        lambda: plan_copy(first, second, steps=wanted),
        lambda advance: copy_run(first, second, steps=wanted, advance=advance),
        doing="copying",
        dry_run=dry_run,
    )


def carried_out_or_shown(
    plans: Callable[[], CopyPlan], carries_out: Callable[[Advance], CopyPlan], *, doing: str, dry_run: bool
) -> Answer:
    """A plan, carried out unless it is a dry run, or refuses something.

    Args:
        plans: makes the plan.
        carries_out: makes it again, and carries it out.
        doing: what the bar says meanwhile.
        dry_run: whether nothing is written.

    Returns:
        The plan. What refuses it is the error; or why the newest checkpoint is left out.
    """
    plan = plans()
    error = error_from(plan.refused[0]) if plan.refused else None
    if not dry_run and error is None:
        with reading(doing, sum(each.size_bytes for each in plan.checkpoints if each.action != "there")) as advance:
            plan = carries_out(advance)
    if error is None and plan.newest_lost is not None:
        error = error_from(plan.newest_lost)  # the others are there, and a program that copies each night has to see it
    title = f"{plan.source} to {plan.target}"
    data = {
        "source": plan.source,
        "target": plan.target,
        "dry_run": dry_run,
        "makes_run": plan.makes_run,
        "checkpoints": [
            {
                "name": each.name,
                "action": plan.outcome(each),
                "why": each.why,
                "digest": each.digest,
                "size_bytes": each.size_bytes,
            }
            for each in plan.checkpoints
        ],
        "left_out": dict(plan.left_out),
        "refused": [attrs.asdict(each) for each in plan.refused],
        "best": plan.best,
    }
    rows = tuple((name, action, bytes_text(size), why) for name, action, size, why in plan.rows())
    return Answer(data, (Table(title, ("checkpoint", "action", "size", "why"), rows),), error)
