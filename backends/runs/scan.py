"""`read_inventory` and `examine`: read the contents of a run: names and heads first, a whole manifest only if a plan needs it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.local import LocalStore, Run, local_store, open_store
from trainfold.backends.stores.protocol import Store, writers_in
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.errors import (
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    InvalidArgument,
    TrainfoldError,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, step_of
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.indexes.proved import ReadIndex
from trainfold.core.format.manifest import (
    HEAD_BYTES,
    HEAD_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    SEAL_BYTES,
    Manifest,
)
from trainfold.core.format.manifest_reader import check_structures, decode_first_line, decode_manifest
from trainfold.core.format.run_file import RUN_LIMIT_BYTES, run_id_of
from trainfold.core.history.inventory import OLDER, Entry, Inventory, with_order_known
from trainfold.core.history.recognise import (
    HEADER_LENGTH_BYTES,
    FileCheck,
    file_checks,
    lost_checkpoint,
    misplaced,
    no_manifest,
    not_a_place_for_a_run,
    run_file_fix,
)
from trainfold.core.problem import Problem, problem_of

_OLDER = f"{OLDER} of the run"


def read_inventory(run: Run) -> Inventory:
    """List the checkpoints of a run with the heads of their manifests; foreign names are ignored.

    Reads ``run.json`` and a few KiB of each manifest, and proves nothing yet.

    Args:
        run: a directory, or a store.

    Returns:
        The inventory. A run that is missing, foreign or of a newer version is a `Problem` in it, not an exception.

    Raises:
        InvalidArgument: if ``run`` is not a run, or no filesystem can have a run of that name.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> read_inventory(MemoryStore()).problem.error
        'CheckpointMissing'
    """
    store = open_store(run)
    return _with_writers(store, listed_run(store))


def listed_run(store: Store) -> Inventory:
    """`read_inventory` without the processes that may be writing: those are for people, and a bucket is asked once more for them."""
    try:
        run_id = read_run_id(store)
        names = store.list("")
    except InvalidArgument:  # a run of that name can never exist
        raise
    except TrainfoldError as error:
        return Inventory(store.url, None, (), problem_of(error))
    entries = _entries(store, names, run_id)
    problem = _run_problem(store, run_id, names, entries)
    has_none = run_id is not None and not any(entry.head is not None for entry in entries)
    lost = lost_checkpoint(names, store.pointers(), best_file=BEST_FILE) if has_none else None
    return _with_order_known(store, Inventory(store.url, run_id, entries, problem, lost))


def _with_writers(store: Store, inventory: Inventory) -> Inventory:
    """The inventory with the processes that may be writing, which a store is asked for only where a save has no manifest."""
    try:
        return attrs.evolve(inventory, writers=writers_in(store, inventory.unfinished))
    except (TrainfoldError, OSError):  # then nothing is known of them, and nothing depends on them
        return inventory


def _with_order_known(store: Store, inventory: Inventory) -> Inventory:
    """`with_order_known`, by what the store says; it is asked only where a manifest is not known."""
    unread = [entry.name for entry in inventory.entries if entry.may_come_back]
    if not unread:
        return inventory
    try:
        latest = store.pointers().get("latest")
        asked = unread if inventory.entry(latest or "") is None else [*unread, latest or ""]
        times = {name: store.committed_at(f"{name}/{MANIFEST}") for name in asked}
    except (TrainfoldError, OSError):  # then nothing is known of them
        return inventory
    return with_order_known(inventory, times, latest)


def read_run_id(store: Store) -> str | None:
    """The id in ``run.json``; None without such a file.

    Raises:
        FutureVersion: if a newer trainfold made the run.
        CheckpointForeign: if another program wrote the file.
        CheckpointHostile: if the file is not what trainfold writes; the fix says what it must hold.
    """
    where = f"{store.url}/{RUN_FILE}"
    size = store.size(RUN_FILE)
    if size is None:
        return None
    try:
        data = store.read(RUN_FILE, start=0, stop=min(size, RUN_LIMIT_BYTES))
        return run_id_of(data, where, size_bytes=size)
    except (CheckpointHostile, CheckpointForeign) as error:  # an older checkpoint does not help here
        fix = run_file_fix(_entries(store, store.list(""), None))
        raise type(error)(where, expected=error.expected, found=error.found, fix=fix) from None


def check_place(store: Store) -> None:
    """Check that the store holds a run, or that one may start there. Reads only names and writes nothing.

    A folder with a user's logs and configs may become a run. A checkpoint, the place of one in a run on a disk, a folder of runs, checkpoints whose run file is lost, and weights of
    another format may not.

    Raises:
        CheckpointForeign: naming which of these it is.
        FutureVersion: if a newer trainfold made the run.
        CheckpointHostile: if its run file is not what trainfold writes.
    """
    if read_run_id(store) is not None:
        return
    names = store.list("")
    _check(_not_a_place(store, names, _entries(store, names, None)) or _inside_a_run(store))


def _inside_a_run(store: Store) -> CheckpointForeign | None:
    """The error for the place of a checkpoint in a run: a run in it would be the rest of a torn save to the one around it, which may be deleted."""
    local = local_store(store)
    place = None if local is None else Path(local.url).resolve()
    if place is None or step_of(place.name) is None or not _has(LocalStore(place.parent), RUN_FILE):
        return None
    return CheckpointForeign(store.url, expected="a run", found=f"the place of a checkpoint in the run {place.parent}",
                             fix=f"name the run, {place.parent}: the step of the state names the checkpoint")  # fmt: skip


def examine(  # noqa: PLR0913 - keywords
    store: Store,
    inventory: Inventory,
    name: str,
    *,
    root: bytes | None = None,
    document: Mapping[str, Any] | None = None,
    needs: Needs | None = None,
) -> Inventory:
    """Read one whole manifest, prove it, and check that its files exist with the sizes that it lists.

    Args:
        store: the run.
        inventory: from `read_inventory`.
        name: the checkpoint.
        root: the contents of its manifest file, if they were read already.
        document: what `opened_root` has returned for these contents, if it was called already.
        needs: what this rank needs of it; None for everything. The ranks look at the sizes of files together.

    Returns:
        The inventory with the manifest, or the problem, of that entry.
    """
    entry = inventory.entry(name)
    if entry is None:
        return inventory
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(store, name, root=root, document=document, needs=needs)
        _check(misplaced(manifest.head, name, inventory.run_id, f"{store.url}/{name}"))
        _check_files(store, manifest, name, needs)
    except TrainfoldError as error:
        return inventory.with_entry(attrs.evolve(entry, manifest=manifest, problem=problem_of(error)))
    return inventory.with_entry(attrs.evolve(entry, head=manifest.head, manifest=manifest))


@without_collecting
def read_manifest(
    store: Store,
    name: str,
    *,
    root: bytes | None = None,
    document: Mapping[str, Any] | None = None,
    needs: Needs | None = None,
) -> Manifest:
    """The proved manifest of one checkpoint, from its root and the indexes of its ranks.

    Args:
        store: the run.
        name: the checkpoint.
        root: what `read_root` returned, if it was called already.
        document: what `opened_root` returned for it, if it was called already.
        needs: what this rank needs: only the indexes are opened in which that is; None for all.

    Raises:
        CheckpointTorn: if the checkpoint has no manifest.
        CheckpointError: the matching subclass if the manifest is damaged, foreign, too new or hostile.
    """
    where = f"{store.url}/{name}/{MANIFEST}"
    data = read_root(store, name) if root is None else root
    try:
        manifest = decode_manifest(data, where, read=index_reader(store, name), needs=needs, document=document)
        check_structures(manifest, where)
    except MemoryError:
        raise _too_large_for_memory(where, len(data)) from None
    return manifest


def read_root(store: Store, name: str) -> bytes:
    """The contents of the manifest file of one checkpoint, not proved.

    Raises:
        CheckpointTorn: if the checkpoint has none.
        CheckpointHostile: if it is too large.
    """
    where = f"{store.url}/{name}/{MANIFEST}"
    size = store.size(f"{name}/{MANIFEST}")
    if size is None:
        raise no_manifest(f"{store.url}/{name}")
    if size > MANIFEST_LIMIT_BYTES:
        raise CheckpointHostile(where, expected=f"at most {MANIFEST_LIMIT_BYTES} bytes", found=size, fix=_OLDER)
    try:
        return store.read(f"{name}/{MANIFEST}", start=0, stop=size)
    except MemoryError:
        raise _too_large_for_memory(where, size) from None


def sees_root(store: Store, name: str, root: bytes) -> bool:
    """Whether this process sees these contents in the manifest file of a checkpoint: it compares its size and its end, where its digest is."""
    start = max(0, len(root) - SEAL_BYTES)
    try:
        return store.read(f"{name}/{MANIFEST}", start=start, stop=len(root) + 1) == root[start:]
    except CheckpointMissing:
        return False


def _too_large_for_memory(where: str, size: int) -> CheckpointHostile:
    return CheckpointHostile(where, expected="a manifest that fits into memory", found=f"{size} bytes", fix=_OLDER)


def index_reader(store: Store, name: str) -> ReadIndex:
    """What reads the indexes of a checkpoint, for `decode_manifest`."""
    return partial(_read_index, store, name)


def _read_index(store: Store, directory: str, name: str, size: int) -> bytes | None:
    """The bytes of an index, as many as the root says; None if there is no such file."""
    found = store.size(f"{directory}/{name}")
    if found is None:
        return None
    if max(found, size) > MANIFEST_LIMIT_BYTES:
        raise CheckpointHostile(f"{store.url}/{directory}/{name}", expected=f"at most {MANIFEST_LIMIT_BYTES} bytes", found=max(found, size), fix=_OLDER)  # fmt: skip
    return store.read(f"{directory}/{name}", start=0, stop=found)


def _entry(store: Store, name: str, run_id: str | None) -> Entry:
    where = f"{store.url}/{name}/{MANIFEST}"
    try:
        data = store.read(f"{name}/{MANIFEST}", start=0, stop=HEAD_BYTES)
        if len(data) == HEAD_BYTES and b",\n" not in data:  # of a run with hundreds of rewinds
            data = store.read(f"{name}/{MANIFEST}", start=0, stop=HEAD_LIMIT_BYTES)
        head, summary = decode_first_line(data, where)
    except CheckpointMissing:
        return Entry(name, None, problem=problem_of(no_manifest(f"{store.url}/{name}")))
    except TrainfoldError as error:
        return Entry(name, None, problem=problem_of(error))
    elsewhere = misplaced(head, name, run_id, where)
    return Entry(name, head, summary=summary) if elsewhere is None else Entry(name, None, problem=problem_of(elsewhere))


def _entries(store: Store, names: list[str], run_id: str | None) -> tuple[Entry, ...]:
    return tuple(side_by_side([partial(_entry, store, name, run_id) for name in names if step_of(name) is not None]))


def _run_problem(store: Store, run_id: str | None, names: list[str], entries: tuple[Entry, ...]) -> Problem | None:
    if run_id is not None:
        return None
    return problem_of(
        _not_a_place(store, names, entries)
        or CheckpointMissing(store.url, expected="a run", found=f"{names[:4] or 'nothing'}", fix="save into it first, or point at a run")
    )  # fmt: skip


def _not_a_place(store: Store, names: list[str], entries: tuple[Entry, ...]) -> TrainfoldError | None:
    """The error for a place in which no run may start; it names another format, and what reads that."""
    from trainfold.backends.formats.detect import detect_format  # commands that read a run start without it
    from trainfold.core.weights.detected import FORMATS, NATIVE, reader_of

    error = not_a_place_for_a_run(
        store.url, names, entries, [name for name in names if _has(store, f"{name}/{RUN_FILE}")]
    )
    found = detect_format(store.url) if local_store(store) is not None and names else None
    if found is None or found.format not in FORMATS or found.format in NATIVE:
        return error
    reader = reader_of(found)
    begins = f"; to begin with its weights, manager.restore(live, initial={reader})" if reader else ""
    return CheckpointForeign(store.url, expected="a run of trainfold", found=f"{FORMATS[found.format]}: {', '.join(found.seen)}",
                             fix=f"use another folder for the run{begins}")  # fmt: skip


def _has(store: Store, file: str) -> bool:
    try:
        return store.size(file) is not None
    except (TrainfoldError, OSError):  # a file, a link, or a folder without permission
        return False


def _check(error: TrainfoldError | None) -> None:
    if error is not None:
        raise error


def _check_files(store: Store, manifest: Manifest, name: str, needs: Needs | None) -> None:
    """Look at the size of each file, and at the first bytes of those that hold tensors."""

    def check(file: FileCheck) -> None:
        directory = file.checkpoint or name
        url = f"{store.url}/{directory}"
        _check(file.torn(url, store.size(f"{directory}/{file.name}")))
        if file.header_bytes is not None:
            _check(file.damaged(url, store.read(f"{directory}/{file.name}", start=0, stop=HEADER_LENGTH_BYTES)))

    side_by_side([partial(check, file) for file in file_checks(manifest, needs)])
