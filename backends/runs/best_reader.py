"""Reading a run's ``best.json``: what it holds on to, and how much of it can still be loaded."""

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


def best_name(file: BestFile) -> str:
    """The checkpoint that is the best, as the file says."""
    return directory_of(step_of_best(file.record))


def best_checkpoint(store: Store) -> str | None:
    """The name of the checkpoint that the run's best names, whether it is there or not; None without a best.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> best_checkpoint(MemoryStore()) is None
        True
    """
    return next(iter(best_checkpoints(store)), None)


def measured_best(store: Store) -> str | None:
    """As `best_checkpoint`, of a checkpoint that is the one that was measured; one that is not there, or damaged, counts as such.

    Raises:
        CheckpointError: if there is a best that cannot be read.
        InvalidState: if a rewind has left the best behind (E12), or its step was trained anew since.
    """
    file = read_best(store)
    if file is None:
        return None
    name = directory_of(step_of_best(file.record))
    inventory = read_inventory(store)
    entry = inventory.entry(name)
    head = None if entry is None else entry.head
    if head is not None and (head.timeline != file.timeline or entry not in lineage(inventory)):
        was = "one that a rewind has left behind" if head.timeline == file.timeline else f"timeline {head.timeline}"
        raise InvalidState(
            f"{store.url}/{BEST_FILE}",
            expected=f"{name} of timeline {file.timeline}, as it was measured, in the run's lineage",
            found=was,
            fix=f"evaluate again, and save_best what wins; or load what is there with step={head.step}",
        )
    return name


def best_checkpoints(store: Store) -> dict[str, str]:
    """The checkpoints that the run's ``best.json`` holds on to, whether they are there or not: name -> why, the best one first.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> best_checkpoints(MemoryStore())
        {}
    """
    return named_by(read_best(store))


def named_by(file: BestFile | None) -> dict[str, str]:
    """What `best_checkpoints` says, of a file that was read."""
    if file is None:
        return {}
    others = {directory_of(entry.step): f"one of the best {len(file.kept)}" for entry, _ in file.kept}
    best = directory_of(step_of_best(file.record))
    return {best: "the best", **{name: why for name, why in others.items() if name != best}}


def best_scores(store: Store) -> dict[tuple[str, int], float]:
    """What ``best.json`` knows of scores: (checkpoint, timeline) -> score; a step that was trained anew has another timeline.

    Raises:
        CheckpointError: if there is a best that cannot be read.

    Examples:
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> best_scores(MemoryStore())
        {}
    """
    return scores_in(read_best(store))


def scores_in(file: BestFile | None) -> dict[tuple[str, int], float]:
    """What `best_scores` says, of a file that was read."""
    entries = (
        ()
        if file is None
        else (*file.entries, (BestEntry(file.record.score, step_of_best(file.record)), file.timeline))
    )
    return {(directory_of(entry.step), of): entry.score for entry, of in entries if entry.score is not None}


def carried_one(store: Store, file: BestFile | None, wanted: BestRecord) -> tuple[BestRecord, tuple[str, ...]]:
    """The record to go on with, and why the file's is not it; see `carried_best`."""
    if file is None:
        return carried_best(None, wanted, steps_present=())
    head = heads_at(store, [step_of_best(file.record)]).get(step_of_best(file.record))
    present = () if head is None or head.timeline != file.timeline else (head.step,)
    return carried_best(file.record, wanted, steps_present=present)


def carried_n(store: Store, file: BestFile | None, wanted: BestRecord) -> tuple[tuple[BestEntry, ...], tuple[str, ...]]:
    """The N best to go on with, and why others of the file are not among them."""
    if file is None:
        return (), ()
    kept, reasons = present(store, file, wanted)
    return tuple(entry for entry, _ in kept), reasons


def present(
    store: Store, file: BestFile, wanted: BestRecord
) -> tuple[tuple[tuple[BestEntry, int], ...], tuple[str, ...]]:
    """The N best whose checkpoints can be loaded, if they are of the run, metric and direction; and why others are not."""
    _, reasons = carried_best(file.record, wanted, steps_present=[step_of_best(file.record)])
    if reasons:
        return (), reasons
    heads = heads_at(store, [entry.step for entry, _ in file.entries])
    timelines = {step: head.timeline for step, head in heads.items()}
    gone = [entry.step for entry, of in file.entries if timelines.get(entry.step) != of]
    there = tuple((entry, of) for entry, of in file.entries if entry.step not in gone)
    return there, tuple(f"the checkpoint of step {step} is not there any more" for step in gone)


def heads_at(store: Store, steps: Iterable[int]) -> dict[int, Head]:
    """Step -> head of its checkpoint, of those that are of the run's lineage and whole."""
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
    """What the run's ``best.json`` says; None where there is none.

    Raises:
        CheckpointError: if it cannot be read.
    """
    data = best_bytes(store)
    return None if data is None else parsed_best(store, data)


def best_bytes(store: Store) -> bytes | None:
    """The file's bytes, as many as it can have; None where there is none."""
    size = store.size(BEST_FILE)
    return None if size is None else store.read(BEST_FILE, start=0, stop=min(size, BEST_LIMIT_BYTES + 1))


def parsed_best(store: Store, data: bytes) -> BestFile:
    """What they say; see `best_file_from_json`."""
    return best_file_from_json(data, f"{store.url}/{BEST_FILE}")


def step_of_best(record: BestRecord) -> int:
    """The step of a record that has a score: it goes with it."""
    assert record.step is not None
    return record.step
