"""Azure through adlfs: a condition is the If-None-Match or If-Match of the put itself."""

import base64
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

import fsspec.asyn

from trainfold.backends.stores.object_store.over_fsspec.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from trainfold.backends.stores.object_store.over_fsspec.library import Condition, ObjectDescription, Upload


@final
class AzureLibrary:
    """See `Library`. The version of an object is its entity tag; its requests are those of Azure's own client, which adlfs keeps."""

    def __init__(self, filesystem: Any) -> None:
        self._files = filesystem

    def _blob(self, path: str) -> Any:
        container, name, _ = self._files.split_path(path)
        return self._files.service_client.get_blob_client(container=container, blob=name)

    def _call(self, path: str, verb: str, *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            async with self._blob(path) as blob:
                try:
                    return await getattr(blob, verb)(*args, **kwargs)
                except Exception as error:
                    if getattr(error, "status_code", None) == 404:
                        raise FileNotFoundError(path) from error
                    raise

        return fsspec.asyn.sync(self._files.loop, call)

    def get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        """See `Library.get`."""
        start, _, last = (span or "bytes=-").removeprefix("bytes=").partition("-")
        length = int(last) + 1 - int(start) if last else None
        stream = self._call(path, "download_blob", offset=int(start) if start else None, length=length)
        return fsspec.asyn.sync(self._files.loop, stream.readall), self.described(stream.properties)

    def head(self, path: str) -> ObjectDescription:
        """See `Library.head`."""
        return self.described(self._call(path, "get_blob_properties"))

    def described(self, info: Mapping[str, Any]) -> ObjectDescription:
        """See `Library.described`."""
        return {
            "size": info["size"],
            "last_modified": info["last_modified"],
            "e_tag": info["etag"],
            "version": None,
            "attributes": {name.lower(): value for name, value in (info["metadata"] or {}).items()},
        }

    def put(self, path: str, data: bytes, condition: Condition, attributes: Mapping[str, str]) -> Mapping[str, Any]:
        """See `Library.put`."""
        match = {"If-Match": condition["e_tag"]} if isinstance(condition, Mapping) else {}
        given = self._call(path, "upload_blob", data, overwrite=condition != "create", metadata=dict(attributes), headers=match)  # fmt: skip
        return {"e_tag": given["etag"], "version": None}

    def upload(self, path: str, part_bytes: int) -> Upload:
        """See `Library.upload`."""
        del part_bytes
        return _Blocks(self, path)

    def error_of(self, error: Exception) -> BaseError | None:
        """See `Library.error_of`."""
        match getattr(error, "status_code", None):
            case 409 if getattr(error, "error_code", "") == "BlobAlreadyExists":
                return AlreadyExistsError(str(error))
            case 412:
                return PreconditionError(str(error))
            case 401:
                return UnauthenticatedError(str(error))
            case 403:
                return PermissionDeniedError(str(error))
        return None


@final
class _Blocks:
    """See `Upload`. Azure forgets blocks that were not committed after a week."""

    def __init__(self, library: AzureLibrary, path: str) -> None:
        self._library, self._path = library, path
        self._names: list[str] = []

    def write(self, part: bytearray) -> None:
        name = base64.b64encode(b"%08d" % len(self._names)).decode()
        self._library._call(self._path, "stage_block", name, bytes(part))  # noqa: SLF001  # of this module
        self._names.append(name)

    def commit(self) -> None:
        block = import_module("azure.storage.blob").BlobBlock  # what adlfs is made of
        self._library._call(self._path, "commit_block_list", [block(name) for name in self._names])  # noqa: SLF001

    def abort(self) -> None:
        self._names.clear()
