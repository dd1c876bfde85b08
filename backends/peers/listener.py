"""`Listener`: accepts programs that know a token, and talks with each in a thread of its own."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, Final, final

from trainfold.backends.peers.channel import Channel, check_token, introduced

_IDLE_SECS: Final = 60  # of silence, after which the machine of a client is asked whether it is still there


@final
class Listener:
    """Listens until it is closed. A client that is late, sends something else or goes away loses its own connection, and no other.

    Args:
        talk: what is done with each client; an error ends its connection.
        token: of at least 16 characters, which the clients know.
        host: the address to listen on.
        port: 0 for any free one, which `port` then has.
        secs: how long a client may take for a frame.
        most_clients: how many may be connected at once; others are turned away.
        peer: a client, for messages.

    Raises:
        PeerRefused: for a token that is too short.
        OSError: if the address cannot be used.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        talk: Callable[[Channel], None],
        *,
        token: str,
        host: str,
        port: int,
        secs: float,
        most_clients: int,
        peer: str,
    ) -> None:
        secret, slots = check_token(token, f"the token for {peer}"), threading.BoundedSemaphore(most_clients)
        self._open: set[socket.socket] = set()

        class Client(socketserver.BaseRequestHandler):
            def handle(client) -> None:  # noqa: N805 - self is the listener
                if not slots.acquire(blocking=False):
                    return
                self._open.add(client.request)
                try:
                    prompt(client.request)
                    talk(introduced(client.request, secret, is_server=True, secs=secs, peer=peer))
                finally:
                    self._open.discard(client.request)
                    slots.release()

        self._server = _Server((host, port), Client)
        self.host = str(self._server.server_address[0])
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True, name="trainfold-listener"
        )
        self._thread.start()

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._open)

    def close(self) -> None:
        """Stop to accept clients, and end those that are connected."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def prompt(sock: socket.socket) -> None:
    """Send small frames at once, and notice a machine that is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECS)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that is refused or lost is its own trouble, and strangers may connect as often as they like."""
