"""`Listener`: accepts programs that know a token, and talks with each in a thread of its own."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, Final, final

from trainfold.backends.peers.channel import Channel
from trainfold.backends.peers.introduction import check_token, introduced
from trainfold.core.errors import PeerLost

_PROOF_SECS: Final = 10.0  # for a program to prove that it knows the token
_STRANGERS: Final = 64  # that have not proved it yet; more are turned away without an answer
_IDLE_SECS: Final = 60  # of silence, after which the machine of a client is asked whether it is still there


@final
class Listener:
    """Listens until it is closed. A client that is late, sends something else or goes away loses its own connection, and no other.

    Programs that have not proved that they know the token take no place of a client.

    Args:
        talk: what is done with each client; an error ends its connection, after the client was given the reason.
        token: of at least 16 characters, which the clients know.
        host: the address to listen on.
        port: 0 for any free one, which `port` then has.
        secs: how long a client may take for a frame.
        most_clients: how many may be connected at once; others are turned away with the reason.
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
        self._talk, self._token, self._secs, self._peer = talk, check_token(token, f"the token for {peer}"), secs, peer
        self._most = most_clients
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._is_closed = False

        class Client(socketserver.BaseRequestHandler):
            def handle(client) -> None:  # noqa: N805 - self is the listener
                self._serve(client.request)

        self._server = _Server((host, port), Client)
        self.host = str(self._server.server_address[0])
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True, name="trainfold-listener"
        )
        self._thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            if self._is_closed or len(self._strangers) >= _STRANGERS:
                return
            self._strangers.add(sock)
        try:
            prompt(sock)
            channel = introduced(
                sock, self._token, is_server=True, secs=self._secs, peer=self._peer, proof_secs=_PROOF_SECS
            )
            with self._lock:
                self._strangers.discard(sock)
                has_place = len(self._clients) < self._most
                if has_place:
                    self._clients.add(sock)
            if has_place:
                self._talk_with(channel)
            else:
                channel.refuse(self._is_full(), is_for_now=True)
        finally:
            with self._lock:
                self._strangers.discard(sock)
                self._clients.discard(sock)

    def _talk_with(self, channel: Channel) -> None:
        try:
            self._talk(channel)
        except Exception as error:
            if not isinstance(error, PeerLost) or error.where != self._peer:  # it is there to read the reason
                channel.refuse(error)
            raise

    def _is_full(self) -> PeerLost:
        return PeerLost(
            self._peer,
            expected=f"at most {self._most} that are connected",
            found="one more",
            fix="wait until one has ended, or let the server accept more",
        )

    @property
    def clients(self) -> int:
        """How many are connected that know the token."""
        return len(self._clients)

    def close(self) -> None:
        """Stop to accept clients, and end those that are connected."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            self._is_closed = True
            connected = [*self._strangers, *self._clients]
        for each in connected:
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
        """Log nothing: a client that is refused gets the reason, and strangers may connect as often as they like."""
