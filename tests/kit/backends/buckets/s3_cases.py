"""A real server of S3 over HTTP (moto's), and runs in it."""

import sys
import urllib.request

import pytest
from obstore.store import S3Store

from kit.backends.buckets.bucket_cases import impatient, new_name
from kit.backends.buckets.server import Server
from trainfold.backends.stores.object_store.object_store import ObjectStore

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_REGION": "us-east-1"}


@pytest.fixture
def keys(monkeypatch):
    """Credentials, and no machine that could offer others."""
    for name, value in {**KEYS, "AZURE_STORAGE_ACCOUNT_NAME": "account", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


class S3Server(Server):
    """Moto's."""

    def command(self):
        program = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        return [sys.executable, "-W", "ignore", "-c", program]

    def make_bucket(self):
        self.ask("PUT", "/bucket")

    def ask(self, method, path):
        """Send a request as an owner does."""
        owner = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(  # the loopback
            f"http://127.0.0.1:{self.port}{path}", method=method, headers={"Authorization": owner}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


def settings_at(port):
    """What the environment has where a program uses that server."""
    return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}


def store_at(port, *, run=None, retries=12, lease_secs=30.0):
    """A run in the bucket of a server, by default one of its own; its client tries again at once, and often."""
    run = new_name() if run is None else run
    return ObjectStore(s3_client(port, run, retries), url=f"s3://bucket/{run}", lease_secs=lease_secs)


def s3_client(port, run, retries=12):
    """Of a run in the bucket of a server."""
    return S3Store(
        "bucket", prefix=run, endpoint=f"http://127.0.0.1:{port}", region="us-east-1",
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"], secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        **impatient(retries),
    )  # fmt: skip
