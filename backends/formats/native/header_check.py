"""`HeaderCheck`: whether the file headers that a load depends on are byte for byte those that were written."""

from collections.abc import Iterable
from typing import Final, final

import xxhash

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointDamaged, TrainfoldError
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.strict_json import strict_json
from trainfold.core.save.file_layout import Stored, header_of, stored_in

_CHUNK_BYTES: Final = 16 << 20
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_LIMIT_BYTES: Final = 100_000_000  # of a header, as in the reference implementation of safetensors


@final
class HeaderCheck:
    """Compares each header once with the one implied by the manifest. The load itself uses the manifest and never trusts a header.

    A header that says the same of each tensor in other bytes may come from another writer of the format, which is free in its spaces, the order of its
    keys and its texts about the file. Then the whole file is read, and its digest decides. A header that says something else is refused without reading the file.

    Args:
        store: the run.
        directory: the directory of the checkpoint.
        manifest: its proved manifest.
    """

    def __init__(self, store: Store, directory: str, manifest: Manifest) -> None:
        self._store = store
        self._directory = directory
        self._manifest = manifest
        self._checked: set[int] = set()
        self._stored: Stored | None = None

    @without_collecting
    def check(self, files: Iterable[int]) -> None:
        """Check these files of the manifest, by index.

        Raises:
            CheckpointDamaged: if the bytes of a header are not those that were written.
        """
        if self._stored is None:
            self._stored = stored_in(self._manifest)
        for index in sorted(set(files) - self._checked):
            file = self._manifest.files[index]
            name = file.path(self._directory)
            is_known = self._manifest.knows_all_of(file)
            wanted = header_of(self._manifest, index, stored=self._stored) if is_known else None
            if wanted is not None and (found := self._store.read(name, stop=len(wanted))) != wanted:
                if not self._says_the_same(name, index, found, wanted):
                    raise self._damaged(name, "the header that was written", "another one")
                self._check_whole(name, index)
            self._checked.add(index)

    def _says_the_same(self, name: str, index: int, found: bytes, wanted: bytes) -> bool:
        """Whether a header has the same tensors, in the same places of the file."""
        assert self._stored is not None, "the caller has filled it"
        stop = min((start for start, *_ in self._stored[index]), default=len(wanted))
        length = int.from_bytes(found[:_LENGTH_BYTES], "little")
        if length + _LENGTH_BYTES != stop or length > _LIMIT_BYTES:
            return False
        header = self._store.read(name, start=_LENGTH_BYTES, stop=stop)  # that it cannot be read now proves nothing
        try:
            theirs, mine = (strict_json(data, "") for data in (header, wanted[_LENGTH_BYTES:]))
        except TrainfoldError:
            return False
        theirs.pop(_METADATA, None)
        mine.pop(_METADATA, None)
        return theirs == mine

    def _check_whole(self, name: str, index: int) -> None:
        file = self._manifest.files[index]
        digest = xxhash.xxh3_128()
        for start in range(0, file.size_bytes, _CHUNK_BYTES):
            digest.update(self._store.read(name, start=start, stop=min(start + _CHUNK_BYTES, file.size_bytes)))
        found = DIGEST_PREFIX + digest.hexdigest()
        if found != file.digest:
            raise self._damaged(name, f"the header that was written, or {file.digest}", f"another header, and {found}")

    def _damaged(self, name: str, expected: str, found: str) -> CheckpointDamaged:
        fix = "the bytes changed on disk or on the way: verify the run, and load another checkpoint"
        return CheckpointDamaged(f"{self._store.url}/{name}: its header", expected=expected, found=found, fix=fix)
