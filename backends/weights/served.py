"""`ServedWeights`: the weights that a `WeightServer` has."""

import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch

from trainfold.backends.peers.channel import Channel, lost
from trainfold.backends.peers.introduction import check_token, introduced
from trainfold.backends.peers.listener import prompt
from trainfold.backends.weights.server import asked
from trainfold.core.errors import PeerRefused
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.source import Wanted

_SECS: Final = 60.0


@final
class ServedWeights:
    """A source over TCP; see `WeightServer`. It receives what this rank holds, one tensor after the other, and checks every byte.

    Args:
        host: of the server.
        port: of the server.
        token: of the server.
        secs: how long connecting, and each frame, may take.

    Raises:
        PeerRefused: for a token that is too short.

    Examples:
        >>> ServedWeights("127.0.0.1", 29600, token="a-token-of-some-length")
        ServedWeights('127.0.0.1', 29600)
    """

    def __init__(self, host: str, port: int, *, token: str, secs: float = _SECS) -> None:
        self._host, self._port, self._secs = host, port, secs
        self._token = check_token(token, "ServedWeights.token")

    def __repr__(self) -> str:
        return f"ServedWeights({self._host!r}, {self._port})"

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of each tensor that this rank holds.

        Raises:
            PeerLost: if the server cannot be reached, ends, or is late.
            PeerRefused: if it does not know the token, sends something else than weights, or its source has failed.
        """
        peer = f"the server of weights at {self._host}:{self._port}"
        try:
            sock = socket.create_connection((self._host, self._port), timeout=self._secs)
        except OSError as error:
            raise lost(peer, "accept a connection", error) from error
        with sock:
            prompt(sock)
            channel = introduced(sock, self._token, is_server=False, secs=self._secs, peer=peer)
            channel.send(asked(wanted))
            while "end" not in (message := channel.receive()):
                yield received_tensor(channel, message, wanted, peer)


def received_tensor(
    channel: Channel, message: Mapping[str, Any], wanted: Mapping[str, Wanted], peer: str
) -> tuple[str, torch.Tensor]:
    """Receive the tensor that a message announces.

    Raises:
        PeerRefused: if it is not one that is wanted; nothing is allocated then.
        PeerLost: if the other side is gone or late.
    """
    name, dtype, shape = (message.get(key) for key in ("name", "dtype", "shape"))
    each = wanted.get(name) if isinstance(name, str) else None
    held = [] if each is None else [stop - start for start, stop in each.box]
    if each is None or not isinstance(name, str) or not isinstance(dtype, str) or shape != held or dtype not in STORED:
        raise PeerRefused(
            peer,
            expected="a tensor that was asked for, with the shape that this rank holds",
            found=f"{name!r}, {dtype} {shape}",
            fix="look at what this server serves",
        )
    found = torch.empty(held, dtype=torch_dtype(dtype))
    channel.receive_bytes(tensor_bytes(found))
    return name, found
