"""A law: whatever a server repeats, in whatever place of its answer, no error shows it. What is shown of an answer is its status and a code of letters."""

from datetime import UTC, datetime, timedelta
from functools import partial

import obstore
import pytest
from kit.backends.buckets.filesystem_cases import LIBRARIES, client_at
from kit.backends.buckets.planted import (
    BODIES,
    HEADERS,
    KEPT_HEADERS,
    SECRET,
    STATUSES,
    always,
    answer,
    failure_of,
    said_by,
)
from obstore.store import AzureStore, GCSStore, S3Store

from trainfold.backends.stores.object_store.errors.bucket_errors import BucketErrors
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecCalls

ONCE = {"client_options": {"allow_http": True, "timeout": timedelta(seconds=5)}, "retry_config": {"max_retries": 0}}
STORES = {
    "s3": lambda port: S3Store("bucket", prefix="run", endpoint=f"http://127.0.0.1:{port}", region="us-east-1", access_key_id="a", secret_access_key="b", **ONCE),
    "az": lambda port: AzureStore("bucket", prefix="run", endpoint=f"http://127.0.0.1:{port}", account_name="a", account_key="aGVsbG8=", **ONCE),
    "az, through a server of tokens": lambda port: AzureStore("bucket", prefix="run", endpoint=f"http://127.0.0.1:{port}", authority_host=f"http://127.0.0.1:{port}", account_name="a", client_id="i", client_secret="s", tenant_id="t", **ONCE),
    "gs": lambda port: GCSStore("bucket", prefix="run", config={"base_url": f"http://127.0.0.1:{port}"}, credential_provider=lambda: {"token": "t", "expires_at": datetime.now(UTC) + timedelta(hours=1)}, **ONCE),
}  # fmt: skip
USUAL = ("xml", "json", "json of a text", "html", "words of a client")
READS = {
    "get": lambda store: obstore.get(store, "k").bytes(),
    "range": lambda store: obstore.get(store, "k", options={"range": (0, 3)}).bytes(),
    "head": lambda store: obstore.head(store, "k"),
    "list": lambda store: list(obstore.list(store)),
    "names": lambda store: obstore.list_with_delimiter(store, "step"),
}
WRITES = {
    "put": lambda store: obstore.put(store, "k", b"1", use_multipart=False),
    "create": lambda store: obstore.put(store, "k", b"1", mode="create", use_multipart=False),
    "replace": lambda store: obstore.put(store, "k", b"1", mode={"e_tag": "a", "version": "1"}, use_multipart=False),
    "parts": lambda store: obstore.put(store, "k", [b"1" * 9, b"2"], use_multipart=True, chunk_size=9),
    "delete": lambda store: obstore.delete(store, ["k"]),
}


@pytest.mark.parametrize(
    ("scheme", "body"),
    [
        pytest.param(scheme, body, marks=[] if scheme == "s3" or body in USUAL else [pytest.mark.long])
        for scheme in STORES
        for body in BODIES
    ],
)
def test_no_error_shows_what_an_answer_repeats(proxy, scheme, body):
    """C03, U05: a message had the words of a provider, and they may be a token."""
    store, errors = STORES[scheme](proxy.port), BucketErrors(obstore.exceptions, "s3://bucket/run")
    failures = []
    for status in STATUSES:
        proxy.fault = always(answer(status, body, headers=HEADERS if status >= 300 else HEADERS[1:] + KEPT_HEADERS))
        failures += [failure_of(errors.reading, partial(call, store)) for call in READS.values()]
        failures += [failure_of(errors.writing, partial(call, store)) for call in WRITES.values()]
    texts = [said_by(error) for error in failures if error is not None]
    assert len(texts) > 100
    assert [text for text in texts if SECRET in text] == []


def test_no_error_shows_what_a_program_that_gives_credentials_says(proxy):
    """U05: such as what `credential_process` writes, which boto3 hands on."""

    def provider():
        raise RuntimeError(SECRET)

    store = S3Store(
        "bucket", endpoint=f"http://127.0.0.1:{proxy.port}", region="us-east-1", credential_provider=provider, **ONCE
    )
    error = failure_of(BucketErrors(obstore.exceptions, "s3://bucket/run").reading, partial(READS["get"], store))
    assert "RuntimeError" in error.found
    assert SECRET not in said_by(error)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("body", ["xml", "json", "html", "plain"])
def test_no_error_of_a_library_shows_what_an_answer_repeats(proxy, library, body, caplog):
    """U05: those of fsspec's filesystems have the provider's message as their text, and gcsfs logs it."""
    pytest.importorskip(library)
    store, calls = client_at(library, proxy.port), FsspecCalls()
    errors = BucketErrors(calls.exceptions, "s3://bucket/run")
    reads = (
        lambda: calls.get(store, "k").bytes(),
        lambda: calls.head(store, "k"),
        lambda: list(calls.list(store, None)),
        lambda: calls.list_with_delimiter(store, "step"),
    )
    writes = (
        lambda: calls.put(store, "k", b"1", use_multipart=False, mode="create"),
        lambda: calls.put(store, "k", [bytearray(9), bytearray(1)], use_multipart=True, chunk_size=9),
        lambda: calls.delete(store, ["k"]),
    )
    failures = []
    for status in (400, 401, 403, 409, 412, 500):
        proxy.fault = always(answer(status, body))
        failures += [failure_of(errors.reading, call) for call in reads]
        failures += [failure_of(errors.writing, call) for call in writes]
    texts = [said_by(error) for error in failures if error is not None]
    assert len(texts) > 30
    assert [text for text in (*texts, caplog.text) if SECRET in text] == []
