"""A real S3 server over HTTP, and a proxy before it that fails as networks do."""

import asyncio
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import obstore
from obstore.store import S3Store

from trainfold.backends.stores.object_store.object_store import ObjectStore

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_REGION": "us-east-1"}
FAULTS = ("cut", "lost", "500", "503", "429", "done 500", "delay", "truncate", "repeat")
_RUNS = itertools.count()


def one_in_four(seed):
    """What `Proxy.fault` is for a network in which one request in four fails, and the list of the faults so far."""
    chance, seen = random.Random(seed), []

    def fault(number, method, path):
        if chance.random() < 0.25:
            seen.append(chance.choice(FAULTS))
            return seen[-1]
        return None

    return fault, seen


def check_racing_writers(buckets):
    """Check the two promises of a commit, with a thread for each bucket: one of them creates, and no replacement is lost."""
    begin = threading.Barrier(len(buckets))

    def write(bucket):
        begin.wait()
        created = bucket.put_if("a", b"0", None) is not None
        done = 0
        while done < 5:
            found = bucket.get("a")
            done += bucket.put_if("a", b"%d" % (int(found.data) + 1), found.version) is not None
        return created

    with ThreadPoolExecutor(len(buckets)) as pool:
        assert sum(pool.map(write, buckets)) == 1
    assert buckets[0].get("a").data == b"%d" % (5 * len(buckets))


class S3Server:
    """Moto's server in a process of its own, with one bucket."""

    def __init__(self):
        self.port = _free_port()
        program = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        late = time.monotonic() + 60
        while True:
            with suppress(OSError):
                self.ask("GET", "/moto-api/")
                break
            assert time.monotonic() < late, "the server did not start"
            assert self._process.poll() is None, "the server has ended"
            time.sleep(0.02)
        self.ask("PUT", "/bucket")

    def ask(self, method, path):
        """Send a request as an owner does."""
        owner = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(  # the loopback
            f"http://127.0.0.1:{self.port}{path}", method=method, headers={"Authorization": owner}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    def close(self):
        self._process.kill()
        self._process.wait()


class Proxy:
    """Passes requests on to a server, one after the other on each connection, and fails where ``fault`` says.

    Args:
        port: of the server.

    Attributes:
        fault: (number of the request, method, path) -> one of `FAULTS`, or None.
        dropped: names of headers, in lower case, that the server does not get: it is one that does not know them.
        requests: (method, path, bytes of the request, bytes of the answer, fault) of those so far.
    """

    def __init__(self, port):
        self._server_port = port
        self.fault = lambda number, method, path: None
        self.dropped = frozenset()
        self.requests = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self):
        async def end():
            self._listener.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader, writer):
        with suppress(OSError, EOFError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if _field(head, b"expect"):  # the body comes after a word of the server
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(_field(head, b"content-length") or 0))
        method, path = head.split(b" ", 2)[:2]
        lines = head.split(b"\r\n")
        head = b"\r\n".join(line for line in lines if line.partition(b":")[0].lower() not in self.dropped | {b"expect"})
        method, path = method.decode(), path.decode()
        fault = self.fault(len(self.requests), method, path)
        entry = [method, path, len(body), 0, fault]
        self.requests.append(entry)
        if fault == "cut":
            return False
        if fault in {"500", "503", "429"}:
            writer.write(b"HTTP/1.1 %s Fault\r\nContent-Length: 0\r\n\r\n" % fault.encode())
            await writer.drain()
            return True
        if fault == "delay":
            await asyncio.sleep(0.01)
        if fault == "repeat":
            await self._passed_on(head + body, method)
        answer_head, answer = await self._passed_on(head + body, method)
        entry[3] = len(answer)
        if fault == "lost":
            return False
        if fault == "done 500":
            answer_head, answer = b"HTTP/1.1 500 Fault\r\nContent-Length: 0\r\n\r\n", b""
        is_cut = fault == "truncate" and len(answer) > 1
        writer.write(answer_head + (answer[: len(answer) // 2] if is_cut else answer))
        await writer.drain()
        return not is_cut

    async def _passed_on(self, request, method):
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = _field(head, b"content-length")
            if method == "HEAD" or head.split(b" ", 2)[1] in {b"204", b"304"}:
                return head, b""
            if length is None:
                return await _united(head, reader)
            return head, await reader.readexactly(int(length))
        finally:
            writer.close()


async def _united(head, reader):
    """An answer that comes in pieces, as one."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"transfer-encoding")]
    return b"\r\n".join([lines[0], b"Content-Length: %d" % len(body), *lines[1:]]), body


class Counting:
    """The calls of obstore, which appends (verb, key, range) of each to a list."""

    def __init__(self, calls):
        self.calls, self.exceptions = calls, obstore.exceptions

    def __getattr__(self, verb):
        def call(store, *args, **kwargs):
            found = getattr(obstore, verb)(store, *args, **kwargs)
            options = kwargs.get("options") or {}
            self.calls.append((verb, args[0] if args else None, options.get("range")))
            return found

        return call


def counted(client):
    """A run in a store of obstore, and the list of the requests that it makes."""
    store, calls = ObjectStore(client, url="memory://run"), []
    store._bucket._api = Counting(calls)
    return store, calls


def store_at(port, *, run=None, retries=12, lease_secs=30.0):
    """A run in the bucket of a server, by default one of its own; its client tries again at once, and often."""
    run = new_name() if run is None else run
    return ObjectStore(s3_client(port, run, retries), url=f"s3://bucket/{run}", lease_secs=lease_secs)


def new_name():
    """The name of a run of its own."""
    return f"runs/{next(_RUNS)}-{time.time_ns()}"


def s3_client(port, run, retries=12):
    """Of a run in the bucket of a server."""
    quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=4), "base": 2}
    return S3Store(
        "bucket", prefix=run, endpoint=f"http://127.0.0.1:{port}", region="us-east-1",
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"], secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=60), "backoff": quick},
    )  # fmt: skip


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _field(head, name):
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None
