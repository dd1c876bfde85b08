"""`OuterClient`: a worker's connection to a `DilocoServer`, which it makes again if the server was killed."""

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, TypeVar, final

import torch

from trainfold.backends.diloco.messages import (
    VERSION,
    field,
    fragment_names,
    number_of,
    receive_tensors,
    round_mark,
    send_tensors,
    unit_of,
)
from trainfold.backends.peers.channel import Channel, lost
from trainfold.backends.peers.introduction import check_token, introduced
from trainfold.backends.peers.listener import prompt
from trainfold.backends.weights.served import received_tensor
from trainfold.backends.weights.server import asked
from trainfold.core.diloco.work_units import WorkUnit
from trainfold.core.errors import PeerLost
from trainfold.core.weights.source import Wanted

_LOG: Final = logging.getLogger("trainfold")
_FIRST_PAUSE_SECS: Final = 0.05
_LONGEST_PAUSE_SECS: Final = 1.0
T = TypeVar("T")


@final
class OuterClient:
    """The worker's side. Each request is made again on a new connection, until it is answered or the server was gone for too long.

    Args:
        host: of the server.
        port: of the server.
        token: of the server.
        secs: how long connecting, and each frame, may take.
        retry_secs: how long the server may be gone.

    Attributes:
        mark: names the weights that the worker has; empty for none.
        round: the number of the round, as of the last unit.
        fragments: the names of each fragment; empty before the first connection. Where a server that was started again has others, the weights
            have to be taken again: no unit counts in fragments that it was not trained for.
        sent_bytes: the bytes of all frames that it has sent.
        received_bytes: those that it has received.
    """

    def __init__(self, host: str, port: int, *, token: str, secs: float, retry_secs: float) -> None:
        self._host, self._port, self._secs, self._retry_secs = host, port, secs, retry_secs
        self._token = check_token(token, "DilocoWorker.token")
        self._peer = f"the server of rounds at {host}:{port}"
        self._channel: Channel | None = None
        self._counted = (0, 0)  # of earlier connections
        self.mark, self.round = "", 0
        self.fragments: tuple[tuple[str, ...], ...] = ()

    @property
    def sent_bytes(self) -> int:  # noqa: D102 - in the class
        return self._counted[0] + (0 if self._channel is None else self._channel.sent_bytes)

    @property
    def received_bytes(self) -> int:  # noqa: D102 - in the class
        return self._counted[1] + (0 if self._channel is None else self._channel.received_bytes)

    def take(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the current round. They are received before the first one is yielded: all are of one round, also if the server is killed meanwhile."""

        def talk(channel: Channel) -> dict[str, torch.Tensor]:
            channel.send(asked(wanted))
            found = {}
            while "end" not in (message := channel.receive()):
                name, tensor = received_tensor(channel, message, wanted, self._peer)
                found[name] = tensor
            self.mark = field(message, "mark", round_mark, self._peer)
            return found

        yield from self._ask(talk).items()

    def work(self) -> WorkUnit | Literal["stale", "over"]:
        """Ask for a unit.

        Returns:
            The unit; ``"stale"`` if the weights have to be taken first; ``"over"`` if every sample has counted.
        """

        def talk(channel: Channel) -> WorkUnit | Literal["stale", "over"]:
            channel.send({"work": self.mark})
            message = self._heard(channel)
            if "over" in message:
                return "over"
            if "stale" in message:
                return "stale"
            self.round = field(message, "round", number_of, self._peer)
            return field(message, "unit", unit_of, self._peer)

        return self._ask(talk)

    def send(self, unit: WorkUnit, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Send what was made of a unit, wait until the round is over, and return the new values.

        Returns:
            None if it did not count, because it was late, or the server knows nothing of this round: the weights have to be taken again.
        """

        def talk(channel: Channel) -> dict[str, torch.Tensor] | None:
            channel.send({"send": [unit.start, unit.stop], "mark": self.mark})
            if "stale" in channel.receive():
                return None
            send_tensors(channel, local)
            message = self._heard(channel)
            if "stale" in message:
                return None
            found, last = receive_tensors(channel, local, self._peer, message)
            self.mark = field(last, "mark", round_mark, self._peer)
            return found

        return self._ask(talk)

    def connect(self) -> None:
        """Connect, if it is not connected, to know the fragments."""
        self._ask(lambda _: None)

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._counted = self.sent_bytes, self.received_bytes
            self._channel.close()
            self._channel = None

    def _heard(self, channel: Channel) -> Mapping[str, object]:
        while "wait" in (message := channel.receive()):
            pass
        return message

    def _ask(self, talk: Callable[[Channel], T]) -> T:
        until, pause = None, _FIRST_PAUSE_SECS
        while True:
            try:
                return talk(self._connected())
            except PeerLost as error:
                self.close()
                now = time.monotonic()
                if until is None:
                    until = now + self._retry_secs
                    _LOG.warning("%s (tries again for %g s)", error, self._retry_secs)
                if now + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECS)
            except BaseException:
                self.close()  # in the middle of an exchange
                raise

    def _connected(self) -> Channel:
        if self._channel is None:
            try:
                sock = socket.create_connection((self._host, self._port), timeout=self._secs)
            except OSError as error:
                raise lost(self._peer, "accept a connection", error) from error
            try:
                prompt(sock)
                channel = introduced(sock, self._token, is_server=False, secs=self._secs, peer=self._peer)
                channel.send({"join": VERSION})
                fragments = field(channel.receive(), "fragments", fragment_names, self._peer)
                if fragments != self.fragments:  # the server was started again with another plan
                    self.fragments, self.mark = fragments, ""
            except BaseException:
                sock.close()
                raise
            self._channel = channel
        return self._channel
