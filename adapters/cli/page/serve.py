"""`trainfold page RUN --serve`: follows a run in a browser of this machine, over server-sent events."""

import secrets
import sys
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, final

from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.cli.page.live_page import POLICY, SCRIPT, LivePage
from trainfold.adapters.cli.terminal.output import Answer, UsageError
from trainfold.backends.stores.place import is_object_url
from trainfold.core.errors import TrainfoldError

LOOPBACK: Final = "127.0.0.1"
_NAMES: Final = (LOOPBACK, "localhost")
_SLOW_SECS: Final = 15.0  # between two looks at a bucket


def serve_page(run: Path, port: int) -> Answer:
    """Serve the page until Ctrl-C.

    Args:
        run: the run.
        port: on the loopback; 0 for a free one.

    Raises:
        CheckpointError: the matching subclass, if it is not a run.
        UsageError: if the port is taken.
    """
    live = LivePage(PageReader(run), every_secs=_SLOW_SECS if is_object_url(str(run)) else 1.0)
    try:
        server = PageServer(live, port)
    except OSError as error:
        raise UsageError("trainfold page --serve --port", expected="a free port of this machine", found=f"{port}: {error}",
                         fix="name another one, or leave --port out for any free one") from error  # fmt: skip
    with server:
        try:
            print(f"{server.url}  (this machine only; Ctrl-C ends it)", file=sys.stderr, flush=True)
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
        finally:
            live.ends.set()
    return Answer({"run": str(run), "url": server.url})


@final
class PageServer(ThreadingHTTPServer):
    """A server on the loopback of the page, its script and its events, below an address that cannot be guessed: other users of the machine reach the port.

    Args:
        live: the page.
        port: 0 for a free one.

    Attributes:
        url: where the page is.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, live: LivePage, port: int) -> None:
        token = secrets.token_urlsafe(16)
        super().__init__((LOOPBACK, port), partial(_Handler, live, token))
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}/{token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that fails: its client has gone."""


@final
class _Handler(BaseHTTPRequestHandler):
    """Answers three addresses; any other is not found, and no file of a directory is ever sent."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "trainfold", ""
    timeout = 30.0  # of a client that connects and asks for nothing

    def __init__(self, live: LivePage, token: str, *about: Any) -> None:
        self._live = live
        self._token = token
        super().__init__(*about)

    def do_GET(self) -> None:
        """Answer a request."""
        self.close_connection = True
        if not self._names_this_machine():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "This server answers for 127.0.0.1 alone.\n")
            return
        parts = self.path.split("?", 1)[0].split("/")
        if len(parts) != 3 or not secrets.compare_digest(parts[1].encode("utf-8", "replace"), self._token.encode()):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here: use the address that was printed.\n")
        elif parts[2] == "":
            self._page()
        elif parts[2] == "live.js":
            self._send(HTTPStatus.OK, "text/javascript", SCRIPT)
        elif parts[2] == "events":
            self._events()
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here.\n")

    def log_message(self, *_: Any) -> None:
        """Write no line for a request."""

    def _names_this_machine(self) -> bool:
        """Whether the browser asked this machine by its own name, and not by one of a page elsewhere that leads here."""
        port = self.connection.getsockname()[1]
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0] in {f"{name}:{port}" for name in _NAMES}

    def _page(self) -> None:
        try:
            page = self._live.whole()
        except (TrainfoldError, OSError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
            return
        self._send(HTTPStatus.OK, "text/html", page)

    def _events(self) -> None:
        """Send what changes until the client or the server ends. An empty line each time shows that the client has gone."""
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        self.wfile.write(b"retry: 2000\n\n")
        for message in self._live.changes():
            self.wfile.write(f"data: {message}\n\n".encode("utf-8", "backslashreplace") if message else b":\n\n")
            self.wfile.flush()

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self._begin(status, kind, len(data))
        self.wfile.write(data)

    def _begin(self, status: HTTPStatus, kind: str, size_bytes: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if size_bytes is not None:
            self.send_header("Content-Length", str(size_bytes))
        for name, value in (("Cache-Control", "no-store"), ("Connection", "close"), ("Content-Security-Policy", POLICY + "; frame-ancestors 'none'"),
                            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"), ("Cross-Origin-Resource-Policy", "same-origin")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
