"""`Proxy`: a network between a client and a server, which fails as networks do."""

import asyncio
import random
import threading
from contextlib import suppress

FAULTS = ("cut", "lost", "500", "503", "429", "done 500", "delay", "truncate", "repeat")


def one_in_four(seed):
    """What `Proxy.fault` is for a network in which one request in four fails, and the list of the faults so far."""
    chance, seen = random.Random(seed), []

    def fault(number, method, path):
        if chance.random() < 0.25:
            seen.append(chance.choice(FAULTS))
            return seen[-1]
        return None

    return fault, seen


class Proxy:
    """Passes requests on to a server, one after the other on each connection, and fails where ``fault`` says.

    Args:
        port: of the server.

    Attributes:
        fault: (number of the request, method, path) -> one of `FAULTS`, None, a whole answer as bytes, or its (status, body); the body may be made of that of the request.
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
        if isinstance(fault, bytes):
            writer.write(fault.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == "HEAD" else fault)
            await writer.drain()
            return True
        if isinstance(fault, tuple):
            status, text = fault
            text = b"" if method == "HEAD" else text(body) if callable(text) else text
            writer.write(
                b"HTTP/1.1 %d Fault\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
                % (status, len(text))
                + text
            )
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


def _field(head, name):
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None
