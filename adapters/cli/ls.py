"""`trainfold ls RUN`: the checkpoints of a run. The newest are proved; the others are listed by the first lines of their manifests."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import final

import attrs

from trainfold.adapters.cli.locate import known_names, nothing_complete, open_run
from trainfold.adapters.cli.terminal.duration import duration_text
from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import examine, read_root
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointError, TrainfoldError
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.format.indexes.needed import nothing_needed
from trainfold.core.format.manifest import Summary
from trainfold.core.history.inventory import BEHIND, Entry, Inventory, head_order, lineage
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.history.recognise import gone_checkpoint
from trainfold.core.printable import bytes_text
from trainfold.core.problem import problem_of

_COLUMNS = ("checkpoint", "step", "timeline", "after", "date", "age", "size", "kind", "components", "status")
_MOST = 16  # checkpoints that are proved; the others are listed by the first lines of their manifests
_MOST_FILES = 2_000  # whose sizes are asked for
_MOST_BYTES = 2**25  # of manifests; these are decoded in about two seconds
_SPARE = ("components", "after", "date", "timeline", "kind", "size", "age")
_SHOWN = 2  # of the checkpoints to which one refers
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
        writer: the process that may be writing it now; None if none is known.
    """

    entry: Entry
    committed_at: float | None
    named: tuple[str, ...]
    is_left_behind: bool
    writer: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The format, whether components were left out, and its names; nothing if that is not known."""
        summary = self.summary
        if summary is None:
            return ()
        return ("native", *(["partial"] if summary.omitted else []), *(name for name in self.named if name != _LATEST))

    @property
    def summary(self) -> Summary | None:
        """What its manifest says, or what the first line of that claims; None if it cannot be read."""
        manifest = self.entry.manifest
        if manifest is not None:
            return manifest.summary
        return self.entry.summary if self.entry.is_candidate else None


def list_run(run: Path, *, components: Sequence[str] | None = None, clock: float | None = None) -> Answer:
    """List what a run holds: each checkpoint, whether it is complete and usable, and what is left of saves that did not finish.

    Args:
        run: the directory.
        components: which ones a listed checkpoint has; None for any.
        clock: the time now, in seconds since 1970; None for the time of this machine.

    Returns:
        The list; with `RunEmpty` if nothing in it is complete.

    Raises:
        CheckpointError: the matching subclass, if the directory is not a run.
        UnknownComponent: for a name that no checkpoint of it has.
    """
    store, inventory = open_run(run)
    return list_store(store, inventory, components=components, clock=clock)


def list_store(
    store: Store, inventory: Inventory, *, components: Sequence[str] | None = None, clock: float | None = None
) -> Answer:
    """List a run in any store.

    Args:
        store: the run.
        inventory: what `read_inventory` has found there.
        components: as for `list_run`.
        clock: as for `list_run`.
    """
    inventory = with_quarantined(proved(store, inventory), quarantined(store))
    present = [entry.name for entry in lineage(inventory)]
    names = pointed_names(store, inventory)
    times = side_by_side([partial(committed_at, store, entry) for entry in inventory.entries])
    listed = [
        Listed(
            entry,
            at,
            names.get(entry.name, ()),
            is_left_behind=entry.is_candidate and entry.name not in present,
            writer=inventory.writers.get(entry.name),
        )
        for entry, at in zip(inventory.entries, times, strict=True)
    ]
    listed += _gone(inventory, names)
    listed = _with(listed, components)
    shown = {each.entry.name for each in listed}
    newest = next((name for name in present if name in shown), None)
    now = time.time() if clock is None else clock
    first = inventory.entry(newest or "")
    refused = "" if first is None else inventory.refuses(first)
    rows = tuple(_row(each, now, (refused or "resumed next") if each.entry is first else "") for each in listed)
    data = {
        "run": inventory.run,
        "run_id": inventory.run_id,
        "newest": None if refused else newest,
        "checkpoints": [_json(each, now) for each in listed],
    }
    table = Table(f"{inventory.run}  run {inventory.run_id}", _COLUMNS, rows, _SPARE)
    return Answer(
        data, (table,), None if newest is not None else nothing_complete(inventory, under_way=inventory.writers)
    )


def _gone(inventory: Inventory, names: Mapping[str, Sequence[str]]) -> list[Listed]:
    """The checkpoints that a pointer names, and that are not there."""
    return [
        Listed(Entry(name, None, problem=problem_of(gone_checkpoint(inventory.run, name, by[0]))), None, tuple(by), is_left_behind=False)
        for name, by in names.items()
        if step_of(name) is not None and inventory.entry(name) is None
    ]  # fmt: skip


def _with(listed: list[Listed], components: Sequence[str] | None) -> list[Listed]:
    """Those that have these components; a known one that the run does not produce is ignored."""
    held = {each.entry.name: set(found.fingerprints) for each in listed if (found := each.summary) is not None}
    known = set().union(*held.values())
    known |= {name for each in listed if each.summary is not None for name in each.summary.omitted}
    names = known_names(components, sorted(known))
    if names is None:
        return listed
    return [each for each in listed if held.get(each.entry.name, set()) >= set(names) & known and each.summary]


def proved(store: Store, inventory: Inventory, *, roots: dict[str, bytes] | None = None) -> Inventory:
    """Prove the newest checkpoints: their manifests, and that their files are there. The others stay what their first lines claim.

    Args:
        store: the run.
        inventory: what `read_inventory` has found there.
        roots: gets the contents of their manifest files, for a caller that needs them too.
    """
    roots = {} if roots is None else roots
    bytes_left, files_left = _MOST_BYTES, _MOST_FILES
    newest = sorted(inventory.entries, key=lambda each: (0, 0) if each.head is None else head_order(each.head))
    for entry in [each for each in reversed(newest) if each.is_candidate][:_MOST]:
        with suppress(TrainfoldError):  # then there is a problem, which `examine` notes
            roots[entry.name] = read_root(store, entry.name)
        needs = nothing_needed(most_files=files_left)
        inventory = examine(store, inventory, entry.name, root=roots.get(entry.name), needs=needs)
        found = inventory.entry(entry.name)
        manifest = None if found is None else found.manifest
        if manifest is None:
            continue
        bytes_left -= len(roots.get(entry.name, b""))
        files_left -= len(manifest.names) + len(manifest.references)
        if bytes_left < 0 or files_left < 0:
            break
    return inventory


def committed_at(store: Store, entry: Entry) -> float | None:
    """When a checkpoint was committed, in seconds since 1970; None if that is not known."""
    return None if entry.head is None else store.committed_at(f"{entry.name}/{MANIFEST}")


def pointed_names(store: Store, inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """The pointers to each checkpoint, and its rank in ``best.json``; a file that cannot be read names nothing here."""
    found: dict[str, tuple[str, ...]] = {}
    for pointer, target in sorted(store.pointers().items()):
        if inventory.entry(target) is not None or not _is_there(store, target):  # else it is newer than the list
            found[target] = (*found.get(target, ()), pointer)
    try:
        best = read_best(store)
    except CheckpointError:
        return found
    for target, why in ({} if best is None else best.names_in(inventory.timelines)).items():
        if inventory.entry(target) is None:
            continue
        name = why.removeprefix("the ")
        found[target] = tuple(dict.fromkeys((*found.get(target, ()), name)))
    return found


def _is_there(store: Store, name: str) -> bool:
    try:
        return store.size(f"{name}/{MANIFEST}") is not None
    except (TrainfoldError, OSError):  # then that is not known
        return True


def _row(each: Listed, now: float, resume: str) -> tuple[str, ...]:
    entry = each.entry
    date = (
        "" if each.committed_at is None else f"{datetime.fromtimestamp(each.committed_at).astimezone():%Y-%m-%d %H:%M}"
    )
    age = "" if each.committed_at is None else _age_text(now - each.committed_at)
    head, summary, problem = entry.head, each.summary, entry.problem
    if head is None or problem is not None:
        status = "not read" if problem is None else f"{problem.error}: {problem.found}"
        status = status if each.writer is None else f"being written by {each.writer}"
        claimed = ("", "", "") if head is None else (str(head.step), str(head.timeline), "")
        return (entry.name, *claimed, date, age, "", "", "", status)
    proved = "committed" if entry.manifest is None else "complete"
    status = f"{proved}, {BEHIND}" if each.is_left_behind else proved
    status = f"{proved}, {resume}" if resume else status
    if summary is not None and summary.refers:
        status += f", refers to {_shortened(summary.refers)}"
    return (
        entry.name,
        str(head.step),
        str(head.timeline),
        head.parent or "",
        date,
        age,
        "" if summary is None else bytes_text(summary.size_bytes),
        ", ".join(each.kinds),
        "" if summary is None else " ".join(summary.fingerprints),
        status,
    )


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= _SHOWN else f"{len(names)} others"


def _age_text(secs: float) -> str:
    """How long ago a save was; a clock that was set back makes nothing younger than now.

    Examples:
        >>> _age_text(40.2), _age_text(600), _age_text(-3)
        ('40 s', '10 min', '0 s')
    """
    secs = max(0.0, round(secs))
    return f"{secs / 60:.0f} min" if 120 <= secs < 7200 else duration_text(secs)


def _json(each: Listed, now: float) -> dict[str, object]:
    entry, at, summary = each.entry, each.committed_at, each.summary
    return {
        "name": entry.name,
        "head": None if entry.head is None else attrs.asdict(entry.head),
        "complete": entry.is_candidate,
        "proved": entry.manifest is not None and entry.problem is None,
        "problem": None if entry.problem is None or each.writer is not None else attrs.asdict(entry.problem),
        "writer": each.writer,
        "committed_at": None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
        "age_secs": None if at is None else max(0.0, round(now - at, 3)),
        "size_bytes": None if summary is None else summary.size_bytes,
        "kind": None if entry.head is None else "native",
        "omitted": None if summary is None else list(summary.omitted),
        "refers": None if summary is None else list(summary.refers),
        "names": list(each.named),
        "left_behind": each.is_left_behind,
        "fingerprints": None if summary is None else dict(summary.fingerprints),
    }
