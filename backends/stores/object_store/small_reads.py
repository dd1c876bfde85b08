"""`SmallReads`: the first bytes of objects, read once for each version. A run's manifests are asked for again and again, and hardly ever change."""

import threading
from typing import Final, final

from trainfold.backends.stores.object_store.bucket import Bucket, Found
from trainfold.backends.stores.os_errors import missing

_WHOLE_BYTES: Final = 16 << 10  # an object up to this size is read whole at once
_HEAD_BYTES: Final = 4 << 10  # else its beginning
_LIMIT_BYTES: Final = 32 << 20


@final
class SmallReads:
    """Remembers small reads by the version of the object, so that what is remembered is never old.

    Args:
        bucket: the run.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._mutex = threading.Lock()
        self._known: dict[tuple[str, str], bytes] = {}
        self._size_bytes = 0

    def read(self, key: str, found: Found, start: int, stop: int | None) -> bytes:
        """The bytes ``[start, stop)`` of an object.

        Args:
            key: the object.
            found: what a list says of it.
            start: the first byte.
            stop: one past the last; None for all.

        Raises:
            CheckpointMissing: if it has been deleted since.
        """
        begin = found.size_bytes if found.size_bytes <= _WHOLE_BYTES else _HEAD_BYTES
        if min(found.size_bytes, found.size_bytes if stop is None else stop) > begin or not found.tag:
            return self._read(key, start, stop)[0]
        with self._mutex:
            known = self._known.get((key, found.tag))
        if known is None:
            known, tag = self._read(key, 0, begin)
            if tag != found.tag:  # replaced since, and it may be larger now
                return self._read(key, start, stop)[0]
            self.put(key, tag, known)
        return known[start:stop]

    def put(self, key: str, tag: str, data: bytes) -> None:
        """Remember the beginning of a version; ``data`` is all of it, or its first bytes as `read` asks for them."""
        if not tag:
            return
        data = data if len(data) <= _WHOLE_BYTES else data[:_HEAD_BYTES]
        with self._mutex:
            self._size_bytes += len(data) - len(self._known.pop((key, tag), b""))
            self._known[key, tag] = data
            while self._size_bytes > _LIMIT_BYTES:  # the oldest first
                self._size_bytes -= len(self._known.pop(next(iter(self._known))))

    def _read(self, key: str, start: int, stop: int | None) -> tuple[bytes, str]:
        found = self._bucket.get(key, start=start, stop=stop)
        if found is None:
            raise missing(self._bucket.where(key))
        return found.data, found.tag
