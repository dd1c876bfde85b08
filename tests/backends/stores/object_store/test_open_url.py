"""URLs of buckets: opened where a run is named, refused with a reason, and never with what is secret."""

import os
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kit.backends.buckets import s3_cases
from kit.backends.buckets.s3_cases import KEYS, store_at

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.stores.local import open_store
from trainfold.backends.stores.object_store import killed_uploads
from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.place import local_path
from trainfold.core.errors import CheckpointUnreadable, InvalidArgument, SaveFailed, TrainfoldError

STATE = trainfold.TrainState(trainer=trainfold.Progress(step=3))
keys = s3_cases.keys


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("s3:/bucket/runs/a", "s3://bucket/runs/a"),
        ("S3A://bucket/a/", "s3a://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        ("abfss://container/a", "abfss://container/a"),
    ],
)
def test_the_url_of_a_bucket_opens_an_object_store(given, url, keys):
    """C03, W22: as text, and as a path, of which pathlib has removed a slash."""
    for place in (given, Path(given)):
        store = open_store(place)
        assert isinstance(store, ObjectStore)
        assert store.url == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket", "a prefix in the bucket"),
        ("s3://bucket/", "a prefix in the bucket"),
        ("s3://AKIA:hunter2@bucket/a", "a name, a password or a query"),
        ("az://container/a?sig=hunter2", "a name, a password or a query"),
        ("s3://bucket/a#hunter2", "a name, a password or a query"),
    ],
)
def test_a_url_that_names_no_run_is_refused_and_its_secrets_are_not_shown(url, reason, keys):
    with pytest.raises(InvalidArgument) as refused:
        open_store(url)
    assert reason in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "AKIA" not in str(refused.value)


def test_without_obstore_the_extra_is_named(monkeypatch):
    """C11: it is optional."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidArgument, match=r"trainfold\[objectstore\]"):
        open_store("s3://bucket/run")


def test_without_an_account_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidArgument, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/run")


def test_errors_never_show_credentials(s3, keys):
    """No key, no signature and no query is in an error's text, its causes' text as the log shows it, or a repr."""
    keys.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    for url in ("s3://no-such-bucket/run",):
        with pytest.raises(TrainfoldError) as failed:
            trainfold.save(STATE, url)
        assert url in str(failed.value)
        for text in (str(failed.value), repr(failed.value), repr(open_store(url))):
            assert not any(secret in text for secret in (*KEYS.values(), "Signature", "Credential"))
    text = without_secrets(
        OSError(
            "Generic S3 error: Error performing GET http://a:hunter2@h/c/b?sv=2023&sig=hunter2%3D in 2ms, after 1 retries, max_retries: 1, retry_timeout: 60s  - HTTP error: error sending request\n\nDebug source:\nhunter2"
        )
    )
    assert text == "GET http://…@h/c/b?…, after 1 retries: HTTP error: error sending request"


def test_the_login_of_an_endpoint_is_never_shown(monkeypatch, caplog):
    """A name and a password in AWS_ENDPOINT_URL were in errors, warnings, the journal and the page; and a traceback shows the causes too."""
    from obstore.store import S3Store

    monkeypatch.setattr(killed_uploads, "_TRIES", 1)
    place = "user:sekr@t@127.0.0.1:1"
    client = S3Store(
        "bucket", prefix="run", endpoint=f"http://{place}", access_key_id="a", secret_access_key="b", region="us-east-1",
        client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    store = ObjectStore(client, url="s3://bucket/run")
    calls = (lambda: store.read("run.json"), lambda: store.write("run.json", [b"1"], size_bytes=1), lambda: local_path(f"ftp://{place}/x?{place}"), lambda: open_store(f"simplecache::s3://{place}/x#{place}"))  # fmt: skip
    for call in calls:
        with pytest.raises(TrainfoldError) as failed:
            call()
        shown = "".join(traceback.format_exception(failed.value))
        assert "sekr" not in shown
        assert "127.0.0.1" in str(failed.value)
    store.abort_uploads()
    assert "was not looked for" in caplog.text
    assert "sekr" not in caplog.text


@pytest.mark.parametrize(
    "value", ["https://user:sekrt%40host:9000", "https://[::1:sekrt", "user:sekrt", "https://sekrt host", "1.2.3.4:9000", "htt://h"]
)  # fmt: skip
def test_of_an_endpoint_that_is_no_address_nothing_is_shown_that_may_be_a_password(keys, value):
    """C03: of a login without its @ the password was in the error."""
    keys.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(InvalidArgument, match="AWS_ENDPOINT_URL") as failed:
        open_store("s3://bucket/run")
    assert "sekrt" not in str(failed.value)
    assert ("not shown" in str(failed.value)) == (value != "1.2.3.4:9000")


def test_a_bucket_that_is_not_there_is_said_to_be(s3, keys):
    keys.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    store = open_store("s3://no-such-bucket/run")
    with pytest.raises(SaveFailed, match="create it, or correct its name"):
        store.commit("run.json", b"{}")
    with pytest.raises(CheckpointUnreadable, match="create it, or correct its name"):  # and not an empty run
        store.list()


def test_commands_read_a_run_in_a_bucket(s3, keys, capsys, tmp_path):
    """C03: the same words as for a directory."""
    keys.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    url = store_at(s3.port).url
    trainfold.save(STATE, url)
    assert trainfold.load(url, like=STATE).trainer.step == 3
    for command in (
        ["ls", url],
        ["page", url, "-o", str(tmp_path / "run.html")],
        ["verify", url],
        ["inspect", url],
        ["inspect", f"{url}/step-00000003"],
    ):
        assert main(command) == 0
        assert url in capsys.readouterr().out
    assert main(["ls", f"{url}-not"]) != 0
    assert "nothing" in capsys.readouterr().err


class Machine:
    """The service of a machine in a cloud that asks for credentials; it has none to give."""

    def __init__(self):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                asked.append(self.path)
                self.send_response(200 if self.path == "/latest/api/token" else 404)
                self.send_header("content-length", "5")
                self.end_headers()
                self.wfile.write(b"token")

            do_PUT = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without credentials, and an environment without."""
    one = Machine()
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCE_"))]:
        monkeypatch.delenv(name)
    places = {
        "AWS_METADATA_ENDPOINT": f"http://{one.place}",
        "AZURE_MSI_ENDPOINT": f"http://{one.place}/metadata/identity/oauth2/token",
        "GCE_METADATA_HOST": one.place,
        "GCE_METADATA_IP": one.place,
    }
    for name, value in {
        **places, "AZURE_STORAGE_ACCOUNT_NAME": "account", "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1", "HOME": str(tmp_path)
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("url", "tried", "fix"),
    [
        ("s3://bucket/run", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
        ("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS", "gcloud auth application-default login"),
        ("az://container/run", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_USE_AZURE_CLI=true"),
    ],
)
def test_a_bucket_without_credentials_names_what_was_tried_and_what_to_set(url, tried, fix, machine):
    """C03: the error was about an address of the machine, 169.254.169.254, after each request was made six times; the last place that was asked is still named."""
    store = open_store(url)
    asked = []
    for call, kind in (
        (store.list, CheckpointUnreadable),
        (lambda: store.read("run.json"), CheckpointUnreadable),
        (lambda: store.write("step-00000001/a", [b"1"], size_bytes=1), SaveFailed),
        (lambda: store.commit("run.json", b"{}"), SaveFailed),
    ):
        machine.asked.clear()
        with pytest.raises(kind) as failed:
            call()
        asked.append(len(machine.asked))
        assert failed.value.expected == "credentials"
        assert tried in failed.value.found
        assert machine.place in failed.value.found
        assert "?" not in failed.value.found.replace("?…", "")
        assert fix in failed.value.fix
    assert max(asked) <= 4  # a token, and the credentials; and a list looks at the lease too


def test_a_profile_that_is_not_there_is_named(machine, monkeypatch):
    """C03: it was an error of boto3, without a next move."""
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(InvalidArgument, match=r"nowhere.*AWS_PROFILE"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("keys", [True, False], ids=["credentials", "only a region"])
def test_a_default_profile_in_the_config_file_alone_is_read(machine, monkeypatch, tmp_path, keys):
    """C03: that is where logins by SSO, processes and roles are; no profile was found."""
    pytest.importorskip("boto3")
    config = tmp_path / "config"
    said = "aws_access_key_id = AKIAEXAMPLE\naws_secret_access_key = hunter2\n" if keys else ""
    config.write_text(f"[default]\nregion = eu-west-1\n{said}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{machine.place}")
    with pytest.raises(CheckpointUnreadable) as failed:
        open_store("s3://bucket/run").list()
    assert (failed.value.expected == "credentials") is not keys
    assert any("latest/" in path for path in machine.asked) is not keys
