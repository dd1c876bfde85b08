"""`read_inventory` and `examine`: read the contents of a run: names and heads first, a whole manifest only if a plan needs it."""

import itertools

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.best_json import BEST_FILE
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    FutureVersion,
    InvalidArgument,
    TrainfoldError,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, step_of
from trainfold.core.format.manifest import HEAD_BYTES, HEAD_LIMIT_BYTES, MANIFEST_LIMIT_BYTES, Manifest
from trainfold.core.format.manifest_reader import check_structures, decode_head, decode_manifest
from trainfold.core.format.strict_json import hostile, single_name, strict_json
from trainfold.core.history.inventory import OLDER, Entry, Inventory
from trainfold.core.json_values import canonical_json, shown
from trainfold.core.problem import Problem, problem_of

RUN_VERSION = 1
_LENGTH_BYTES = 8  # of a safetensors header's length
_OTHER_FORMATS = (".safetensors", ".safetensors.index.json", ".bin.index.json", ".distcp", ".pt", ".pth", ".ckpt")
_OLDER = f"{OLDER} of the run"


def read_inventory(store: Store) -> Inventory:
    """List the checkpoints of a run with the heads of their manifests; foreign names are ignored.

    Reads ``run.json`` and a few KiB of each manifest, and proves nothing yet.

    Args:
        store: the run.

    Returns:
        The inventory. A run that is missing, foreign or of a newer version is a `Problem` in it, not an exception.

    Raises:
        InvalidArgument: if no filesystem can have a run of that name.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> read_inventory(MemoryStore()).problem.error
        'CheckpointMissing'
    """
    try:
        run_id = read_run_id(store)
        names = store.list("")
    except InvalidArgument:  # a run of that name can never exist
        raise
    except TrainfoldError as error:
        return Inventory(store.url, None, (), problem_of(error))
    entries = tuple(_entry(store, name, run_id) for name in names if step_of(name) is not None)
    problem = _run_problem(store, run_id, names, entries)
    has_none = run_id is not None and not any(entry.head is not None for entry in entries)
    return Inventory(store.url, run_id, entries, problem, _lost(store, names) if has_none else None)


def _lost(store: Store, names: list[str]) -> str | None:
    """Evidence that there was a committed checkpoint. A first save that was killed leaves none."""
    for name, target in sorted(store.pointers().items(), reverse=True):  # latest before best
        if name in ("latest", "best") and step_of(target) is not None:
            return f"{name} names {target}"
    return f"there is a {BEST_FILE}" if BEST_FILE in names else None


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
        return _run_id(store, where, size)
    except (CheckpointHostile, CheckpointForeign) as error:  # an older checkpoint does not help here
        names = store.list("")
        entries = tuple(_entry(store, name, None) for name in names if step_of(name) is not None)
        fix = _run_file_fix(entries)
        raise type(error)(where, expected=error.expected, found=error.found, fix=fix) from None


def run_document(run_id: str) -> bytes:
    """The bytes of ``run.json``.

    Examples:
        >>> run_document("a1")
        b'{"format":"trainfold-run","version":1,"run_id":"a1"}'
    """
    return canonical_json({"format": "trainfold-run", "version": RUN_VERSION, "run_id": run_id})


def check_place(store: Store) -> None:
    """Check that the store holds a run, or that one may start there. Reads only names and writes nothing.

    A folder with a user's logs and configs may become a run. A checkpoint, a folder of runs, checkpoints whose run file is lost, and weights of
    another format may not.

    Raises:
        CheckpointForeign: naming which of these it is.
        FutureVersion: if a newer trainfold made the run.
        CheckpointHostile: if its run file is not what trainfold writes.
    """
    if read_run_id(store) is not None:
        return
    names = store.list("")
    entries = tuple(_entry(store, name, None) for name in names if step_of(name) is not None)
    _check_new(store, names, entries)


def examine(store: Store, inventory: Inventory, name: str) -> Inventory:
    """Read one whole manifest, prove it, and check that its files exist with the sizes that it lists.

    Returns:
        The inventory with the manifest, or the problem, of that entry.
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


@without_collecting
def read_manifest(store: Store, name: str) -> Manifest:
    """The proved manifest of one checkpoint.

    Raises:
        CheckpointTorn: if the checkpoint has no manifest.
        CheckpointError: the matching subclass if the manifest is damaged, foreign, too new or hostile.
    """
    where = f"{store.url}/{name}/{MANIFEST}"
    size = store.size(f"{name}/{MANIFEST}")
    if size is None:
        raise _no_manifest(store, name)
    if size > MANIFEST_LIMIT_BYTES:
        raise CheckpointHostile(where, expected=f"at most {MANIFEST_LIMIT_BYTES} bytes", found=size, fix=_OLDER)
    try:
        manifest = decode_manifest(store.read(f"{name}/{MANIFEST}", start=0, stop=size), where)
        check_structures(manifest, where)
    except MemoryError:
        raise CheckpointHostile(
            where, expected="a manifest that fits into memory", found=f"{size} bytes", fix=_OLDER
        ) from None
    return manifest


def _entry(store: Store, name: str, run_id: str | None) -> Entry:
    where = f"{store.url}/{name}/{MANIFEST}"
    try:
        data = store.read(f"{name}/{MANIFEST}", start=0, stop=HEAD_BYTES)
        if len(data) == HEAD_BYTES and b",\n" not in data:  # of a run with hundreds of rewinds
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
    try:
        _check_new(store, names, entries)
    except CheckpointForeign as error:
        return problem_of(error)
    return problem_of(
        CheckpointMissing(store.url, expected="a run", found=f"{names[:4] or 'nothing'}", fix="save into it first, or point at a run")
    )  # fmt: skip


def _check_new(store: Store, names: list[str], entries: tuple[Entry, ...]) -> None:
    """Check that a directory without a run file holds nothing that a user may have meant as a run."""
    if any(entry.head is not None for entry in entries):
        raise CheckpointForeign(store.url, expected=RUN_FILE, found="checkpoints without it",
                                fix=_run_file_fix(entries))  # fmt: skip
    if MANIFEST in names:
        raise CheckpointForeign(store.url, expected="a run", found=f"one checkpoint, with its {MANIFEST}",
                                fix="name the run, which is the folder above it, and the step with step=")  # fmt: skip
    runs = [name for name in names if _is_run(store, name)]
    if runs:
        raise CheckpointForeign(store.url, expected="one run", found=f"a folder of {len(runs)}: {runs[:8]}",
                                fix=f"name one of them, such as {runs[0]}")  # fmt: skip
    others = [name for name in names if name.endswith(_OTHER_FORMATS) or _is_torch_weights(name)]
    if others:
        raise CheckpointForeign(store.url, expected="a trainfold run", found=f"another format: {others[:4]}",
                                fix="use another folder for the run; load these weights into the model yourself")  # fmt: skip


def _run_id(store: Store, where: str, size: int) -> str:
    if size > HEAD_BYTES:
        raise hostile(where, f"at most {HEAD_BYTES} bytes", size)
    document = strict_json(store.read(RUN_FILE, start=0, stop=HEAD_BYTES), where)
    if document.get("format") != "trainfold-run":
        raise CheckpointForeign(where, expected="a trainfold run", found=sorted(document)[:4] or "{}", fix="")
    version = document.get("version")
    if type(version) is int and version > RUN_VERSION:
        raise FutureVersion(where, expected=f"version {RUN_VERSION}", found=version, fix="upgrade trainfold")
    if type(version) is not int or version != RUN_VERSION:
        raise hostile(where, f"version {RUN_VERSION}", shown(version))
    return single_name(document.get("run_id"), where)


def _run_file_fix(entries: tuple[Entry, ...]) -> str:
    """The fix for a lost or damaged run file: a copy of it, or the file that the manifests imply."""
    ids = {entry.head.run_id for entry in entries if entry.head is not None}
    if len(ids) != 1:
        return f"restore {RUN_FILE} from a copy of the run, or save into another folder"
    document = run_document(ids.pop()).decode()
    return f"restore {RUN_FILE} from a copy of the run, or write {document} into it: the id is that of its manifests"


def _is_run(store: Store, name: str) -> bool:
    try:
        return store.size(f"{name}/{RUN_FILE}") is not None
    except (TrainfoldError, OSError):  # a file, a link, or a folder without permission
        return False


def _is_torch_weights(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")


def _belongs(store: Store, manifest: Manifest, name: str, run_id: str | None) -> None:
    head = manifest.head
    if head.step != step_of(name) or (run_id is not None and head.run_id != run_id):
        wanted = f"step {step_of(name)} of run {run_id}"
        problem = _foreign(f"{store.url}/{name}", wanted, head.step, head.run_id)
        raise CheckpointForeign(problem.where, expected=problem.expected, found=problem.found, fix=problem.fix)


def _files_are_there(store: Store, manifest: Manifest, name: str) -> None:
    """Check the size of each file, and its first 8 bytes, from which other readers find the tensors."""
    first: dict[int, int] = {}
    for component in manifest.components:
        for record in itertools.chain.from_iterable(component.tensors):
            for shard in record.shards:
                first[shard.file] = min(shard.start, first.get(shard.file, shard.start))
    for index, file in enumerate(manifest.files):
        where = f"{store.url}/{name}/{file.name}"
        size = store.size(f"{name}/{file.name}")
        if size != file.size_bytes:
            raise CheckpointTorn(
                where,
                expected=f"{file.size_bytes} bytes",
                found="no such file" if size is None else f"{size} bytes",
                fix=_OLDER,
            )
        if index in first:
            found = int.from_bytes(store.read(f"{name}/{file.name}", start=0, stop=_LENGTH_BYTES), "little")
            wanted = first[index] - _LENGTH_BYTES
            if found != wanted:
                raise CheckpointDamaged(
                    where, expected=f"a header of {wanted} bytes", found=f"one of {found}", fix=_OLDER
                )


def _foreign(where: str, expected: str, step: int, run_id: str) -> Problem:
    return problem_of(
        CheckpointForeign(where, expected=expected, found=f"step {step} of run {run_id}",
                          fix="it was copied here from elsewhere: move it back")
    )  # fmt: skip


def _no_manifest(store: Store, name: str) -> CheckpointTorn:
    return CheckpointTorn(
        f"{store.url}/{name}", expected=MANIFEST, found="none: a save that did not finish", fix=_OLDER
    )
