"""`trainfold ls RUN`: the checkpoints of a run."""

import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import final

import attrs

from trainfold.adapters.cli.locate import nothing_complete, open_run
from trainfold.adapters.cli.terminal.duration import duration_text
from trainfold.adapters.cli.terminal.output import Answer, Table, size_text
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import examine
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointError
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.indexes.needed import nothing_needed
from trainfold.core.history.inventory import Entry, lineage
from trainfold.core.history.quarantine import with_quarantined

_COLUMNS = ("checkpoint", "step", "timeline", "after", "date", "age", "size", "kind", "components", "status")
_SPARE = ("components", "after", "date", "timeline", "kind", "size", "age")
_LATEST = "latest"  # a pointer to the newest one, which the status names already


@final
@attrs.frozen
class Listed:
    """One line of the list.

    Attributes:
        entry: what the inventory says.
        committed_at: when it was committed, in seconds since 1970; None if that is not known.
        named: each pointer to it, and its rank in ``best.json``: why a deletion passes over it.
        is_left_behind: whether the present lineage does not go through it, although it is complete.
    """

    entry: Entry
    committed_at: float | None
    named: tuple[str, ...]
    is_left_behind: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """The format, whether components were left out, and its names; nothing without a manifest."""
        manifest = self.entry.manifest
        if manifest is None:
            return ()
        return ("native", *(["partial"] if manifest.omitted else []), *(name for name in self.named if name != _LATEST))


def list_run(run: Path, *, clock: float | None = None) -> Answer:
    """List what a run holds: each checkpoint, whether it is complete and usable, and what is left of saves that did not finish.

    Args:
        run: the directory.
        clock: the time now, in seconds since 1970; None for the time of this machine.

    Returns:
        The list; with `RunEmpty` if nothing in it is complete.

    Raises:
        CheckpointError: the matching subclass, if the directory is not a run.
    """
    store, inventory = open_run(run)
    for entry in inventory.entries:
        if entry.is_candidate:
            inventory = examine(store, inventory, entry.name, needs=nothing_needed())
    inventory = with_quarantined(inventory, quarantined(store))
    present = [entry.name for entry in lineage(inventory)]
    names = _names(store)
    listed = [_listed(store, entry, names.get(entry.name, ()), present) for entry in inventory.entries]
    newest = present[0] if present else None
    now = time.time() if clock is None else clock
    rows = tuple(_row(each, now, is_newest=each.entry.name == newest) for each in listed)
    data = {
        "run": inventory.run,
        "run_id": inventory.run_id,
        "newest": newest,
        "checkpoints": [_json(each, now) for each in listed],
    }
    table = Table(f"{inventory.run}  run {inventory.run_id}", _COLUMNS, rows, _SPARE)
    return Answer(data, (table,), None if newest is not None else nothing_complete(inventory))


def _listed(store: Store, entry: Entry, named: tuple[str, ...], present: Collection[str]) -> Listed:
    committed_at = None if entry.manifest is None else store.committed_at(f"{entry.name}/{MANIFEST}")
    return Listed(entry, committed_at, named, is_left_behind=entry.is_candidate and entry.name not in present)


def _names(store: Store) -> dict[str, tuple[str, ...]]:
    """The pointers to each checkpoint, and its rank in ``best.json``; a file that cannot be read names nothing here."""
    found: dict[str, tuple[str, ...]] = {}
    for pointer, target in sorted(store.pointers().items()):
        found[target] = (*found.get(target, ()), pointer)
    try:
        best = read_best(store)
    except CheckpointError:
        return found
    for target, why in ({} if best is None else best.names).items():
        name = why.removeprefix("the ")
        found[target] = tuple(dict.fromkeys((*found.get(target, ()), name)))
    return found


def _row(each: Listed, now: float, *, is_newest: bool) -> tuple[str, ...]:
    entry = each.entry
    date = (
        "" if each.committed_at is None else f"{datetime.fromtimestamp(each.committed_at).astimezone():%Y-%m-%d %H:%M}"
    )
    age = "" if each.committed_at is None else _age_text(now - each.committed_at)
    if entry.manifest is None or entry.problem is not None:
        problem = entry.problem
        status = "not read" if problem is None else f"{problem.error}: {problem.found}"
        claimed = ("", "", "") if entry.head is None else (str(entry.head.step), str(entry.head.timeline), "")
        return (entry.name, *claimed, date, age, "", "", "", status)
    head = entry.manifest.head
    status = "complete, left behind by a rewind" if each.is_left_behind else "complete"
    return (
        entry.name,
        str(head.step),
        str(head.timeline),
        head.parent or "",
        date,
        age,
        size_text(entry.manifest.size_bytes),
        ", ".join(each.kinds),
        " ".join(component.name for component in entry.manifest.components),
        "complete, resumed next" if is_newest else status,
    )


def _age_text(secs: float) -> str:
    """How long ago a save was; a clock that was set back makes nothing younger than now.

    Examples:
        >>> _age_text(40.2), _age_text(600), _age_text(-3)
        ('40 s', '10 min', '0 s')
    """
    secs = max(0.0, round(secs))
    return f"{secs / 60:.0f} min" if 120 <= secs < 7200 else duration_text(secs)


def _json(each: Listed, now: float) -> dict[str, object]:
    manifest, at = each.entry.manifest, each.committed_at
    entry = each.entry
    fingerprints: Mapping[str, str] | None = None
    if manifest is not None:
        fingerprints = {component.name: component.fingerprint for component in manifest.components}
    return {
        "name": entry.name,
        "head": None if entry.head is None else attrs.asdict(entry.head),
        "complete": manifest is not None and entry.problem is None,
        "problem": None if entry.problem is None else attrs.asdict(entry.problem),
        "committed_at": None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
        "age_secs": None if at is None else max(0.0, round(now - at, 3)),
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "kind": None if manifest is None else "native",
        "omitted": None if manifest is None else list(manifest.omitted),
        "names": list(each.named),
        "left_behind": each.is_left_behind,
        "fingerprints": fingerprints,
    }
