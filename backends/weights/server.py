"""`WeightServer`: gives the tensors of a source to programs that know its token, over TCP."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final, Self, final

from trainfold.backends.peers.channel import Channel
from trainfold.backends.peers.listener import Listener
from trainfold.core.errors import PeerRefused
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.account import Account
from trainfold.core.weights.several.source_text import sources_in
from trainfold.core.weights.source import Wanted, WeightSource
from trainfold.core.weights.supplied import part_of, supplied
from trainfold.core.weights.wrapped import check_wrapped

_CLIENTS: Final = 64
_SECS: Final = 60.0
_PEER: Final = "a client of the server of weights"


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
        most_clients: how many may be connected at once; others are turned away with the reason.

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
        for each in sources_in(source):
            check_wrapped("WeightServer.source", each)
        self._source = source
        self._listener = Listener(
            lambda channel: send_weights(channel, wanted_of(channel.receive(), _PEER), source),
            token=token,
            host=host,
            port=port,
            secs=secs,
            most_clients=most_clients,
            peer=_PEER,
        )
        self.port: int = self._listener.port

    def __repr__(self) -> str:
        return f"WeightServer({self._source!r}, {self._listener.host!r}, {self.port})"

    def close(self) -> None:
        """Stop to accept clients; those that are connected get no more."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_weights(channel: Channel, wanted: Mapping[str, Wanted], source: WeightSource, **last: Any) -> None:
    """Send what a source supplies: each tensor after its name, and at the end their number, with ``last``.

    Raises:
        PeerLost: if the client is gone.
    """
    account, count = Account(source, wanted), 0
    with closing(supplied(source, wanted)) as tensors:
        for name, tensor in tensors:
            part = part_of(source, account, name, tensor)
            channel.send({"name": name, "dtype": dtype_name(part.dtype), "shape": list(part.shape)})
            channel.send_bytes(tensor_bytes(part))
            count += 1
    channel.send({"end": count, **last})


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
