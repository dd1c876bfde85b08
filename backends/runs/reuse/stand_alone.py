"""`write_alone`: writes a checkpoint that refers to others again, so that it stands alone. A crash leaves the old one or the new one, whole."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import xxhash

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.commit import delete_stale, proved_bytes
from trainfold.backends.runs.scan import read_manifest, read_root
from trainfold.backends.stores.protocol import KeepsTime, Store, preference_of
from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointError, SaveFailed, TrainfoldError
from trainfold.core.format.file_names import MANIFEST, index_name
from trainfold.core.format.manifest import INLINE_BYTES, IndexRecord, Manifest, encode_index
from trainfold.core.save.file_layout import FilePlan
from trainfold.core.save.reuse.stand_alone import AlonePlan, Source, plan_alone

_CHUNK_BYTES = 16 << 20
_ROOM_BYTES = 2**20  # for the manifest and the indexes


def write_all_alone(store: Store, names: Sequence[str]) -> tuple[list[str], list[CheckpointError]]:
    """Write checkpoints again, each as `write_alone` does. One that proves damaged stays as it is.

    Returns:
        Those that stand alone now, and what is wrong with the others.

    Raises:
        SaveFailed: if one cannot be written; those before it stand alone.
    """
    done: dict[str, Manifest] = {}
    wrong = []
    for name in names:
        try:
            done[name] = write_alone(store, name)
        except SaveFailed:
            raise
        except CheckpointError as error:
            wrong.append(error)
    for name, manifest in done.items():
        delete_stale(manifest, name, store)  # of files that were needed until the last one was written
    return [*done], wrong


def write_alone(store: Store, name: str) -> Manifest:
    """Write a checkpoint again with all of its bytes in its own directory, as the next revision of its step.

    Args:
        store: the run. The caller holds its lock.
        name: the checkpoint, which is whole.

    Returns:
        Its new manifest.

    Raises:
        CheckpointDamaged: if bytes have another digest than its manifest says; it stays as it was.
        CheckpointTorn: if a file is missing.
        SaveFailed: if it cannot be written.
    """
    root = read_root(store, name)
    plan = without_collecting(plan_alone)(read_manifest(store, name, root=root), name, preference_of(store))
    store.reserve(plan.size_bytes + plan.manifest.world_size * _ROOM_BYTES)
    written: list[str] = []
    try:
        digests = {}
        for file, sources in zip(plan.files, plan.sources, strict=True):
            written.append(file.name)
            digests[file.name] = _write_file(store, name, file, sources)
        indexes = tuple(_write_indexes(store, plan, plan.done(digests), written))
        manifest = plan.done(digests, indexes)
        data = proved_bytes(manifest, name)
        commit = (
            store.commit_as_old if isinstance(store, KeepsTime) else store.commit
        )  # it is the checkpoint that it was
        commit(f"{name}/{MANIFEST}", data, replaces=digest_of(root))
    except BaseException:
        with suppress(TrainfoldError, OSError):
            if read_root(store, name) == root:  # else it was committed all the same
                for each in written:
                    store.delete(f"{name}/{each}")
        raise
    delete_stale(manifest, name, store)
    return manifest


def grows_bytes(store: Store, name: str) -> int:
    """How many bytes more a checkpoint would have in its directory if it stood alone, but for the sizes of manifest and indexes."""
    manifest = read_manifest(store, name)
    own = sum(file.size_bytes for file in manifest.files if not file.checkpoint)
    return without_collecting(plan_alone)(manifest, name, preference_of(store)).size_bytes - own


def _write_file(store: Store, directory: str, plan: FilePlan, sources: tuple[Source, ...]) -> str:
    """Copy the parts of a file, and verify each; return the digest of the file."""
    whole = xxhash.xxh3_128()

    def stream() -> Iterator[bytes]:
        whole.update(plan.header)
        yield plan.header
        for source in sources:
            digest = xxhash.xxh3_128()
            for start in range(source.start, source.stop, _CHUNK_BYTES):
                data = store.read(source.name, start=start, stop=min(start + _CHUNK_BYTES, source.stop))
                digest.update(data)
                whole.update(data)
                yield data
            found = DIGEST_PREFIX + digest.hexdigest()
            if found != source.digest:
                raise CheckpointDamaged(f"{store.url}/{source.name}", expected=source.digest, found=found,
                                        fix="use an older checkpoint of the run, and check the disk")  # fmt: skip

    store.write(f"{directory}/{plan.name}", stream(), size_bytes=plan.size_bytes)
    return DIGEST_PREFIX + whole.hexdigest()


def _write_indexes(store: Store, plan: AlonePlan, manifest: Manifest, written: list[str]) -> Iterator[IndexRecord]:
    """Write the index of each rank that has something, except that of rank 0 if it fits into the root."""
    has_own = any(component.is_own for component in manifest.components)
    writers = {file.rank for file in manifest.files}
    for rank in range(manifest.world_size if manifest.world_size > 1 else 0):
        if rank not in writers and not has_own:
            continue
        data = without_collecting(encode_index)(manifest, rank)
        if rank == 0 and len(data) <= INLINE_BYTES:
            continue
        name = index_name(rank, manifest.world_size, plan.suffix)
        written.append(name)
        store.write(f"{plan.directory}/{name}", [data], size_bytes=len(data))
        yield IndexRecord(name, rank, len(data), digest_of(data))
