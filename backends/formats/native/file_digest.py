"""`digest_in`: the digest of a file in a store; `parts_in`: its bytes in parts."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Final

import xxhash

from trainfold.backends.stores.protocol import ReadsAhead, Store
from trainfold.core.digest import DIGEST_PREFIX

_PART_BYTES: Final = 8 << 20


def digest_in(store: Store, path: str, size_bytes: int) -> str:
    """The digest of the bytes of a file, read in parts.

    Args:
        store: that has it.
        path: of the file.
        size_bytes: how many bytes are read.

    Raises:
        CheckpointMissing, CheckpointTorn: if it does not have it, or not all of it.
    """
    found = xxhash.xxh3_128()
    for part in parts_in(store, path, size_bytes):
        found.update(part)
    return DIGEST_PREFIX + found.hexdigest()


def parts_in(store: Store, path: str, size_bytes: int) -> Iterator[memoryview]:
    """The bytes of a file, in one buffer that serves each part.

    Args:
        store: see `digest_in`.
        path: see `digest_in`.
        size_bytes: see `digest_in`.
    """
    ahead = store.reading(path, [(0, size_bytes)]) if isinstance(store, ReadsAhead) else nullcontext(None)
    buffer = memoryview(bytearray(min(_PART_BYTES, size_bytes)))
    with ahead as read_into:
        for start in range(0, size_bytes, _PART_BYTES):
            part = buffer[: min(_PART_BYTES, size_bytes - start)]
            if read_into is None:
                store.read_into(path, part, start=start)
            else:
                read_into(part, start)
            yield part
