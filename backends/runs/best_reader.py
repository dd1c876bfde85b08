"""Reads a run's ``best.json``: the checkpoints that it names, and which of them can still be loaded."""

from collections.abc import Iterable
from typing import Final

from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.best_json import BEST_FILE, BEST_LIMIT_BYTES, BestFile, best_file_from_json
from trainfold.core.best.record import BestRecord, carried_best
from trainfold.core.best.top_n import BestEntry
from trainfold.core.errors import InvalidState
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import lineage

BEST_POINTER: Final = "best"


def best_checkpoint(store: Store) -> str | None:
    """The name of the checkpoint that the run's best names, whether it exists or not; None without a best.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> best_checkpoint(MemoryStore()) is None
        True
    """
    return next(iter(best_checkpoints(store)), None)


def measured_best(store: Store) -> str | None:
    """As `best_checkpoint`, if that checkpoint is the measured one; a missing or damaged one counts as measured.

    Raises:
        CheckpointError: if there is a best that cannot be read.
        InvalidState: if a rewind has left the best behind, or its step has been trained again since.
    """
    file = read_best(store)
    if file is None:
        return None
    inventory = read_inventory(store)
    entry = inventory.entry(file.name)
    head = None if entry is None else entry.head
    if head is not None and (head.timeline != file.timeline or entry not in lineage(inventory)):
        was = "one that a rewind has left behind" if head.timeline == file.timeline else f"timeline {head.timeline}"
        raise InvalidState(
            f"{store.url}/{BEST_FILE}",
            expected=f"{file.name} of timeline {file.timeline}, as it was measured, in the run's lineage",
            found=was,
            fix=f"evaluate again, and save_best what wins; or load what is there with step={head.step}",
        )
    return file.name


def best_checkpoints(store: Store) -> dict[str, str]:
    """The checkpoints that the run's ``best.json`` keeps, whether they exist or not: name -> why, the best one first.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> best_checkpoints(MemoryStore())
        {}
    """
    file = read_best(store)
    return {} if file is None else file.names


def best_scores(store: Store) -> dict[tuple[str, int], float]:
    """The scores in ``best.json``: (checkpoint, timeline) -> score. A step trained again is on another timeline.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> best_scores(MemoryStore())
        {}
    """
    file = read_best(store)
    return {} if file is None else file.scores


def carried_one(store: Store, file: BestFile | None, wanted: BestRecord) -> tuple[BestRecord, tuple[str, ...]]:
    """The record that the run continues with, and why the file's is not used; see `carried_best`."""
    if file is None:
        return carried_best(None, wanted, steps_present=())
    head = heads_at(store, [file.step]).get(file.step)
    there = () if head is None or head.timeline != file.timeline else (head.step,)
    return carried_best(file.record, wanted, steps_present=there)


def carried_n(store: Store, file: BestFile | None, wanted: BestRecord) -> tuple[tuple[BestEntry, ...], tuple[str, ...]]:
    """The N best that the run continues with, and why other entries of the file are not among them."""
    if file is None:
        return (), ()
    kept, reasons = present(store, file, wanted)
    return tuple(entry for entry, _ in kept), reasons


def present(
    store: Store, file: BestFile, wanted: BestRecord
) -> tuple[tuple[tuple[BestEntry, int], ...], tuple[str, ...]]:
    """The N best whose checkpoints can be loaded, if run, metric and direction are the wanted ones; and why others are not."""
    _, reasons = carried_best(file.record, wanted, steps_present=[file.step])
    if reasons:
        return (), reasons
    heads = heads_at(store, [entry.step for entry, _ in file.entries])
    timelines = {step: head.timeline for step, head in heads.items()}
    gone = [entry.step for entry, of in file.entries if timelines.get(entry.step) != of]
    there = tuple((entry, of) for entry, of in file.entries if entry.step not in gone)
    return there, tuple(f"the checkpoint of step {step} is not there any more" for step in gone)


def heads_at(store: Store, steps: Iterable[int]) -> dict[int, Head]:
    """Step -> head of its checkpoint, for steps with a whole checkpoint in the run's lineage."""
    inventory = read_inventory(store)
    usable = {entry.name for entry in lineage(inventory)}
    found = {}
    for step in steps:
        if (name := directory_of(step)) in usable:
            entry = examine(store, inventory, name).entry(name)
            if entry is not None and entry.problem is None and entry.head is not None:
                found[step] = entry.head
    return found


def read_best(store: Store) -> BestFile | None:
    """The content of the run's ``best.json``; None without one.

    Raises:
        CheckpointError: if it cannot be read.
    """
    data = best_bytes(store)
    return None if data is None else parsed_best(store, data)


def best_bytes(store: Store) -> bytes | None:
    """The file's bytes, up to one more than it may have; None without a file."""
    size = store.size(BEST_FILE)
    return None if size is None else store.read(BEST_FILE, start=0, stop=min(size, BEST_LIMIT_BYTES + 1))


def parsed_best(store: Store, data: bytes) -> BestFile:
    """The content of these bytes; see `best_file_from_json`."""
    return best_file_from_json(data, f"{store.url}/{BEST_FILE}")
