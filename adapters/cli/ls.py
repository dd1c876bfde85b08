"""`trainfold ls RUN`: the checkpoints of a run."""

from pathlib import Path

import attrs

from trainfold.adapters.cli.locate import open_run
from trainfold.adapters.cli.terminal.output import Answer, Table, size_text
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import examine
from trainfold.core.errors import RunEmpty
from trainfold.core.history.inventory import Entry, lineage
from trainfold.core.history.quarantine import with_quarantined


def list_run(run: Path) -> Answer:
    """List what a run holds: each checkpoint, whether its files are all there and it is not in quarantine, and what did not become one.

    Args:
        run: the directory.

    Returns:
        The list; with `RunEmpty` if nothing in it is complete.

    Raises:
        CheckpointError: of the kind that fits, if it is no run.
    """
    store, inventory = open_run(run)
    for entry in inventory.entries:
        if entry.is_candidate:
            inventory = examine(store, inventory, entry.name)
    inventory = with_quarantined(inventory, quarantined(store))
    newest = next(iter(lineage(inventory)), None)
    rows = tuple(_row(entry, is_newest=newest is not None and entry.name == newest.name) for entry in inventory.entries)
    columns = ("checkpoint", "step", "timeline", "after", "size", "components", "status")
    spare = ("components", "after", "timeline", "size")
    error = None
    if newest is None:
        error = RunEmpty(
            inventory.run,
            expected="a complete checkpoint",
            found=f"{len(inventory.entries)} saves that did not finish" if inventory.entries else "none",
            fix="train from the start, or point at another run",
        )
    data = {
        "run": inventory.run,
        "run_id": inventory.run_id,
        "newest": None if newest is None else newest.name,
        "checkpoints": [_json(entry) for entry in inventory.entries],
    }
    return Answer(data, (Table(f"{inventory.run}  run {inventory.run_id}", columns, rows, spare),), error)


def _row(entry: Entry, *, is_newest: bool) -> tuple[str, ...]:
    if entry.manifest is None or entry.problem is not None:
        problem = entry.problem
        status = "not read" if problem is None else f"{problem.error}: {problem.found}"
        return (entry.name, "" if entry.head is None else str(entry.head.step), "", "", "", "", status)
    head = entry.manifest.head
    return (
        entry.name,
        str(head.step),
        str(head.timeline),
        head.parent or "",
        size_text(entry.manifest.size_bytes),
        " ".join(component.name for component in entry.manifest.components),
        "complete, resumed next" if is_newest else "complete",
    )


def _json(entry: Entry) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "name": entry.name,
        "head": None if entry.head is None else attrs.asdict(entry.head),
        "complete": manifest is not None and entry.problem is None,
        "problem": None if entry.problem is None else attrs.asdict(entry.problem),
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "fingerprints": None if manifest is None else {each.name: each.fingerprint for each in manifest.components},
    }
