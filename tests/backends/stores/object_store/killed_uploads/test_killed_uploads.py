"""Uploads in parts that were killed: no list shows them, and they cost money. The next writer finds and aborts them, and no other's."""

import logging
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from kit.backends.buckets.bucket_cases import new_name
from kit.backends.buckets.s3_cases import KEYS, s3_client, store_at
from obstore.store import MemoryStore

import trainfold
from trainfold.adapters.cli.prune import Keep, prune_run
from trainfold.backends.stores.object_store import killed_uploads, open_url, writer_lease
from trainfold.backends.stores.object_store.killed_uploads import abort_killed_uploads
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.core.errors import RunLocked
from trainfold.core.state.state import Progress, TrainState

FILE = "step-00000007/model-00000-of-00001.safetensors"
SIZE = 20 << 20
PROGRAM = """
import sys, time
from obstore.store import S3Store
from trainfold.backends.stores.object_store.object_store import ObjectStore

port, run, name, key, secret = sys.argv[1:]
client = S3Store("bucket", prefix=run, endpoint=f"http://127.0.0.1:{port}", region="us-east-1", access_key_id=key, secret_access_key=secret,
                 client_options={"allow_http": True})

def parts():
    yield bytes(17 << 20)
    time.sleep(600)

store = ObjectStore(client, url="s3://bucket/" + run)
with store.lock():
    store.write(name, parts(), size_bytes=20 << 20)
"""


def uploads(s3, run):
    """The keys of the uploads below a run that have not ended, as the server has them."""
    found = ET.fromstring(s3.ask("GET", f"/bucket?uploads&prefix={run}"))
    return sorted(each.text.removeprefix(f"{run}/") for each in found.iter() if each.tag.endswith("Key"))


def begin(s3, *keys):
    """Begin uploads as other programs do."""
    for key in keys:
        s3.ask("POST", f"/bucket/{key}?uploads")


def until(condition):
    late = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.02)


@pytest.fixture
def killed(s3):
    """The name of a run whose writer was killed in the middle of an upload."""
    run = new_name()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(s3.port), run, FILE, KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]])  # fmt: skip
    until(lambda: uploads(s3, run) or process.poll() is not None)
    process.kill()
    process.wait()
    assert uploads(s3, run) == [FILE]
    return run


def test_the_next_writer_aborts_what_a_killed_one_was_sending_and_nothing_else(s3, killed):
    """C03: a process is killed by SIGKILL in the middle of an upload. Uploads of other runs, and below other names, stay: such as that of a program which puts a file of its own beside a checkpoint."""
    others = [
        f"{killed}{name}"
        for name in (
            f"/inner/{FILE}",
            "/logs.tar",
            f"/{FILE}/a",
            "/step-7/a",
            f"b/{FILE}",
            "/step-00000007/samples.tar",
        )
    ]
    begin(s3, *others)
    with store_at(s3.port, run=killed).lock():
        assert uploads(s3, killed) == sorted(each.removeprefix(f"{killed}/") for each in others)


def test_while_a_writer_lives_its_upload_is_let_alone(s3, monkeypatch):
    """Another program, also `trainfold prune`, is refused before it looks; the upload ends as if nothing had been."""
    run = new_name()
    writer, other = (store_at(s3.port, run=run) for _ in range(2))
    monkeypatch.setattr(open_url, "open_url", lambda place: other)
    trainfold.save(TrainState(trainer=Progress(step=1)), writer)
    go_on = threading.Event()

    def parts():
        yield bytes(17 << 20)
        assert go_on.wait(60)
        yield bytes(SIZE - (17 << 20))

    with writer.lock():
        sending = threading.Thread(target=lambda: writer.write(FILE, parts(), size_bytes=SIZE))
        sending.start()
        until(lambda: uploads(s3, run))
        with pytest.raises(RunLocked), other.lock():
            pass
        with pytest.raises(RunLocked):
            prune_run(Path(f"s3://bucket/{run}"), Keep(last=5), dry_run=False)
        assert uploads(s3, run) == [FILE]
        go_on.set()
        sending.join()
    assert writer.size(FILE) == SIZE


def test_a_writer_that_slept_through_its_lease_cannot_end_an_upload_that_the_next_one_has_aborted(s3, monkeypatch):
    """It is refused as one that has lost the lock, in the middle of its upload, and there is no object."""
    run = new_name()
    writer, other = (store_at(s3.port, run=run) for _ in range(2))
    wakes, failures = threading.Event(), []

    def parts():
        yield bytes(17 << 20)
        assert wakes.wait(60)
        writer._lease._until = 0.0
        yield bytes(SIZE - (17 << 20))

    def send():
        try:
            writer.write(FILE, parts(), size_bytes=SIZE)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    monkeypatch.setattr(writer_lease.WriterLease, "_is_over", lambda *args: True)
    with writer.lock():
        sending = threading.Thread(target=send)
        sending.start()
        until(lambda: uploads(s3, run))
        with other.lock():
            assert uploads(s3, run) == []
            wakes.set()
            sending.join()
    assert [type(failure) for failure in failures] == [RunLocked]
    assert other.size(FILE) is None


def test_after_a_writer_that_has_given_the_lock_back_nobody_looks(s3, monkeypatch):
    """A save costs no request more. What it leaves, as where one of several ranks was killed, `trainfold prune` finds."""
    run = new_name()
    store = store_at(s3.port, run=run)
    trainfold.save(TrainState(trainer=Progress(step=1)), store)
    begin(s3, f"{run}/{FILE}")
    with monkeypatch.context() as patch:
        patch.setattr(killed_uploads, "_client", lambda store: pytest.fail("it asks"))
        trainfold.save(TrainState(trainer=Progress(step=2)), store)
    monkeypatch.setattr(open_url, "open_url", lambda place: store)
    dry = prune_run(Path(f"s3://bucket/{run}"), Keep(last=5), dry_run=True)
    assert (dry.data["aborted_uploads"], uploads(s3, run)) == (0, [FILE])
    done = prune_run(Path(f"s3://bucket/{run}"), Keep(last=5), dry_run=False)
    assert (done.data["aborted_uploads"], uploads(s3, run)) == (1, [])
    assert ("uploads", "gone", "", "1 that was killed") in done.tables[0].rows


@pytest.mark.parametrize(
    ("broken", "words"),
    [("boto3", "pip install boto3"), ("rights", "s3:ListBucketMultipartUploads"), ("server", "look at the network")],
)
def test_if_it_cannot_look_it_warns_once_and_the_save_goes_on(s3, monkeypatch, caplog, broken, words):
    """The warning names what lacks, and no credentials."""
    run = new_name()
    client = s3_client(s3.port, run)
    if broken == "boto3":
        monkeypatch.setitem(sys.modules, "boto3", None)
    elif broken == "rights":
        denied = RuntimeError("An error occurred (AccessDenied) when calling the ListMultipartUploads operation")
        monkeypatch.setattr(killed_uploads, "_uploads", lambda *args: (_ for _ in ()).throw(denied))
    else:
        client = s3_client(1, run)
        monkeypatch.setattr(killed_uploads, "_TRIES", 1)
    with caplog.at_level(logging.WARNING, "trainfold"):
        assert abort_killed_uploads(client, f"s3://bucket/{run}") == 0
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "AbortIncompleteMultipartUpload" in record.getMessage()
    assert not any(secret in caplog.text for secret in (KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]))


def test_credentials_and_places_are_those_of_the_store(monkeypatch):
    """Those that it was given, those of its provider, and else those of the provider's chain; the same server and region."""
    asked = []

    class Session:
        def client(self, name, **settings):
            asked.append(settings)

    boto3 = pytest.importorskip("boto3")
    monkeypatch.setattr(boto3.session, "Session", Session)
    from obstore.store import S3Store

    for name, value in {"AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    given = S3Store(
        "bucket", access_key_id="a", secret_access_key="b", token="c", endpoint="http://10.0.0.2", region="x"
    )
    provided = S3Store("bucket", credential_provider=lambda: {"access_key_id": "d", "secret_access_key": "e", "token": None, "expires_at": None})  # fmt: skip
    for store in (given, provided, S3Store("bucket")):
        killed_uploads._client(store)
    keys = [tuple(each[f"aws_{name}"] for name in ("access_key_id", "secret_access_key", "session_token")) for each in asked]  # fmt: skip
    assert keys == [("a", "b", "c"), ("d", "e", None), (None, None, None)]
    assert [(each["endpoint_url"], each["region_name"]) for each in asked] == [
        ("http://10.0.0.2", "x"),
        ("http://10.0.0.1", "eu-west-1"),
        ("http://10.0.0.1", "eu-west-1"),
    ]


def test_of_very_many_uploads_all_are_found():
    """A list shows a thousand at a time."""
    keys = [f"runs/a/step-00000001/model-{number:05d}-of-00005.safetensors" for number in range(5)]

    def call(name, *, Bucket, Prefix, KeyMarker="", UploadIdMarker=""):
        assert (name, Bucket, Prefix, UploadIdMarker) == ("list_multipart_uploads", "bucket", "runs/a/step-", KeyMarker)
        rest = [key for key in keys if key > KeyMarker]
        page = {"IsTruncated": len(rest) > 2, "Uploads": [{"Key": key, "UploadId": key} for key in rest[:2]]}
        return page | ({"NextKeyMarker": rest[1], "NextUploadIdMarker": rest[1]} if len(rest) > 2 else {})

    assert [each["Key"] for each in killed_uploads._uploads(call, "bucket", "runs/a/")] == keys


@pytest.mark.parametrize("why", ["NoSuchUpload", "AccessDenied"])
def test_an_upload_that_cannot_be_aborted_keeps_no_other(monkeypatch, caplog, why):
    """One that has ended meanwhile ended the loop: 1 of 5 was aborted. What stays is in a warning."""
    done = []

    def call(name, **what):
        if name == "list_multipart_uploads":
            return {"Uploads": [{"Key": f"r/{FILE}", "UploadId": str(number)} for number in range(5)]}
        if what["UploadId"] == "1":
            error = RuntimeError(why)
            error.response = {"Error": {"Code": why}}  # as botocore has it
            raise error
        done.append(what["UploadId"])
        return {}

    monkeypatch.setattr(killed_uploads, "_is_s3", lambda store: True)
    monkeypatch.setattr(killed_uploads, "_s3_of", lambda store: (call, "b", "r"))
    assert abort_killed_uploads(object(), "s3://b/r") == 4
    assert done == ["0", "2", "3", "4"]
    assert ("AccessDenied" in caplog.text) == bool(caplog.records) == (why == "AccessDenied")


def test_a_filesystem_of_s3_is_asked_by_itself():
    """S3fs has its own client and credentials."""

    class Files:
        def __init__(self):
            self.asked = []

        def split_path(self, path):
            return (*path.split("/", 1), None)

        def call_s3(self, name, **what):
            self.asked.append((name, what))
            return {"Uploads": [{"Key": f"runs/a/{FILE}", "UploadId": "1"}]}

    store = object.__new__(FsspecPrefix)
    store.filesystem, store.path = Files(), "bucket/runs/a"
    assert abort_killed_uploads(store, "s3://bucket/runs/a") == 1
    assert store.filesystem.asked == [
        ("list_multipart_uploads", {"Bucket": "bucket", "Prefix": "runs/a/step-"}),
        ("abort_multipart_upload", {"Bucket": "bucket", "Key": f"runs/a/{FILE}", "UploadId": "1"}),
    ]


def test_stores_without_such_uploads_are_not_asked():
    """Azure removes what was not committed by itself."""
    assert abort_killed_uploads(MemoryStore(), "memory://run") == 0
    assert ObjectStore(MemoryStore(), url="memory://run").abort_uploads() == 0
