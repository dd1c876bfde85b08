"""The filesystem in the memory of this process: conditions are kept under a lock that all of its writers here share."""

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, final

from trainfold.backends.stores.object_store.over_fsspec.exceptions import (
    AlreadyExistsError,
    BaseError,
    PreconditionError,
)
from trainfold.backends.stores.object_store.over_fsspec.library import Condition, ObjectDescription, Upload

_LOCK: Final = threading.RLock()
_SEAL: Final = "_trainfold"  # of an object: its version, and what was put with it


@final
class MemoryLibrary:
    """See `Library`. A version is a number that no other put of this process has."""

    _puts = 0

    def __init__(self, filesystem: Any) -> None:
        self._files = filesystem

    def get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        """See `Library.get`."""
        start, _, last = (span or "bytes=0-").removeprefix("bytes=").partition("-")
        with _LOCK:
            data = bytes(self._files.cat_file(path))
            return data[int(start) : int(last) + 1 if last else None], self.head(path)

    def head(self, path: str) -> ObjectDescription:
        """See `Library.head`."""
        with _LOCK:
            return self._described(self._file(path))

    def still(self) -> Any:
        """The filesystem as it is now, to list: it walks through its dictionary of all objects, and a thread that puts or deletes any of them, of whatever run, would end that with an error."""
        still = object.__new__(type(self._files))
        vars(still).update(vars(self._files), store=dict(self._files.store), pseudo_dirs=list(self._files.pseudo_dirs))
        return still

    def _file(self, path: str) -> Any:
        if path not in self._files.store:
            raise FileNotFoundError(path)
        return self._files.store[path]

    def described(self, info: Mapping[str, Any]) -> ObjectDescription:
        """See `Library.described`."""
        with _LOCK:
            found = self._files.store.get(info["name"])
            if found is not None:
                return self._described(found)
        return {"size": info["size"], "last_modified": datetime.fromtimestamp(info["created"], UTC), "e_tag": None, "version": None, "attributes": {}}  # fmt: skip

    def _described(self, found: Any) -> ObjectDescription:
        version, attributes = getattr(found, _SEAL, (None, {}))
        return {"size": found.size, "last_modified": found.modified, "e_tag": version, "version": None, "attributes": attributes}  # fmt: skip

    def put(self, path: str, data: bytes, condition: Condition, attributes: Mapping[str, str]) -> Mapping[str, Any]:
        """See `Library.put`."""
        with _LOCK:
            there = self._files.store.get(path)
            if condition == "create" and there is not None:
                raise AlreadyExistsError(path)
            if isinstance(condition, Mapping) and (
                there is None
                or getattr(there, _SEAL, None) is None
                or self._described(there)["e_tag"] != condition["e_tag"]
            ):
                raise PreconditionError(path)
            self._files.pipe_file(path, data)
            MemoryLibrary._puts += 1
            setattr(self._files.store[path], _SEAL, (str(self._puts), dict(attributes)))
            return {"e_tag": str(self._puts), "version": None}

    def upload(self, path: str, part_bytes: int) -> Upload:
        """See `Library.upload`."""
        del part_bytes
        return _Parts(self, path)

    def error_of(self, error: Exception) -> BaseError | None:
        """See `Library.error_of`."""
        del error
        return None


@final
class _Parts:
    """See `Upload`."""

    def __init__(self, library: MemoryLibrary, path: str) -> None:
        self._library, self._path, self._data = library, path, bytearray()

    def write(self, part: bytearray) -> None:
        self._data += part

    def commit(self) -> None:
        self._library.put(self._path, bytes(self._data), None, {})

    def abort(self) -> None:
        self._data.clear()
