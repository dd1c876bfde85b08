"""`Server`: a program that answers on the loopback, started by a test and waited for."""

import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from kit.free_port import free_port


class Server:
    """A server in a process of its own, with a bucket named bucket.

    A provider's own has ``command()``, which starts it on ``port``, and ``make_bucket()``, which raises `OSError` until it answers.
    """

    def __init__(self):
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        log = Path(self._folder.name, "log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(self.command(), stdout=output, stderr=output, cwd=self._folder.name)
        late = time.monotonic() + 60
        while True:
            with suppress(OSError):
                self.make_bucket()
                break
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < late, f"the server did not start: {log.read_text()}"
            time.sleep(0.05)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
