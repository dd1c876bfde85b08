"""`trainfold collect NODE... -o RUN`: puts a run together from folders of several nodes, or shows what it would collect."""

from collections.abc import Sequence
from pathlib import Path

from trainfold.adapters.cli.terminal.output import Answer
from trainfold.adapters.cli.tiers.copy import carried_out_or_shown
from trainfold.backends.stores.local import open_store
from trainfold.backends.tiers.collect_run import collect_run, plan_collect
from trainfold.backends.tiers.compare_runs import Steps


def collect_paths(
    nodes: Sequence[Path], target: Path, *, steps: tuple[int, ...] | None = None, dry_run: bool = False
) -> Answer:
    """Collect checkpoints, or plan to.

    Args:
        nodes: the folders.
        target: where the checkpoints go.
        steps: which ones; None for all.
        dry_run: whether nothing is written.

    Returns:
        The plan, with what each incomplete checkpoint lacks. In a dry run, what refuses it is the error.

    Raises:
        CheckpointError: the matching subclass; see `collect_run`.
    """
    wanted: Steps = "all" if steps is None else steps
    folders, store = [open_store(str(each)) for each in nodes], open_store(str(target))
    return carried_out_or_shown(
        lambda: plan_collect(folders, store, steps=wanted),
        lambda advance: collect_run(folders, store, steps=wanted, advance=advance),
        doing="collecting",
        dry_run=dry_run,
    )
