"""What an environment or a name in a URL gets wrong is said when the URL is opened, and credentials that may not delete can save."""

import re

import pytest
from kit.adapters import cli_cases
from kit.backends.buckets import s3_cases
from kit.backends.buckets.s3_cases import store_at

import trainfold
from trainfold.backends.stores.local import open_store
from trainfold.core.errors import InvalidArgument

call, answered, keys = cli_cases.call, cli_cases.answered, s3_cases.keys
STATE = trainfold.TrainState(trainer=trainfold.Progress(step=1))


def refusal(body):
    """The answer of S3 that refuses to delete each key of a request."""
    keys = re.findall(rb"<Key>.*?</Key>", body)
    errors = (b"<Error>%s<Code>AccessDenied</Code><Message>Access Denied</Message></Error>" % key for key in keys)
    return b'<?xml version="1.0"?><DeleteResult>%s</DeleteResult>' % b"".join(errors)


@pytest.mark.parametrize(
    "value", ["127.0.0.1:9000", "localhost", "http://", "", "http://host:99999", "http://host:port", "ftp://host:1"]
)
@pytest.mark.parametrize(
    ("variable", "url"), [("AWS_ENDPOINT_URL", "s3://bucket/a"), ("AZURE_STORAGE_ENDPOINT", "az://bucket/a")]
)
def test_an_endpoint_that_is_no_address_is_refused_with_its_variable(keys, answered, variable, url, value):
    """R09: it was a panic of the client, without an object for --json."""
    keys.setenv(variable, value)
    _, error = answered("ls", url, code=2)
    assert error["where"] == variable
    assert variable in error["fix"]


@pytest.mark.parametrize(
    "value",
    [
        "http://user:secret@host:99999",
        "user:secret@host:9000",
        "user:a secret@host",
        "http:user:#secret@host",
        "host?key=secret",
        'http://user:"secret@host',
        "http://user:sec\u20acsecret@host",
        "http://user:secret@host/<a>",
    ],
)
def test_an_endpoint_with_a_login_is_refused_without_it(keys, value):
    """U05: no text shows a password."""
    keys.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(InvalidArgument) as failed:
        open_store("s3://bucket/a")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    "variable",
    ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_REGION",
     "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_TOKEN"],
)  # fmt: skip
@pytest.mark.parametrize("sign", ["\n", "\r\n", "\x7f"])
def test_a_key_with_a_line_break_is_refused_with_its_variable(keys, variable, sign):
    """R09, U05: it was a panic of the client with the advice to look at the network, or a signature that does not match."""
    keys.setenv(variable, f"secret{sign}")
    with pytest.raises(InvalidArgument, match=variable) as failed:
        open_store("s3://bucket/a" if variable.startswith("AWS") else "az://bucket/a")
    assert "line break" in str(failed.value)
    assert "secret\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("variable", "url"), [("AWS_ENDPOINT_URL", "s3://bucket/a"), ("AZURE_STORAGE_ENDPOINT", "az://bucket/a")]
)
def test_an_endpoint_without_tls_says_what_allows_it(keys, variable, url):
    """R09: it was a "builder error" of the client, with the advice to look at the network."""
    allows = f"{variable.partition('_')[0]}_ALLOW_HTTP"
    keys.delenv("AWS_ALLOW_HTTP")
    keys.setenv(variable, "HTTP://user:secret@127.0.0.1:9000")
    with pytest.raises(InvalidArgument, match=f"^{variable}: .*set {allows}=true") as failed:
        open_store(url)
    assert "secret" not in str(failed.value)
    keys.setenv(allows, "Yes")
    assert open_store(url).url == url


def test_an_endpoint_of_another_service_needs_no_tls(keys):
    """That of S3 alone counts, where both are set."""
    keys.delenv("AWS_ALLOW_HTTP")
    keys.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    keys.setenv("AWS_ENDPOINT_URL_S3", "https://127.0.0.1:9001")
    assert open_store("s3://bucket/a").url == "s3://bucket/a"


def test_a_file_url_with_a_login_is_refused_without_it():
    """U05: the same holds for a URL that names no bucket."""
    with pytest.raises(InvalidArgument) as failed:
        open_store("file://user:secret@host/a")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(("name", "run"), [("x//y", "x/y"), ("./z", "z"), ("a/./b", "a/b"), ("a/", "a")])
def test_a_url_has_one_rule_for_its_parts(keys, name, run):
    """C03: the command line and the library mean the same run."""
    assert open_store(f"s3://bucket/{name}").url == f"s3://bucket/{run}"


@pytest.mark.parametrize("name", ["..", "a/../b", "tab\tx"])
def test_a_part_that_no_object_can_have_is_named(keys, name):
    """R09: the advice was about AZURE_STORAGE_ACCOUNT_NAME."""
    with pytest.raises(
        InvalidArgument, match=re.escape(repr(name.split("/")[-1 if name != "a/../b" else 1]))
    ) as failed:
        open_store(f"s3://bucket/{name}")
    assert "AZURE" not in str(failed.value)


def test_an_answer_that_ends_the_client_ends_no_training(proxy, caplog):
    """U05, E04: obstore panics at it, with an error that is not an Exception: it ended the program in the middle of a retention."""
    answer = b"<DeleteResult><Error><Key>other</Key><Code>pa55</Code><Message>pa55</Message></Error></DeleteResult>"
    proxy.fault = lambda number, method, path: (200, answer) if method == "POST" and "delete" in path else None
    store = store_at(proxy.port)
    with trainfold.CheckpointManager(store, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(trainfold.TrainState(trainer=trainfold.Progress(step=step)))
    assert "PanicException: an answer that the client cannot take" in caplog.text
    assert "pa55" not in caplog.text
    assert trainfold.load(store, like=STATE).trainer.step == 2


@pytest.mark.parametrize("status", [pytest.param(403, id="the request"), pytest.param(200, id="each key")])
def test_credentials_that_may_not_delete_can_save_and_retention_says_what_is_denied(proxy, status, caplog):
    """E04: no lock could be taken, with an error about the network."""

    def denied(number, method, path):
        return (status, refusal) if method == "POST" and "delete" in path else None

    proxy.fault = denied
    store = store_at(proxy.port)
    with trainfold.CheckpointManager(store, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(trainfold.TrainState(trainer=trainfold.Progress(step=step)))
    assert [name for name in store.list() if name.startswith("step-")] == ["step-00000001", "step-00000002"]
    assert "expected the right to write" in caplog.text
    assert "AccessDenied" in caplog.text
    assert trainfold.load(store, like=STATE).trainer.step == 2
