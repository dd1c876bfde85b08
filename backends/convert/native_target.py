"""`write_native`: writes a checkpoint from tensors that are read one after the other, and goes on where a killed process stopped."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.convert.continued_files import ContinuedWrites, Kept, WholeWrites
from trainfold.backends.formats.native.file_digest import digest_in
from trainfold.backends.formats.native.later_leaf import LaterLeaf
from trainfold.backends.formats.native.writer import write_file
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.library_versions import library_versions
from trainfold.backends.runs.begin import begin_checkpoint
from trainfold.backends.runs.commit import after_commit, proved_bytes
from trainfold.backends.runs.scan import examine, listed_run
from trainfold.backends.stores.local import MARGIN_BYTES, LocalStore
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, InvalidArgument
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.file_names import MANIFEST, RUN_FILE
from trainfold.core.format.indexes.contributions import contributions_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.save.file_layout import FilePlan, TensorPlacement
from trainfold.core.save.save_plan import SavePlan, plan_save
from trainfold.core.save.written import Wrote, manifest_of, whole_manifest
from trainfold.core.state.notes import CONVERTED

ReadLeaf = Callable[[str], torch.Tensor]
"""Reads a tensor, by its leaf path."""

_ROOM_BYTES: Final = 1 << 20


@final
@attrs.frozen
class NativeContents:
    """What a checkpoint will hold.

    Attributes:
        step: its step.
        described: component -> its structure, and the specs of its tensors.
        read: component -> what reads its tensors.
        omitted: components that the source has, or a run would have, and that are left out. A full resume passes such a checkpoint over.
        contract: what must be equal at a resume, and under `CONVERTED` where it comes from.
        identity: of the source, so that what another source has given is not gone on with.
        check: called before the commit; it raises if what was read may not be what was there when the source was opened.
    """

    step: int
    described: Mapping[str, Described]
    read: Mapping[str, ReadLeaf] = attrs.field(repr=False)
    omitted: tuple[str, ...]
    contract: Mapping[str, Json]
    identity: str
    check: Callable[[], Any] = attrs.field(default=lambda: None, repr=False)

    @property
    def plan(self) -> SavePlan:
        """The files, byte by byte, of a run that has nothing else."""
        return without_collecting(plan_save)([self.described], step=self.step)


def native_room(plan: SavePlan) -> int:
    """How many bytes have to be free for a run that does not exist yet.

    Args:
        plan: of its files.
    """
    return plan.size_bytes + _ROOM_BYTES + MARGIN_BYTES


def write_native(contents: NativeContents, store: Store) -> str:
    """Write a new run with one checkpoint. Each tensor is read when it is written, and nothing is visible before all is there.

    Memory: one tensor, and what its source needs to read it.

    Args:
        contents: of the checkpoint.
        store: the run. It does not exist yet, is empty, or was begun by a call with equal contents that was killed.

    Returns:
        The name of the checkpoint.

    Raises:
        InvalidArgument: if there is something else.
        CheckpointDamaged: if an earlier process has written all of it, and its bytes have changed since.
        CheckpointError: the matching subclass, if something cannot be read; what was written stays, and is used when this runs again.
        SaveFailed: or its matching subclass, if something cannot be written; so too.
    """
    plan = contents.plan
    identity = _identity(contents, plan)
    contract = {**contents.contract, CONVERTED: {**_note(contents), "plan": identity}}
    if (done := _checked_target(store, plan, identity)) is not None:
        _check_bytes(store, plan.directory, done)
        return plan.directory
    with store.lock():
        _checked_target(store, plan, identity)
        with ContinuedWrites(store.url, identity) if isinstance(store, LocalStore) else WholeWrites(store) as writes:
            kept = [writes.kept(f"{plan.directory}/{file.name}") for file in plan.files]
            store.reserve(plan.size_bytes - sum(each.size_bytes for each in kept) + _ROOM_BYTES)
            head, _ = begin_checkpoint(store, contents.step)
            plan = plan.revised(head.revision)  # another one if a writer that is lost may still write into a bucket
            records = {}
            for file, found in zip(plan.files, kept, strict=True):
                leaves = _leaves(file, contents, found)
                records[file.name] = write_file(file, leaves, store=writes, directory=plan.directory)
            contents.check()
            writes.finish()
        manifest = without_collecting(manifest_of)(
            plan, records, head=head, contract=contract, omitted=contents.omitted, versions=library_versions()
        )
        parts = {each.name: contributions_of(each, manifest, [0])[0] for each in manifest.components}
        whole: Manifest = without_collecting(whole_manifest)(manifest, [Wrote(manifest.files, None, parts)])
        store.commit(f"{plan.directory}/{MANIFEST}", proved_bytes(whole, plan.directory))
        after_commit(whole, plan, store, store)
        writes.forget(f"{plan.directory}/{file.name}" for file in plan.files)
    return plan.directory


def check_native_target(contents: NativeContents, store: Store) -> bool:
    """Raise if `write_native` would refuse the place; nothing is written.

    Args:
        contents: as there.
        store: as there.

    Returns:
        Whether an earlier process has written all of it.

    Raises:
        InvalidArgument: if there is something else.
        CheckpointForeign: if it is something else than a directory.
    """
    if not store.list():
        return False
    plan = contents.plan
    return _checked_target(store, plan, _identity(contents, plan)) is not None


def _identity(contents: NativeContents, plan: SavePlan) -> str:
    return digest_of(canonical_json([contents.identity, [digest_of(file.header) for file in plan.files]]))


def _note(contents: NativeContents) -> dict[str, Json]:
    found = contents.contract.get(CONVERTED, {})
    assert isinstance(found, dict), "the caller says where it comes from"
    return found


def _checked_target(store: Store, plan: SavePlan, identity: str) -> Manifest | None:
    """Refuse a place that is not free. Returns the manifest, if an earlier process has committed all of this.

    Raises:
        InvalidArgument: if there is anything that a conversion with this identity has not begun.
    """
    present = store.list()
    others = [name for name in present if name not in (RUN_FILE, plan.directory)]
    inventory = listed_run(store)
    committed = [each.name for each in inventory.entries if each.head is not None]
    is_run = RUN_FILE in present and inventory.problem is None
    done = _done(store, plan, identity) if committed else None
    if others or (present and not is_run) or (committed and done is None):
        found = others[:3] or committed or [str(inventory.problem)]
        raise InvalidArgument(store.url, expected="a directory that does not exist yet, is empty, or was begun by this conversion",
                              found=f"one with {', '.join(found)}", fix="name another directory; a run is never written into")  # fmt: skip
    return done


def _done(store: Store, plan: SavePlan, identity: str) -> Manifest | None:
    """The manifest, if an earlier process has committed all of this."""
    if store.size(f"{plan.directory}/{MANIFEST}") is None:
        return None
    entry = examine(store, listed_run(store), plan.directory).entry(plan.directory)
    if entry is None or entry.manifest is None or entry.problem is not None:
        return None
    note = entry.manifest.contract.get(CONVERTED)
    return entry.manifest if isinstance(note, dict) and note.get("plan") == identity else None


def _check_bytes(store: Store, directory: str, manifest: Manifest) -> None:
    """Compare the files with their digests.

    Raises:
        CheckpointDamaged: if one has other bytes.
    """
    for file in manifest.files:
        path = file.path(directory)
        if (found := digest_in(store, path, file.size_bytes)) != file.digest:
            raise CheckpointDamaged(f"{store.url}/{path}", expected=file.digest, found=found,
                                    fix="remove the directory, or name another one, and convert again")  # fmt: skip


def _leaves(file: FilePlan, contents: NativeContents, kept: Kept) -> dict[str, LaterLeaf]:
    """The tensors of a file: those that are kept are read from it, the others from the source."""
    return {
        each.path: LaterLeaf(
            each.path,
            LeafSpec(each.dtype, each.shape),
            partial(_of_file, each, kept)
            if each.stop <= kept.size_bytes
            else partial(contents.read[file.component_of(each.path)], each.path),
        )
        for each in file.tensors
    }


def _of_file(placed: TensorPlacement, kept: Kept) -> torch.Tensor:
    dtype = torch_dtype(placed.dtype)
    if placed.start == placed.stop:
        return torch.empty(placed.shape, dtype=dtype)
    return torch.frombuffer(kept.read(placed.start, placed.stop), dtype=torch.uint8).view(dtype).view(placed.shape)
