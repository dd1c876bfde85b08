"""Opens the run, or the checkpoint, that a user names by a path."""

import errno
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import final

import attrs

from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.local import LocalStore, open_store
from trainfold.backends.stores.place import is_object_url, local_path, url_text
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.stores.staged_files import check_path, too_long
from trainfold.core import errors
from trainfold.core.component_names import BUILTIN_COMPONENTS, validate_components
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, directory_of, step_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import Inventory, current_head
from trainfold.core.history.recognise import unread_newest
from trainfold.core.problem import error_from


@final
@attrs.frozen
class Checkpoint:
    """One checkpoint of a run, with its proved manifest.

    Attributes:
        store: the run.
        name: the directory in the run.
        manifest: the manifest.
    """

    store: Store
    name: str
    manifest: Manifest

    @property
    def url(self) -> str:
        """Where it is, for messages."""
        return f"{self.store.url}/{self.name}"


def open_run(path: Path, *, begun: str | None = None) -> tuple[Store, Inventory]:
    """Open a run and list what it holds.

    Args:
        path: where it is.
        begun: a file that shows that a run has begun, so that one without a checkpoint counts; None if it does not count.

    Raises:
        CheckpointMissing: if there is no such directory.
        CheckpointError: the matching subclass, if it is not a run, or cannot be read.
    """
    if is_object_url(str(path)):
        store = glimpse(open_store(str(path)))
        if not store.list():
            raise _no_run(store.url, "nothing")
    else:
        path = _local(path)
        if not path.is_dir():
            raise _no_run(str(path), "a file" if path.exists() else "nothing")
        store = LocalStore(path)
    try:
        inventory = read_inventory(store)
    except OSError as error:  # of a disk
        raise errors.CheckpointUnreadable(store.url, expected="a run that can be read", found=error,
                                          fix="give this user the right to read there, or look at the device and its log; this does not prove damage") from error  # fmt: skip
    is_begun = begun is not None and not inventory.entries and begun in store.list()
    if inventory.problem is not None and not (
        is_begun and inventory.problem.error == errors.CheckpointMissing.__name__
    ):
        raise error_from(inventory.problem)
    return store, attrs.evolve(inventory, problem=None)


def has_other_format(path: Path) -> bool:
    """Whether a path has something that is not a run or a checkpoint of one, so that other formats are looked for.

    Examples:
        >>> has_other_format(Path("no/such/path"))
        False
    """
    if is_object_url(str(path)):
        return False
    place = _local(path)
    if not place.is_dir():
        return place.is_file()
    names = {each.name for each in place.iterdir()}
    is_own = step_of(place.resolve().name) is not None or any(step_of(name) is not None for name in names)
    return bool(names) and not is_own and not names & {RUN_FILE, MANIFEST}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by its directory, or the newest one of a run by the run's directory.

    Raises:
        CheckpointMissing: if there is no such directory.
        RunEmpty: if the run has no checkpoint.
        CheckpointUnreadable: if what may be the newest checkpoint of the run cannot be read now.
        CheckpointError: the matching subclass, if its manifest is not valid or files are missing.
    """
    is_local = not is_object_url(str(path))
    path = _local(path) if is_local else path
    real = path.resolve() if is_local and path.is_symlink() else path  # `latest` is a link to a checkpoint
    is_run = is_local and (real / RUN_FILE).is_file() and not (real / MANIFEST).exists()  # it may be called like a step
    if is_run or step_of(real.name) is None:
        store, inventory = open_run(path)
        name = _newest(inventory)
    else:
        if is_local and not real.is_dir():
            raise _no_checkpoint(path)
        store, inventory = open_run(real.parent)
        name = real.name
    return checkpoint_of(store, inventory, name, path)


def checkpoint_of(store: Store, inventory: Inventory, name: str, path: Path | None = None) -> Checkpoint:
    """Read the manifest of a checkpoint of a run that is open.

    Args:
        store: the run.
        inventory: what it holds.
        name: of the checkpoint.
        path: as the user has named it, for messages; None for its place in the run.

    Raises:
        CheckpointMissing: if the run has no such checkpoint.
        CheckpointError: the matching subclass, if its manifest is not valid or files are missing.
    """
    entry = examine(store, inventory, name).entry(name)
    if entry is None:
        raise _no_checkpoint(Path(store.url, name) if path is None else path)
    if entry.problem is not None:
        raise error_from(entry.problem)
    assert entry.manifest is not None
    return Checkpoint(store, name, entry.manifest)


def known_names(components: Sequence[str] | None, found: Iterable[str]) -> tuple[str, ...] | None:
    """Check the names that a user selects.

    Args:
        components: what was typed; None for all.
        found: the components that there are, or that were left out.

    Raises:
        UnknownComponent: for a name that is neither built in nor there, with the nearest one.

    Examples:
        >>> known_names(["scheduler", "ema"], ["model", "ema"])  # a built-in one may be absent
        ('scheduler', 'ema')
    """
    own = dict.fromkeys(name for name in found if name not in BUILTIN_COMPONENTS)
    return validate_components(components, declared=tuple(own), where="--components")


def narrowed(manifest: Manifest, components: Sequence[str] | None, *others: Manifest) -> Manifest:
    """The manifest with these components alone; one that is known, but not in it, is ignored.

    Args:
        manifest: of the checkpoint.
        components: the names; None for all.
        others: manifests whose components are known too.

    Raises:
        UnknownComponent: for a name that none of them has.
    """
    held = [name for each in (manifest, *others) for name in (*(c.name for c in each.components), *each.omitted)]
    names = known_names(components, held)
    if names is None:
        return manifest
    return attrs.evolve(manifest, components=tuple(each for each in manifest.components if each.name in names))


def _no_checkpoint(path: Path) -> errors.CheckpointMissing:
    run = url_text(str(path.parent))
    return errors.CheckpointMissing(
        url_text(str(path)), expected="a checkpoint", found="nothing", fix=f"see `trainfold ls {run}`"
    )


def _no_run(where: str, found: str) -> errors.CheckpointMissing:
    fix = "correct the path; a run has a run.json and directories step-..."
    return errors.CheckpointMissing(where, expected="the directory of a run", found=found, fix=fix)


def _local(path: Path) -> Path:
    """The checked path; a URL of another scheme than ``file`` is refused."""
    path = Path(local_path(path))
    check_path(str(path))
    try:
        path.is_dir()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise too_long(str(path)) from error
        raise
    return path


def _newest(inventory: Inventory) -> str:
    head = current_head(inventory)
    if head is None:
        raise nothing_complete(inventory)
    if (error := unread_newest(inventory, head)) is not None:
        raise error
    return directory_of(head.step)


def nothing_complete(inventory: Inventory, *, under_way: Collection[str] = ()) -> errors.RunEmpty:
    """The error for a run that has no complete checkpoint.

    Args:
        inventory: the run.
        under_way: the checkpoints that are being written.
    """
    from trainfold.core.markup.texts import count_text  # for this error alone

    begun = [entry for entry in inventory.entries if entry.head is None and entry.name not in under_way]
    problems = [entry.problem for entry in inventory.entries if entry.head is not None and entry.problem is not None]
    found = [count_text(len(under_way), "save") + " under way"] if under_way else []
    found += [f"{count_text(len(begun), 'save')} that did not finish"] if begun else []
    if problems:
        first = problems[0]
        found.append(
            f"{len(problems)} that cannot be used, the first one because of {first.where}: expected {first.expected}, found {first.found}"
        )
    return errors.RunEmpty(
        inventory.run,
        expected="a complete checkpoint",
        found=", and ".join(found) or "none",
        fix=problems[0].fix
        if problems
        else "wait until it has finished"
        if under_way
        else "train from the start, or point at another run",
    )
