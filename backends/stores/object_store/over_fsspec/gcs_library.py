"""Google Cloud Storage through gcsfs, which speaks its JSON interface: a condition is the ifGenerationMatch of the put itself."""

import io
import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, final

from trainfold.backends.stores.object_store.errors.library_logs import hide_answers_in_logs
from trainfold.backends.stores.object_store.over_fsspec.buffered_upload import BufferedUpload
from trainfold.backends.stores.object_store.over_fsspec.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from trainfold.backends.stores.object_store.over_fsspec.library import Condition, ObjectDescription, Upload

_ATTRIBUTE: Final = "x-goog-meta-"


@final
class GcsLibrary:
    """See `Library`. The version of an object is its generation, which is another one after each put."""

    def __init__(self, filesystem: Any) -> None:
        self._files = filesystem
        hide_answers_in_logs("gcsfs")

    def get(self, path: str, span: str | None) -> tuple[bytes, ObjectDescription]:
        """See `Library.get`."""
        headers, data = self._files.call("GET", self._files.url(path), headers={} if span is None else {"Range": span})
        fields = {name.lower(): value for name, value in headers.items()}
        return bytes(data), {
            "size": int(fields.get("content-range", "").rpartition("/")[2] or len(data)),
            "last_modified": parsedate_to_datetime(fields["last-modified"]),
            "e_tag": None,
            "version": fields["x-goog-generation"],
            "attributes": {name.removeprefix(_ATTRIBUTE): value for name, value in fields.items() if name.startswith(_ATTRIBUTE)},
        }  # fmt: skip

    def head(self, path: str) -> ObjectDescription:
        """See `Library.head`."""
        bucket, key, _ = self._files.split_path(path)
        return self.described(self._files.call("GET", "b/{}/o/{}", bucket, key, json_out=True))

    def described(self, info: Mapping[str, Any]) -> ObjectDescription:
        """See `Library.described`."""
        return {
            "size": int(info["size"]),
            "last_modified": datetime.fromisoformat(info["updated"]),
            "e_tag": None,
            "version": info["generation"],
            "attributes": info.get("metadata", {}),
        }

    def put(self, path: str, data: bytes, condition: Condition, attributes: Mapping[str, str]) -> Mapping[str, Any]:
        """See `Library.put`."""
        bucket, key, _ = self._files.split_path(path)
        match = {"ifGenerationMatch": "0"} if condition == "create" else {}
        if isinstance(condition, Mapping):
            match = {"ifGenerationMatch": condition["version"]}
        mark = uuid.uuid4().hex
        about = json.dumps({"name": key, "metadata": dict(attributes)}).encode()
        body = b"\r\n".join(
            (b"--%b" % mark.encode(), b"Content-Type: application/json; charset=UTF-8", b"", about,
             b"--%b" % mark.encode(), b"Content-Type: application/octet-stream", b"", data, b"--%b--" % mark.encode())
        )  # fmt: skip
        given = self._files.call(
            "POST", self._files.url(path).partition("/download/")[0] + "/upload/storage/v1/b/{}/o", bucket, uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{mark}"'}, data=_Kept(body), json_out=True, **match,
        )  # fmt: skip
        return {"e_tag": None, "version": given["generation"]}

    def upload(self, path: str, part_bytes: int) -> Upload:
        """See `Library.upload`."""
        return BufferedUpload(self._files.open(path, "wb", block_size=part_bytes, autocommit=False))

    def error_of(self, error: Exception) -> BaseError | None:
        """See `Library.error_of`."""
        if str(error).startswith("Forbidden"):  # 403, which gcsfs raises as an OSError without a number
            return PermissionDeniedError(str(error))
        return UnauthenticatedError(str(error)) if getattr(error, "code", None) in {401, "401"} else None


@final
class _Kept(io.BytesIO):
    """Bytes that are sent again from their beginning: the client closes what it has sent."""

    def close(self) -> None:
        """Do nothing."""
