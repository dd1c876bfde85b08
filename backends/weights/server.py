"""`WeightServer`: gives the tensors of a source to programs that know its token, over TCP."""

import socket
import socketserver
import threading
from collections.abc import Mapping
from typing import Any, Final, Self, final

from trainfold.backends.peers.channel import check_token, introduced
from trainfold.core.errors import PeerLost, PeerRefused, TrainfoldError, error_text
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.account import Account
from trainfold.core.weights.source import Wanted, WeightSource

_CLIENTS: Final = 64
_SECS: Final = 60.0


@final
class WeightServer:
    """Serves weights from a thread of its own until it is closed. See `ServedWeights` for the other side.

    Both sides prove that they know the token, and each frame has a digest that only they can make; nothing is encrypted. Of a tensor a client gets the
    box that it holds. A client that is late, sends something else or goes away loses its own connection, and no other.

    Args:
        source: what is served; several clients may ask at once, each in a thread.
        token: of at least 16 characters, which the clients know.
        host: the address to listen on; by default this machine alone can connect.
        port: 0 for any free one, which `port` then has.
        secs: how long a client may take for a frame.
        most_clients: how many may be connected at once; others are turned away.

    Raises:
        PeerRefused: for a token that is too short.
        OSError: if the address cannot be used.

    Examples:
        >>> import torch
        >>> from trainfold.backends.weights.served import ServedWeights
        >>> class Ones:
        ...     def supply(self, wanted):
        ...         yield from ((name, torch.ones(each.shape)) for name, each in wanted.items())
        >>> with WeightServer(Ones(), token="a-token-of-some-length") as server:
        ...     client = ServedWeights("127.0.0.1", server.port, token="a-token-of-some-length")
        ...     dict(client.supply({"w": Wanted("float32", (4,), ((1, 3),))}))
        {'w': tensor([1., 1.])}
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        source: WeightSource,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        secs: float = _SECS,
        most_clients: int = _CLIENTS,
    ) -> None:
        secret, slots = check_token(token, "WeightServer.token"), threading.BoundedSemaphore(most_clients)

        class Client(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                if slots.acquire(blocking=False):
                    try:
                        _serve(self.request, secret, source, secs)
                    finally:
                        slots.release()

        self._source = source
        self._server = _Server((host, port), Client)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True, name="trainfold-weights"
        )
        self._thread.start()

    def __repr__(self) -> str:
        host, port = self._server.server_address[:2]
        return f"WeightServer({self._source!r}, {host!r}, {port})"

    def close(self) -> None:
        """Stop to accept clients; those that are connected get no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that is refused or lost is its own trouble, and strangers may connect as often as they like."""


def _serve(sock: socket.socket, token: str, source: WeightSource, secs: float) -> None:
    peer = "a client of the server of weights"
    channel = introduced(sock, token, is_server=True, secs=secs, peer=peer)
    wanted = wanted_of(channel.receive(), peer)
    account, count = Account(wanted), 0
    try:
        for name, tensor in source.supply(wanted):
            part = tensor.detach()[account.part_of(name, dtype_name(tensor.dtype), tensor.shape)]
            channel.send({"name": name, "dtype": dtype_name(part.dtype), "shape": list(part.shape)})
            channel.send_bytes(tensor_bytes(part))
            count += 1
    except (PeerLost, PeerRefused):
        raise
    except Exception as error:  # noqa: BLE001 - of the source: the client raises it
        fix = error.fix if isinstance(error, TrainfoldError) else "see the program that serves the weights"
        channel.send({"error": error_text(error)[:2000], "fix": fix})
        return
    channel.send({"end": count})


def asked(wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """What a client sends first.

    Examples:
        >>> asked({"w": Wanted("float32", (4,), ((1, 3),))})
        {'wanted': {'w': ['float32', [4], [[1, 3]], None]}}
    """
    found = {name: [e.dtype, list(e.shape), [list(span) for span in e.box], e.tied_to] for name, e in wanted.items()}
    return {"wanted": found}


def wanted_of(message: Mapping[str, Any], peer: str) -> dict[str, Wanted]:
    """The inverse of `asked`, for a message that any program may have made.

    Raises:
        PeerRefused: if it is not one.
    """
    try:
        names = message["wanted"]
        found = {name: _wanted(*each) for name, each in names.items()}
        if all(each.tied_to is None or each.tied_to in names for each in found.values()):
            return found
        error = "a name that is not there"
    except (KeyError, TypeError, ValueError, AttributeError) as found_error:
        error = str(found_error)
    raise PeerRefused(
        peer, expected="the dtypes, shapes and boxes of tensors", found=error, fix="use the same version on both sides"
    )


def _wanted(dtype: Any, shape: Any, box: Any, tied_to: Any) -> Wanted:
    spans = [(start, stop, size) for (start, stop), size in zip(box, shape, strict=True)]
    if not isinstance(dtype, str) or not all(type(each) is int for span in spans for each in span):
        raise TypeError("a number or text of another type")
    if not all(0 <= start <= stop <= size for start, stop, size in spans):
        raise ValueError("a box outside its tensor")
    return Wanted(dtype, tuple(shape), tuple((start, stop) for start, stop, _ in spans), tied_to)
