"""`copy_file`: sends one file from a store to another, and compares its bytes with their digest while they pass."""

from collections.abc import Callable, Iterator

import xxhash

from trainfold.backends.formats.native.file_digest import digest_in, parts_in
from trainfold.backends.stores.protocol import Buffer, Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointDamaged, CheckpointMissing, CheckpointTorn
from trainfold.core.history.copy_plan import CopiedFile


def copy_file(source: Store, target: Store, file: CopiedFile, advance: Callable[[int], object]) -> bool:
    """Send a file, unless the target has it with these bytes.

    Args:
        source: the run that is read.
        target: the store that is written. If this raises, nothing of the file is left there.
        file: the file, with its digest.
        advance: gets the bytes that are done, as they pass.

    Returns:
        Whether it was sent.

    Raises:
        CheckpointDamaged: if the source has other bytes.
        CheckpointMissing, CheckpointTorn: if the source does not have it, or not all of it.
        SaveFailed: if the target cannot store it.
    """
    if _has(target, file):
        advance(file.size_bytes)
        return False
    passing = xxhash.xxh3_128()

    def parts() -> Iterator[Buffer]:
        for part in parts_in(source, file.path, file.size_bytes):
            passing.update(part)
            yield part
            advance(len(part))
        found = DIGEST_PREFIX + passing.hexdigest()
        if found != file.digest:  # before the write ends, so that it does not
            raise CheckpointDamaged(f"{source.url}/{file.path}", expected=file.digest, found=found,
                                    fix="copy an older checkpoint of the run, and check the disk")  # fmt: skip

    target.write(file.path, parts(), size_bytes=file.size_bytes)
    return True


def _has(store: Store, file: CopiedFile) -> bool:
    """Whether a store has a file with these bytes. What cannot be read, for whatever reason, is not there: it is sent again, with the same bytes."""
    try:
        return store.size(file.path) == file.size_bytes and digest_in(store, file.path, file.size_bytes) == file.digest
    except (CheckpointMissing, CheckpointTorn, CheckpointDamaged):
        return False
