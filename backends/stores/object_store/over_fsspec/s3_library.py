"""S3 through s3fs: a condition is the If-None-Match or If-Match of the put itself. An old botocore leaves it out; that is found when it is tried."""

from collections.abc import Mapping
from typing import Any, final

import fsspec.asyn

from trainfold.backends.stores.object_store.errors.library_logs import hide_logins_of_aws
from trainfold.backends.stores.object_store.over_fsspec.buffered_upload import BufferedUpload
from trainfold.backends.stores.object_store.over_fsspec.exceptions import (
    BaseError,
    NotSupportedError,
    PreconditionError,
)
from trainfold.backends.stores.object_store.over_fsspec.library import Condition, ObjectDescription, Upload


@final
class S3Library:
    """See `Library`. The version of an object is its entity tag."""

    def __init__(self, filesystem: Any) -> None:
        self._files = filesystem
        hide_logins_of_aws()

    def get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        """See `Library.get`."""
        found: tuple[bytes, ObjectDescription] = fsspec.asyn.sync(self._files.loop, self._get, path, span)
        return found

    async def _get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        span_of = {} if span is None else {"Range": span}
        found = await self._files._call_s3("get_object", **self._named(path), **span_of)  # noqa: SLF001  # the same in a coroutine
        async with found["Body"] as body:
            return await body.read(), _described(found)

    def _named(self, path: str) -> dict[str, str]:
        bucket, key, _ = self._files.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def head(self, path: str) -> ObjectDescription:
        """See `Library.head`."""
        return _described(self._files.call_s3("head_object", **self._named(path)))

    def described(self, info: Mapping[str, Any]) -> ObjectDescription:
        """See `Library.described`."""
        return _described({**info, "ContentLength": info["size"]})

    def put(self, path: str, data: bytes, condition: Condition, attributes: Mapping[str, str]) -> Mapping[str, Any]:
        """See `Library.put`."""
        match = {"IfNoneMatch": "*"} if condition == "create" else {}
        if isinstance(condition, Mapping):
            match = {"IfMatch": condition["e_tag"]}
        given = self._files.call_s3("put_object", **self._named(path), Body=data, Metadata=dict(attributes), **match)
        return {"e_tag": given["ETag"], "version": None}

    def upload(self, path: str, part_bytes: int) -> Upload:
        """See `Library.upload`."""
        return BufferedUpload(self._files.open(path, "wb", block_size=part_bytes, autocommit=False))

    def error_of(self, error: Exception) -> BaseError | None:
        """See `Library.error_of`."""
        answers = [getattr(each, "response", None) for each in (error.__cause__, error)]  # None of what got no answer
        known: Mapping[str, Any] = next((each for each in answers if isinstance(each, Mapping)), {})
        code = str(known.get("Error", {}).get("Code", ""))
        if code in {"PreconditionFailed", "412"}:
            return PreconditionError(str(error))
        return NotSupportedError(str(error)) if code in {"NotImplemented", "501"} else None


def _described(found: Mapping[str, Any]) -> ObjectDescription:
    return {
        "size": found["ContentLength"],
        "last_modified": found["LastModified"],
        "e_tag": found["ETag"],
        "version": None,
        "attributes": found.get("Metadata", {}),
    }
