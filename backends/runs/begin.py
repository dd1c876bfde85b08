"""`begin_checkpoint`: make the run if it is new, and choose the identity of its next checkpoint."""

import time
import uuid
from contextlib import suppress

import attrs

from trainfold.backends.runs.scan import check_place, listed_run, read_run_id
from trainfold.backends.stores.os_errors import cannot_save
from trainfold.backends.stores.protocol import Store, glimpse, least_revision_of
from trainfold.core.errors import CheckpointDamaged, CommitConflict, InvalidArgument
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, directory_of
from trainfold.core.format.manifest import (
    Head,
)
from trainfold.core.format.run_file import run_document
from trainfold.core.history.next_checkpoint import next_checkpoint
from trainfold.core.json_values import shown
from trainfold.core.problem import problem_of
from trainfold.core.state.parent_checkpoint import ParentCheckpoint


def begin_checkpoint(
    store: Store, step: int, *, descends_from: ParentCheckpoint | None = None
) -> tuple[Head, bytes | None]:
    """Create the run if it is new, and choose the identity of its next checkpoint. The caller holds the run's lock.

    Args:
        store: the store whose lock the caller holds.
        step: the step of the state to save.
        descends_from: what that state was loaded from; None if unknown, so that the steps decide.

    Returns:
        The head of the checkpoint: which run it belongs to, and what it follows. And the bytes of the manifest that it replaces, if the
        step was saved before.

    Raises:
        InvalidArgument: if ``store`` is not a store.
        SaveFailed: if the run cannot be read.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> head, replaced = begin_checkpoint(MemoryStore(), 120)
        >>> head.step, replaced
        (120, None)
    """
    if not isinstance(store, Store):
        raise InvalidArgument("store", expected="the store whose lock you hold", found=shown(store),
                              fix="make it with trainfold.LocalStore(directory), and call this inside store.lock()")  # fmt: skip
    seen = glimpse(store)
    run_id = read_run_id(seen)
    if run_id is None:
        check_place(seen)
        with suppress(CommitConflict):  # another process made the run meanwhile, and its id counts
            store.commit(RUN_FILE, run_document(uuid.uuid4().hex))
        seen = glimpse(store)
        run_id = read_run_id(seen)
    assert run_id is not None  # it was committed just now
    inventory = listed_run(seen)
    if inventory.problem is not None:  # such as a directory that could not be listed: its checkpoints are not known
        raise cannot_save(inventory.problem)
    directory = directory_of(step)
    name = f"{directory}/{MANIFEST}"
    size = seen.size(name)
    files = seen.list(directory) if size is not None or inventory.refers_to(directory) else []
    old = None if size is None else _read_replaced(store, name, size)
    least = least_revision_of(store)
    head = next_checkpoint(
        inventory,
        run_id,
        step,
        files=files,
        descends_from=descends_from,
        least_revision=least,
        now_ms=int(time.time() * 1000),
    )
    return head, old


def _read_replaced(store: Store, name: str, size: int) -> bytes:
    """The manifest that a save replaces: only that one is replaced, and none that another program commits meanwhile."""
    try:
        return store.read(name, start=0, stop=size)
    except CheckpointDamaged as error:  # others may refer to the files beside it
        helps = f"this step cannot be saved again while its manifest cannot be read: if it is lost for good, delete {store.url}/{name}"
        raise cannot_save(attrs.evolve(problem_of(error), fix=f"{error.fix}; {helps}")) from error
