"""Reads a run's ``best.json``: the checkpoints that it names, and which of them can still be loaded; the pointer to the best, and the lock.

`best_json_lock` keeps one thread from naming a checkpoint in ``best.json`` while another deletes those not named there. A manager deletes
old checkpoints in its own thread. It holds this lock from reading ``best.json`` to the last deletion, so that no other thread of this process
names one of them meanwhile. The lock of the run keeps other processes' writers out.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs

from trainfold.backends.runs.scan import examine, listed_run
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.best_json import BEST_FILE, BEST_LIMIT_BYTES, BestFile, Placed, best_file_from_json
from trainfold.core.best.record import BestRecord
from trainfold.core.errors import InvalidState
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.history.inventory import Inventory, lineage
from trainfold.core.problem import Problem, error_from
from trainfold.core.save.pruning import best_still_there

BEST_POINTER: Final = "best"


def measured_best(store: Store) -> str | None:
    """The checkpoint that the run's best names, if it is the measured one; a missing or damaged one counts as measured.

    Raises:
        CheckpointError: if there is a best that cannot be read.
        InvalidState: if a rewind has left the best behind, or its step has been trained again since.
    """
    file = read_best(store)
    if file is None:
        return None
    inventory = listed_run(store)
    entry = inventory.entry(file.name)
    head = None if entry is None else entry.head
    if head is not None and (head.timeline != file.timeline or entry not in lineage(inventory)):
        was = "one that the run has left behind" if head.timeline == file.timeline else f"timeline {head.timeline}"
        raise InvalidState(
            f"{store.url}/{BEST_FILE}",
            expected=f"{file.name} of timeline {file.timeline}, as it was measured, in the run's lineage",
            found=was,
            fix=f"evaluate again, and save_best what wins; or load what is there with step={head.step}",
        )
    return file.name


def carried_entries(
    store: Store, file: BestFile, entries: Sequence[Placed], wanted: BestRecord
) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    """The entries that the run continues with, and why others are not among them; see `BestFile.carried`."""
    return file.carried(entries, wanted, timelines=timelines_at(store, [entry.step for entry, _ in entries]))


def timelines_at(store: Store, steps: Iterable[int]) -> dict[int, int]:
    """Step -> timeline of its checkpoint, for steps with a whole checkpoint in the run's lineage.

    Raises:
        CheckpointUnreadable: if the store does not give one of them now: as one that is gone, it would lose its place to a worse one.
    """
    inventory = listed_run(store)
    _check_read(inventory.problem)
    usable = {entry.name for entry in lineage(inventory)}
    found = {}
    for step in steps:
        name = directory_of(step)
        entry = (examine(store, inventory, name) if name in usable else inventory).entry(name)
        if entry is not None:
            _check_read(entry.problem, manifest=f"{store.url}/{name}/{MANIFEST}")
            if name in usable and entry.problem is None and entry.head is not None:
                found[step] = entry.head.timeline
    return found


def _check_read(problem: Problem | None, *, manifest: str | None = None) -> None:
    """Check that nothing is unreadable now. Of a checkpoint the manifest may be deleted, but not the files, to which others may refer."""
    if problem is not None and problem.is_unreadable:
        more = f"; if it is lost for good, delete {manifest}, and the best goes on without it" if manifest else ""
        raise error_from(attrs.evolve(problem, fix=f"{problem.fix}{more}"))


def point_to_best(store: Store, inventory: Inventory, best: BestFile, *, pointed: str | None) -> str | None:
    """Let the pointer lead to the best of those that the run still goes through; where it leads then. Without any, one to what a rewind has left behind is removed.

    Args:
        store: the run.
        inventory: what it has.
        best: its ``best.json``.
        pointed: where the pointer leads now.
    """
    led = best_still_there(inventory, best)
    if led is not None and led != pointed:
        store.point(BEST_POINTER, led)
    elif led is None and pointed == best.name:
        store.delete(BEST_POINTER)
    return led


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


_lock = threading.RLock()


def best_json_lock() -> AbstractContextManager[Any]:
    """The lock of this process; a forked child has its own.

    Examples:
        >>> with best_json_lock(), best_json_lock():
        ...     pass
    """
    return _lock


def _renew() -> None:
    global _lock  # noqa: PLW0603  # the thread that held it does not exist in the child
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
