"""`read_side_files` and `write_side_files`: the files that a checkpoint holds beside its state."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.formats.present_directory import failures, in_the_way, what_is_at
from trainfold.backends.runs.one_view import chosen_in
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.place import free_path
from trainfold.backends.stores.protocol import Store
from trainfold.backends.stores.staged_files import check_path, make_directories, sync_above
from trainfold.core.component_names import validate_components
from trainfold.core.errors import CheckpointMissing
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.resume.reads import ComponentReads, tensor_reads
from trainfold.core.resume.request import resume_request
from trainfold.core.side.side_file import SideFile, side_files_in
from trainfold.core.tensor_memory import tensor_bytes

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_side_files(run: Run, *, step: int | None = None, components: Sequence[str] | None = None) -> dict[str, bytes]:
    """The files that a checkpoint holds: those of `SideFiles`, and those of `HubFiles`.

    Args:
        run: a directory, a URL, or a store.
        step: which checkpoint; None for the newest.
        components: of which components; None for all.

    Returns:
        ``component/name`` -> the bytes, which were compared with their digests.

    Raises:
        CheckpointMissing: if there is no such checkpoint, or no file in it.
        CheckpointError: the matching subclass, if it is damaged.
        UnknownComponent: for a component that it does not have.

    Examples:
        See `SideFiles`.
    """
    store, manifest, files = _found(run, step, components)
    return {each.path: data for each, data in bytes_of_files(store, manifest, files)}


def write_side_files(
    run: Run, directory: str | Path, *, step: int | None = None, components: Sequence[str] | None = None
) -> tuple[SideFile, ...]:
    """Put the files of a checkpoint into a new directory, as ``component/name``. It is absent until it is whole.

    Args:
        run: see `read_side_files`.
        directory: does not exist yet, or is empty, or has these very files.
        step: see there.
        components: see there.

    Returns:
        The files.

    Raises:
        InvalidArgument: if something else is at the path, or for a path in a checkpoint.
        CheckpointMissing: and the others, as `read_side_files` does.
        SaveFailed: if it cannot be written.

    Examples:
        >>> import tempfile, trainfold
        >>> from trainfold.states import Opaque, SideFiles
        >>> from trainfold.stores import MemoryStore
        >>> run = MemoryStore()
        >>> with tempfile.TemporaryDirectory() as top:
        ...     _ = Path(top, "a.txt").write_text("1")
        ...     state = trainfold.TrainState(trainer=trainfold.Progress(), extra={"notes": SideFiles(top).capture()})
        ...     _ = trainfold.save(state, run)
        ...     [each.path for each in write_side_files(run, f"{top}/out")], Path(top, "out/notes/a.txt").read_text()
        (['notes/a.txt'], '1')
    """
    store, manifest, files = _found(run, step, components)
    put_files(store, manifest, files, directory)
    return files


def put_files(store: Store, manifest: Manifest, files: Collection[SideFile], directory: str | Path) -> None:
    """Write files of an opened checkpoint; see `write_side_files`."""
    given = os.fspath(directory)
    check_path(given)
    place = Path(os.path.realpath(free_path(given)))
    if what_is_at(str(place)):
        if _names_in(place) != {each.path: each.size_bytes for each in files} or any(
            (place / each.path).read_bytes() != data for each, data in bytes_of_files(store, manifest, files)
        ):
            raise in_the_way(str(place))
        return
    with failures(str(place)):
        make_directories(str(place.parent), "")
        staging = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            whole = staging / "files"
            whole.mkdir()
            for each, data in bytes_of_files(store, manifest, files):
                _write(whole / each.path, data)
            for above, _, _ in os.walk(whole, topdown=False):
                _sync(above)
            whole.rename(place)
            sync_above(str(place))
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def bytes_of_files(store: Store, manifest: Manifest, files: Collection[SideFile]) -> Iterator[tuple[SideFile, bytes]]:
    """Each file of a checkpoint with its bytes, one in memory at a time.

    Args:
        store: the run.
        manifest: of the checkpoint, proved.
        files: some of it.

    Raises:
        CheckpointDamaged: if the bytes have another digest; CheckpointTorn if they are not there.
    """
    reader = PlanReader(store, directory_of(manifest.head.step), manifest)
    for each in files:
        planned = tensor_reads([each.record], {0: (each.record.path, None)})
        yield each, bytes(tensor_bytes(reader.read(ComponentReads({}, planned), {})[0]))


def files_found(
    manifest: Manifest, where: str, components: Sequence[str] | None, *, may_be_none: bool = False
) -> tuple[SideFile, ...]:
    """The files of some components of a checkpoint.

    Args:
        manifest: of the checkpoint.
        where: the checkpoint, for the message.
        components: of which; None for all.
        may_be_none: whether a checkpoint without files is fine.

    Raises:
        CheckpointMissing: if there is none.
        UnknownComponent: for a component that it does not have.
    """
    known = tuple(each.name for each in manifest.components)
    names = validate_components(components, declared=known, where="components")
    found = tuple(each for each in side_files_in(manifest, where) if names is None or each.component in names)
    if not found and not may_be_none:
        raise CheckpointMissing(where, expected="files that were attached under extra=", found="none",
                                fix="attach trainfold.states.SideFiles(...) under extra=, and later checkpoints have them")  # fmt: skip
    return found


def _found(
    run: Run, step: int | None, components: Sequence[str] | None
) -> tuple[Store, Manifest, tuple[SideFile, ...]]:
    store = open_store(run)
    manifest = chosen_in(store, resume_request(step=step))
    if not isinstance(manifest, Manifest):
        raise CheckpointMissing(store.url, expected="a whole checkpoint", found="; ".join(map(str, manifest)), fix="name another run or step")  # fmt: skip
    return store, manifest, files_found(manifest, f"{store.url}/{directory_of(manifest.head.step)}", components)


def _names_in(place: Path) -> dict[str, int]:
    """Name -> size of all that is in a directory; links and the like have no size."""
    found = {}
    for each in place.rglob("*") if place.is_dir() else ():
        if each.is_symlink() or not each.is_dir():
            found[each.relative_to(place).as_posix()] = -1 if each.is_symlink() or not each.is_file() else each.stat().st_size  # fmt: skip
    return found


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, _NEW, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
