"""`FsspecPrefix`: a run's prefix in a filesystem of fsspec; `FsspecCalls`: the calls of obstore that `Bucket` makes, over it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

from trainfold.backends.stores.object_store.over_fsspec import exceptions
from trainfold.backends.stores.object_store.over_fsspec.library import ObjectDescription, as_obstore, library_of
from trainfold.backends.stores.object_store.over_fsspec.memory_library import MemoryLibrary

_PIECE_BYTES: Final = 8 << 20


@final
class FsspecPrefix:
    """What stands for a store of obstore.

    Args:
        filesystem: of fsspec, and not asynchronous.
        path: of the run in it, such as ``bucket/runs/a``.

    Raises:
        InvalidArgument: if nothing is known of its puts; see `library_of`.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.library = library_of(filesystem)
        self.path = str(filesystem._strip_protocol(path)).rstrip("/")  # noqa: SLF001  # no other name in fsspec

    def at(self, key: str) -> str:
        """The path of an object."""
        return f"{self.path}/{key}" if key else self.path

    def listed(self) -> Any:
        """The filesystem, as it is to be listed."""
        self.filesystem.invalidate_cache()
        return self.library.still() if isinstance(self.library, MemoryLibrary) else self.filesystem

    def key(self, path: str) -> str | None:
        """The key of a path in a list; None for what is not below the prefix."""
        return path[len(self.path) + 1 :] if path.startswith(f"{self.path}/") else None


@final
class _Got:
    """An object, of which the first bytes are here."""

    def __init__(self, store: FsspecPrefix, path: str, start: int, stop: int | None) -> None:
        self._store, self._path, self._start, self._stop = store, path, start, stop
        self._first, self.meta = self._piece(start)
        self.attributes = self.meta["attributes"]

    def _piece(self, start: int) -> tuple[bytes, ObjectDescription]:
        span = None if (start, self._stop) == (0, None) else f"bytes={start}-"
        if self._stop is not None:
            span = f"bytes={start}-{min(start + _PIECE_BYTES, self._stop) - 1}"
        with as_obstore(self._store.library):
            return self._store.library.get(self._path, span)

    def stream(self, *, min_chunk_size: int = 0) -> Iterator[bytes]:
        """All of it, a request for each piece."""
        del min_chunk_size
        data, at = self._first, self._start
        yield data
        while self._stop is not None and len(data) == _PIECE_BYTES and at + _PIECE_BYTES < self._stop:
            at += _PIECE_BYTES
            data = self._piece(at)[0]
            yield data

    def bytes(self) -> bytes:
        """All of it."""
        return b"".join(self.stream())


@final
class FsspecCalls:
    """The verbs of obstore, each with its store as the first argument."""

    exceptions = exceptions

    def get(self, store: FsspecPrefix, key: str, *, options: Mapping[str, Any] | None = None) -> Any:
        """An object, or a range of it."""
        span: Any = (options or {}).get("range", (0, None))
        start, stop = (span["offset"], None) if isinstance(span, Mapping) else span
        return _Got(store, store.at(key), start, stop)

    def head(self, store: FsspecPrefix, key: str) -> ObjectDescription:
        """An object without its bytes."""
        with as_obstore(store.library):
            return store.library.head(store.at(key))

    def list(
        self, store: FsspecPrefix, prefix: str | None, *, chunk_size: int = 0
    ) -> Iterator[Sequence[Mapping[str, Any]]]:
        """All objects below a directory; one page, however many they are."""
        del chunk_size
        with as_obstore(store.library):
            found = store.listed().find(store.at(prefix or ""), detail=True)
        above = f"{prefix}/" if prefix else ""
        if isinstance(found, Mapping):  # and not the name of an object that is called as the directory
            yield [each for each in _described(store, found.values()) if each["path"].startswith(above)]

    def list_with_delimiter(self, store: FsspecPrefix, prefix: str | None) -> Mapping[str, Any]:
        """What is one level below a directory."""
        with as_obstore(store.library):
            try:
                found = store.listed().ls(store.at(prefix or ""), detail=True)
            except FileNotFoundError as error:  # nothing is there, or not even the bucket: some libraries name it
                if "NoSuchBucket" in str(error.__cause__):
                    raise
                found = []
        above = f"{prefix}/" if prefix else ""
        keys = [store.key(each["name"].rstrip("/")) for each in found if each["type"] == "directory"]
        objects = [each for each in _described(store, found) if each["path"].startswith(above)]
        return {"objects": objects, "common_prefixes": [key for key in keys if key and key.startswith(above)]}

    def put(self, store: FsspecPrefix, key: str, data: Any, *, use_multipart: bool, **how: Any) -> Mapping[str, Any]:
        """Put an object whole, under the condition ``mode`` and with ``attributes``; or in parts of ``chunk_size``, one after the other."""
        path = store.at(key)
        if not use_multipart:
            with as_obstore(store.library):
                return store.library.put(path, bytes(data), how.get("mode"), how.get("attributes", {}))
        self._upload(store, path, data, how["chunk_size"])
        return self.head(store, key)

    def _upload(self, store: FsspecPrefix, path: str, parts: Iterable[bytearray], part_bytes: int) -> None:
        with as_obstore(store.library):
            upload = store.library.upload(path, part_bytes)
        try:
            for part in parts:  # what they raise is not the store's
                with as_obstore(store.library):
                    upload.write(part)
            with as_obstore(store.library):
                upload.commit()
        except BaseException:
            with suppress(Exception):
                upload.abort()
            raise

    def delete(self, store: FsspecPrefix, keys: str | Sequence[str]) -> None:
        """Delete objects, a request for each; those that are not there are fine."""
        for key in [keys] if isinstance(keys, str) else keys:
            with as_obstore(store.library), suppress(FileNotFoundError):
                store.filesystem.rm_file(store.at(key))


def _described(store: FsspecPrefix, infos: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    keys = ((store.key(info["name"]), info) for info in infos if info["type"] == "file")
    return [{**store.library.described(info), "path": key} for key, info in keys if key]
