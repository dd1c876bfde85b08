"""Reading what a run holds: names and heads first, one manifest whole only when a plan asks for it."""

import attrs

from trainfold.backends.protocols import Store
from trainfold.core.errors import (
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    FutureVersion,
    TrainfoldError,
)
from trainfold.core.inventory import Entry, Inventory, Problem, problem_of
from trainfold.core.manifest import HEAD_LIMIT_BYTES, MANIFEST_LIMIT_BYTES, Manifest
from trainfold.core.manifest_reader import check_structures, decode_head, decode_manifest
from trainfold.core.save_plan import MANIFEST, step_of
from trainfold.core.scalars import canonical_json
from trainfold.core.strict import single_name, strict_json

RUN_FILE = "run.json"
RUN_VERSION = 1
_OLDER = "use an older checkpoint of the run"


def read_inventory(store: Store) -> Inventory:
    """List a run's checkpoints with the heads of their manifests; foreign names are ignored (C12).

    Reads ``run.json`` and a few KiB of each manifest; proves nothing yet.

    Args:
        store: the run.

    Returns:
        The inventory; a run that is missing, foreign or of a newer version is a `Problem` in it, not an exception.

    Examples:
        >>> from trainfold.backends.memory import MemoryStore
        >>> read_inventory(MemoryStore()).problem.error
        'CheckpointMissing'
    """
    try:
        run_id = read_run_id(store)
        names = store.list("")
    except TrainfoldError as error:
        return Inventory(store.url, None, (), problem_of(error))
    entries = tuple(_entry(store, name, run_id) for name in names if step_of(name) is not None)
    return Inventory(store.url, run_id, entries, _run_problem(store, run_id, names, entries))


def read_run_id(store: Store) -> str | None:
    """The id in ``run.json``, or None where there is none.

    Raises:
        FutureVersion: if a newer trainfold made the run.
        CheckpointHostile: if the file is not what trainfold writes.
    """
    where = f"{store.url}/{RUN_FILE}"
    size = store.size(RUN_FILE)
    if size is None:
        return None
    if size > HEAD_LIMIT_BYTES:
        raise CheckpointHostile(
            where, expected=f"at most {HEAD_LIMIT_BYTES} bytes", found=size, mend="restore the file"
        )
    document = strict_json(store.read(RUN_FILE, start=0, stop=HEAD_LIMIT_BYTES), where)
    if document.get("format") != "trainfold-run":
        raise CheckpointForeign(
            where, expected="a trainfold run", found=sorted(document)[:4], mend="choose another folder"
        )
    version = document.get("version")
    if type(version) is not int or version != RUN_VERSION:
        raise FutureVersion(where, expected=f"version {RUN_VERSION}", found=version, mend="upgrade trainfold")
    return single_name(document.get("run_id"), where)


def run_document(run_id: str) -> bytes:
    """The bytes of ``run.json``.

    Examples:
        >>> run_document("a1")
        b'{"format":"trainfold-run","version":1,"run_id":"a1"}'
    """
    return canonical_json({"format": "trainfold-run", "version": RUN_VERSION, "run_id": run_id})


def examine(store: Store, inventory: Inventory, name: str) -> Inventory:
    """Read one manifest whole, prove it, and check that its files are there with the sizes that it says.

    Returns:
        The inventory in which that entry has its manifest, or its problem.
    """
    entry = inventory.entry(name)
    if entry is None:
        return inventory
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(store, name)
        _belongs(store, manifest, name, inventory.run_id)
        _files_are_there(store, manifest, name)
    except TrainfoldError as error:
        return inventory.with_entry(attrs.evolve(entry, manifest=manifest, problem=problem_of(error)))
    return inventory.with_entry(attrs.evolve(entry, head=manifest.head, manifest=manifest))


def read_manifest(store: Store, name: str) -> Manifest:
    """The proved manifest of one checkpoint.

    Raises:
        CheckpointTorn: if there is none.
        CheckpointError: of the kind that fits, if it is damaged, foreign, too new or hostile.
    """
    where = f"{store.url}/{name}/{MANIFEST}"
    size = store.size(f"{name}/{MANIFEST}")
    if size is None:
        raise _no_manifest(store, name)
    if size > MANIFEST_LIMIT_BYTES:
        raise CheckpointHostile(where, expected=f"at most {MANIFEST_LIMIT_BYTES} bytes", found=size, mend=_OLDER)
    manifest = decode_manifest(store.read(f"{name}/{MANIFEST}", start=0, stop=size), where)
    check_structures(manifest, where)
    return manifest


def _entry(store: Store, name: str, run_id: str | None) -> Entry:
    where = f"{store.url}/{name}/{MANIFEST}"
    try:
        data = store.read(f"{name}/{MANIFEST}", start=0, stop=HEAD_LIMIT_BYTES)
        head = decode_head(data, where)
    except CheckpointMissing:
        return Entry(name, None, problem=problem_of(_no_manifest(store, name)))
    except TrainfoldError as error:
        return Entry(name, None, problem=problem_of(error))
    if head.step != step_of(name) or (run_id is not None and head.run_id != run_id):
        return Entry(
            name, None, problem=_foreign(where, f"step {step_of(name)} of run {run_id}", head.step, head.run_id)
        )
    return Entry(name, head)


def _run_problem(store: Store, run_id: str | None, names: list[str], entries: tuple[Entry, ...]) -> Problem | None:
    if run_id is not None:
        return None
    if any(entry.head is not None for entry in entries):
        return problem_of(
            CheckpointForeign(store.url, expected=RUN_FILE, found="checkpoints without it",
                              mend="restore run.json, or copy the whole run")
        )  # fmt: skip
    return problem_of(
        CheckpointMissing(store.url, expected="a run", found=f"{names[:4] or 'nothing'}", mend="save into it first, or point at a run")
    )  # fmt: skip


def _belongs(store: Store, manifest: Manifest, name: str, run_id: str | None) -> None:
    head = manifest.head
    if head.step != step_of(name) or (run_id is not None and head.run_id != run_id):
        wanted = f"step {step_of(name)} of run {run_id}"
        problem = _foreign(f"{store.url}/{name}", wanted, head.step, head.run_id)
        raise CheckpointForeign(problem.where, expected=problem.expected, found=problem.found, mend=problem.mend)


def _files_are_there(store: Store, manifest: Manifest, name: str) -> None:
    for file in manifest.files:
        size = store.size(f"{name}/{file.name}")
        if size != file.size_bytes:
            raise CheckpointTorn(
                f"{store.url}/{name}/{file.name}",
                expected=f"{file.size_bytes} bytes",
                found="no such file" if size is None else f"{size} bytes",
                mend=_OLDER,
            )


def _foreign(where: str, expected: str, step: int, run_id: str) -> Problem:
    return problem_of(
        CheckpointForeign(where, expected=expected, found=f"step {step} of run {run_id}",
                          mend="it was copied here from elsewhere: move it back")
    )  # fmt: skip


def _no_manifest(store: Store, name: str) -> CheckpointTorn:
    return CheckpointTorn(
        f"{store.url}/{name}", expected=MANIFEST, found="none: a save that did not finish", mend=_OLDER
    )
