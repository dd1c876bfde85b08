"""What stored tensors hold, however they are cut. This reads their bytes, and imports no torch."""

from collections.abc import Collection
from typing import Final

import xxhash

from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.format.content_sum import ContentSum, add, box_sum, sum_text
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.fingerprint import contents_text
from trainfold.core.format.leaf_texts import fingerprints_with, stored_tensors
from trainfold.core.format.manifest import Manifest, ShardRecord
from trainfold.core.layout.slices import row_blocks, volume

_READ_BYTES: Final = 16 << 20


def content_fingerprints(store: Store, directory: str, manifest: Manifest) -> dict[str, str]:
    """The content fingerprint of each component, as `content_fingerprint` has it for a state.

    Args:
        store: the run.
        directory: of the checkpoint.
        manifest: its proved manifest.

    Raises:
        CheckpointDamaged: if bytes have another digest than the manifest says.
        CheckpointTorn: if a file is missing or too short.
    """
    sums = content_sums(store, directory, manifest)
    return {name: contents_text(text) for name, text in fingerprints_with(manifest, sums).items()}


def content_sums(
    store: Store, directory: str, manifest: Manifest, leaves: Collection[str] | None = None
) -> dict[str, str]:
    """The content sum of stored tensors: leaf -> sum, as text.

    Args:
        store: the run.
        directory: of the checkpoint.
        manifest: its proved manifest.
        leaves: which tensors; None for all.

    Raises:
        CheckpointDamaged: if bytes have another digest than the manifest says.
        CheckpointTorn: if a file is missing or too short.
    """
    chosen = None if leaves is None else frozenset(leaves)
    found = {}
    for path, record in stored_tensors(manifest).items():
        if chosen is None or path in chosen:
            parts = [
                _sum_of(store, manifest.files[each.file].path(directory), each, record.dtype) for each in record.shards
            ]
            found[path] = sum_text(add(parts))
    return found


def _sum_of(store: Store, name: str, shard: ShardRecord, dtype: str) -> ContentSum:
    start, itemsize, total, digest = shard.start, STORED[dtype].itemsize, [], xxhash.xxh3_128()
    for box in row_blocks(shard.box, itemsize, _READ_BYTES):
        stop = start + volume(box) * itemsize
        data = store.read(name, start=start, stop=stop)
        digest.update(data)
        total.append(box_sum(data, dtype, box))
        start = stop
    found = DIGEST_PREFIX + digest.hexdigest()
    if found != shard.digest:
        raise CheckpointDamaged(
            f"{store.url}/{name}", expected=shard.digest, found=found, fix="verify the run, and use another checkpoint"
        )
    return add(total)
