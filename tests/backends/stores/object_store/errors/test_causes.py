"""Why a store cannot be used is said with what to do about it, whatever the provider: no bucket, no machine of that name, no connection, a certificate, a proxy."""

import socket
from datetime import UTC, datetime, timedelta

import obstore
import pytest
from kit.backends.buckets.planted import always
from obstore.store import AzureStore, GCSStore, S3Store

from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.object_store.errors.bucket_errors import BucketErrors
from trainfold.backends.stores.object_store.over_fsspec import exceptions
from trainfold.core.errors import CheckpointError, CheckpointUnreadable

SECRET = "pa55"
TEXT = """Generic S3 error: Error performing GET https://h:1/bucket/run/k in 1ms - HTTP error: error sending request

Debug source:
Generic {{ uri: Some(https://h:1/bucket/kind: ConnectionRefused), inner: Http( HttpError {{ kind: Connect, source: reqwest::Error {{ source: {} }} }} ) }}"""


def store_of(scheme, where, **options):
    """A store of obstore at an address, which tries once."""
    once = {"client_options": {"allow_http": True, "timeout": timedelta(seconds=5), **options}, "retry_config": {"max_retries": 0}}  # fmt: skip
    if scheme == "s3":
        return S3Store(
            "bucket", prefix="run", endpoint=where, region="us-east-1", access_key_id="a", secret_access_key="b", **once
        )
    if scheme == "az":
        return AzureStore("bucket", prefix="run", endpoint=where, account_name="a", account_key="aGVsbG8=", **once)
    token = {"token": "t", "expires_at": datetime.now(UTC) + timedelta(hours=1)}
    return GCSStore("bucket", prefix="run", config={"base_url": where}, credential_provider=lambda: token, **once)


def failure(store, call=Bucket.names):
    with pytest.raises(CheckpointUnreadable) as failed:
        call(Bucket(store, "s3://bucket/run"), "step-00000001")
    assert SECRET not in str(failed.value)
    return failed.value


@pytest.mark.parametrize(
    ("scheme", "body"),
    [
        ("s3", b"<Error><Code>NoSuchBucket</Code></Error>"),
        ("az", b"<Error><Code>ContainerNotFound</Code></Error>"),
        ("gs", b'{"error": {"code": 404, "message": "pa55"}}'),
        ("gs", b"Not Found"),
    ],
)
@pytest.mark.parametrize("call", [Bucket.names, Bucket.below], ids=["names", "below"])
def test_a_bucket_that_is_not_there_is_named_by_each_provider(proxy, scheme, body, call):
    """C03: with Google and Azure the advice was to look at the network."""
    proxy.fault = always((404, body))
    found = failure(store_of(scheme, f"http://127.0.0.1:{proxy.port}"), call)
    assert found.expected == "a bucket"
    assert found.fix.startswith("create it, or correct its name")


@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
def test_a_refused_connection_and_a_proxy_that_asks_for_a_login_are_named(proxy, scheme):
    """R09: each was "error sending request"."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert failure(store_of(scheme, f"http://127.0.0.1:{port}")).found.endswith(": connection refused")
    proxy.fault = always((407, b"pa55"))
    way = f"http://127.0.0.1:{proxy.port}"
    for where in ("https://store.example", "http://store.example"):  # through a tunnel, and without one
        found = failure(store_of(scheme, where, proxy_url=way))
        assert (found.expected, "407" in found.found) == ("a proxy that passes requests on", True)
        assert "HTTPS_PROXY" in found.fix


@pytest.mark.parametrize("sign", "'\"`<>()[]{}|^?#&=:@/%")
def test_no_sign_in_a_password_of_an_endpoint_shows_the_rest_of_it(sign):
    """U05: a password was cut up to a quotation mark in it, and shown from there on."""
    where = f"http://user:{sign}{SECRET}{sign}{SECRET}@host:1/bucket"
    asked = f"Generic S3 error: Error performing GET {where}?x=1 in 1ms - HTTP error: error sending request\n\nDebug source:\n{where}"
    known = type("EndpointConnectionError", (Exception,), {})(f'Could not connect to the endpoint URL: "{where}"')
    for error in (OSError(asked), known):
        assert SECRET not in str(BucketErrors(obstore.exceptions, "s3://bucket/run").unreadable("k", error))


def test_a_client_shows_no_password_with_a_quotation_mark(proxy):
    """U05: the same with the client itself, which sends such a password as it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "connection refused" in failure(store_of("s3", f"http://user:x'{SECRET}@127.0.0.1:{port}")).found


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("403 Forbidden: <Code>AuthenticationFailed</Code>", "renew or correct these credentials; or set this machine's clock"),
        ('400 Bad Request: {"error":"invalid_grant"}', "renew or correct these credentials; or set this machine's clock"),
        ("403 Forbidden: <Code>AccountIsDisabled</Code>", "look at the account at its provider"),
        ("403 Forbidden: <Code>AccessDenied</Code>", "give these credentials the right"),
        ("400 Bad Request: <Code>InvalidBucketName</Code>", "correct the name of the bucket"),
        ("400 Bad Request: <Code>InvalidResourceName</Code>", "correct the name of the bucket"),
    ],
)  # fmt: skip
def test_a_code_has_the_advice_of_each_of_its_causes(said, fix):
    """R09: Azure and Google have one code for a wrong key and a wrong clock, and a closed account was a missing right."""
    text = f"Generic S3 error: Error performing GET http://h/a in 1ms - Server returned non-2xx status code: {said}\n\nDebug source:"
    assert BucketErrors(obstore.exceptions, "az://bucket/run").unreadable("k", OSError(text)).fix.startswith(fix)


@pytest.mark.parametrize("doing", ["reading", "writing"])
def test_a_proxy_that_botocore_cannot_reach_is_named(doing):
    """R09: through s3fs, the advice was to look at the store."""
    raised = exceptions.GenericError("ProxyConnectionError: pa55")
    raised.__cause__ = type("ProxyConnectionError", (Exception,), {})("http://user:pa55@proxy")
    errors = BucketErrors(exceptions, "s3://bucket/run")
    with pytest.raises(CheckpointError) as failed, getattr(errors, doing)("k"):
        raise raised
    assert "HTTPS_PROXY" in failed.value.fix
    assert SECRET not in str(failed.value)
    assert not errors.is_final(raised)  # it may be back soon


@pytest.mark.parametrize(
    ("detail", "found", "fix"),
    [
        ('ConnectError("dns error", Custom { kind: Uncategorized, error: "pa55" })', "(DNS)", "network"),
        ("Custom { error: InvalidCertificate( UnknownIssuer, pa55 ) }", "(TLS)", "trust the authority"),
        ("hyper_util::client::legacy::Error( Connect, TimedOut, )", "no answer in time", "network"),
        ("Os { code: 101, kind: NetworkUnreachable, }", "no way to that machine", "network"),
        ("pa55", "error sending request", "network"),
    ],
)
def test_what_kept_a_request_from_its_answer_is_said_in_words_of_this_library(detail, found, fix):
    """R09, U05: the client says it in its detail alone, of which nothing is shown."""
    error = BucketErrors(obstore.exceptions, "s3://bucket/run").unreadable("k", OSError(TEXT.format(detail)))
    assert error.found.endswith(found)
    assert fix in error.fix
    assert SECRET not in str(error)
