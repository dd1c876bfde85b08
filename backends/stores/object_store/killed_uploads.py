"""`abort_killed_uploads`: ends the uploads in parts that a killed writer has left in S3. No list of objects shows them, they cost money, and obstore cannot list them.

Azure removes its own after a week. In Google Cloud Storage a rule of the bucket does it.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

from trainfold.backends.stores.object_store.errors.library_logs import hide_logins_of_aws
from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.core.format.file_names import is_data_file, step_of

_Call: TypeAlias = Callable[..., Any]
_LOG: Final = logging.getLogger("trainfold")
_SECS: Final = 3  # a takeover waits for it
_TRIES: Final = 2
_LIMIT_SECS: Final = 10
_NO_SUCH: Final = "NoSuchUpload"  # it has ended, or another one has aborted it
_FIX: Final = "or let the bucket's rule AbortIncompleteMultipartUpload do it"


def abort_killed_uploads(store: Any, url: str) -> int:
    """Abort all uploads of files that a save writes into a run's checkpoints. The caller holds the run's lock, and no save is under way: so none of them can end in a checkpoint.

    It never raises for what S3 does: what is left costs no checkpoint, and is logged as a warning.

    Args:
        store: a store of obstore with the run's prefix, or an `FsspecPrefix`; s3fs asks by itself.
        url: the location in messages.

    Returns:
        How many were aborted; 0 for a store that is not S3.

    Examples:
        >>> from obstore.store import MemoryStore
        >>> abort_killed_uploads(MemoryStore(), "memory://run")
        0
    """
    if not _is_s3(store):
        return 0
    aborted, why, fix = 0, "boto3, which lists them, is not installed", "pip install boto3"
    try:
        call, bucket, run = _s3_of(store)
        aborted, failure = _aborted(call, list(_uploads(call, bucket, f"{run}/" if run else "")))
    except ImportError:
        failure = None
    except Exception as error:  # noqa: BLE001  # botocore has no common class
        failure = error
    else:
        if failure is None:
            return aborted
    if failure is not None:
        why = without_secrets(failure)
        fix = "look at the network, and at s3:ListBucketMultipartUploads and s3:AbortMultipartUpload"
    _LOG.warning("%s: what killed programs were uploading was not looked for, or not aborted, and costs money until it is aborted: %s: %s, %s", url, why, fix, _FIX)  # fmt: skip
    return aborted


def _is_s3(store: Any) -> bool:
    if isinstance(store, FsspecPrefix):
        return hasattr(store.filesystem, "call_s3")
    from obstore.store import S3Store  # late: an extra

    return isinstance(store, S3Store)


def _s3_of(store: Any) -> tuple[_Call, str, str]:
    """What calls S3 by the name of a request; the bucket; and the prefix of the run."""
    if isinstance(store, FsspecPrefix):
        bucket, run, _ = store.filesystem.split_path(store.path)
        return store.filesystem.call_s3, bucket, run
    client = _client(store)
    return lambda name, **what: getattr(client, name)(**what), store.config["bucket"], store.prefix or ""


def _uploads(call: _Call, bucket: str, run: str) -> Iterator[dict[str, str]]:
    """What names each upload of a file that a save writes. Anything else there is another program's, which may live."""
    after: dict[str, str] = {}
    while True:
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=f"{run}step-", **after)
        for each in page.get("Uploads", ()):
            directory, _, file = each["Key"].removeprefix(run).partition("/")
            if step_of(directory) is not None and is_data_file(file):
                yield {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
        if not page.get("IsTruncated"):
            return
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _aborted(call: _Call, places: Sequence[Mapping[str, str]]) -> tuple[int, Exception | None]:
    """How many could be aborted, and the last failure; one that fails does not keep the others, but a server that is silent is not asked for long."""
    aborted, failure, late = 0, None, time.monotonic() + _LIMIT_SECS
    for place in places:
        if failure is not None and time.monotonic() > late:
            break
        try:
            call("abort_multipart_upload", **place)
            aborted += 1
        except Exception as error:  # noqa: BLE001  # botocore has no common class
            failure = failure if _NO_SUCH in str(error) else error
    return aborted, failure


def _client(store: Any) -> Any:
    """A client of boto3 for the same server, with the same credentials: those that the store was given, or else the provider's own chain."""
    hide_logins_of_aws()
    boto3, config, environ = import_module("boto3"), store.config, os.environ
    keys = dict(config)
    if store.credential_provider is not None:
        found = store.credential_provider()
        keys = {**found, "session_token": found.get("token")}
    return boto3.session.Session().client(
        "s3",
        aws_access_key_id=keys.get("access_key_id"),
        aws_secret_access_key=keys.get("secret_access_key"),
        aws_session_token=keys.get("session_token"),
        region_name=config.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint_url=config.get("endpoint") or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or environ.get("AWS_ENDPOINT"),
        config=import_module("botocore.config").Config(
            connect_timeout=_SECS, read_timeout=_SECS, retries={"total_max_attempts": _TRIES, "mode": "standard"}, s3={"addressing_style": "path"}
        ),
    )  # fmt: skip
