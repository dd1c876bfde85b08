"""`Channel`: frames between two programs that know one token. Each has a length, a limit, a deadline and a digest that only they can make."""

import contextlib
import hashlib
import hmac
import socket
import struct
import time
from typing import Any, Final, final

from trainfold.core.errors import PeerLost, PeerRefused, TrainfoldError, error_text
from trainfold.core.format.strict_json import strict_json
from trainfold.core.json_values import canonical_json

PIECE_BYTES: Final = 8 << 20  # the largest frame of bytes
JSON_LIMIT: Final = 64 << 20
_HEAD: Final = struct.Struct("<cQ")  # kind, bytes of the payload
_TAG_BYTES: Final = 16
_MOST_SAID: Final = 2000  # characters of the reason of a refusal
_LINGER_SECS: Final = 5.0  # for a reason to arrive
_DRAINED_BYTES: Final = 1 << 20
_JSON, _BYTES = b"J", b"B"


@final
class Channel:
    """A connection after both sides have proved that they know the token.

    A frame is a byte for its kind, 8 bytes for its length, the payload, and the first half of an HMAC-SHA256 of all that and of its number. So a frame that was
    changed, cut off, left out, repeated, reordered, reflected or made by another program is refused before its payload is used. Nothing is encrypted.

    Args:
        sock: connected.
        mine: the key of the frames that this side sends.
        theirs: the key of those that it receives.
        secs: how long a frame may take.
        peer: the other side, for messages.

    Attributes:
        json_limit: the most bytes of a JSON value that is received; lower it where less is needed.
        sent_bytes: the bytes of all frames sent, with heads and digests.
        received_bytes: those received.
    """

    def __init__(self, sock: socket.socket, mine: bytes, theirs: bytes, *, secs: float, peer: str) -> None:
        self._sock, self._mine, self._theirs, self._secs, self._peer = sock, mine, theirs, secs, peer
        self._sent = self._received = 0
        self.sent_bytes = self.received_bytes = 0
        self.json_limit = JSON_LIMIT

    def send(self, value: Any) -> None:
        """Send a JSON value.

        Raises:
            PeerLost: if the other side is gone, or does not read in time.
            PeerRefused: if it has refused what was sent, and closed the connection.
        """
        self._send(_JSON, memoryview(canonical_json(value)))

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes, in pieces; the other side knows how many there are.

        Raises:
            PeerLost: as in `send`.
            PeerRefused: as in `send`.
        """
        for start in range(0, len(data), PIECE_BYTES):
            self._send(_BYTES, data[start : start + PIECE_BYTES])

    def receive(self) -> dict[str, Any]:
        """Receive a JSON object.

        Raises:
            PeerRefused: for anything but a frame of the other side with one, and if it says that it has refused what was sent.
            PeerLost: if the other side is gone, or late, or has no place now.
        """
        message = self._message(self._secs)
        if "error" in message:
            raise self._said(message)
        return message

    def refuse(self, error: Exception, *, is_for_now: bool = False) -> None:
        """Say why nothing more is accepted, and wait a while until the other side has read it and closed; then `close`.

        Args:
            error: the reason, which `receive` raises on the other side.
            is_for_now: whether to try again later helps: it is raised as `PeerLost` there.
        """
        said = {"error": error_text(error)[:_MOST_SAID], "fix": "see the program on the other side"}
        if isinstance(error, TrainfoldError):
            said = {"expected": str(error.expected), "error": str(error.found)[:_MOST_SAID], "fix": error.fix}
        with contextlib.suppress(OSError, TrainfoldError):
            self.send(said | ({"again": 1} if is_for_now else {}))
            self._sock.shutdown(socket.SHUT_WR)
            until = time.monotonic() + min(self._secs, _LINGER_SECS)
            while (left := until - time.monotonic()) > 0:  # data that is never read would destroy what was sent
                self._sock.settimeout(left)
                if not self._sock.recv(_DRAINED_BYTES):
                    return

    def receive_bytes(self, memory: memoryview) -> None:
        """Receive as many bytes as there are in ``memory``, into it. After an error its contents are undefined.

        Raises:
            PeerRefused: for another number of bytes, or bytes that the other side has not sent.
            PeerLost: as in `receive`.
        """
        for start in range(0, len(memory), PIECE_BYTES):
            self._receive(_BYTES, bytearray(), memory[start : start + PIECE_BYTES])

    def wait(self) -> None:
        """Wait, for as long as it takes, until the other side sends a frame, which then has its time.

        Raises:
            PeerLost: if the other side is gone.
        """
        self._sock.settimeout(None)
        try:
            is_there = self._sock.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise lost(self._peer, "send", error) from error
        if not is_there:
            raise lost(self._peer, "send", "the end of the connection")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _send(self, kind: bytes, payload: memoryview) -> None:
        head = _HEAD.pack(kind, len(payload))
        tag = _tag(self._mine, self._sent, head, payload)
        self._sent += 1
        self.sent_bytes += len(head) + len(payload) + len(tag)
        self._sock.settimeout(self._secs)
        try:
            for part in (head, payload, tag):
                self._sock.sendall(part)
        except OSError as error:
            if isinstance(error, ConnectionError):
                self._raise_refusal()
            raise lost(self._peer, "receive", error) from error

    def _raise_refusal(self) -> None:
        """Raise what the other side has said before it closed the connection, if it has."""
        try:
            message = self._message(_LINGER_SECS)
        except (PeerLost, PeerRefused):
            return
        if "error" in message:
            raise self._said(message)

    def _message(self, secs: float) -> dict[str, Any]:
        payload = bytearray()
        self._receive(_JSON, payload, None, secs)
        try:
            return strict_json(bytes(payload), self._peer)
        except Exception as error:
            raise self._refused("a JSON object", error) from error

    def _said(self, message: dict[str, Any]) -> TrainfoldError:
        expected, found, fix = (message.get(key) for key in ("expected", "error", "fix"))
        kind = PeerLost if "again" in message else PeerRefused
        return kind(
            self._peer,
            expected=expected or "an answer",
            found=found,
            fix=str(fix or "see the program on the other side"),
        )

    def _receive(self, kind: bytes, payload: bytearray, memory: memoryview | None, secs: float | None = None) -> None:
        until = time.monotonic() + (self._secs if secs is None else secs)
        head = exactly(self._sock, _HEAD.size, until, self._peer)
        found, size = _HEAD.unpack(head)
        if found != kind or (size > self.json_limit if memory is None else size != len(memory)):
            expected = f"at most {self.json_limit}" if memory is None else str(len(memory))
            raise self._refused(f"a frame {kind!r} of {expected} bytes", f"{found!r} of {size}")
        if memory is None:
            payload.extend(exactly(self._sock, size, until, self._peer))
        else:
            read_into(self._sock, memory, until, self._peer)
        tag = exactly(self._sock, _TAG_BYTES, until, self._peer)
        if not hmac.compare_digest(tag, _tag(self._theirs, self._received, head, memory or payload)):
            raise self._refused("bytes that it has sent", "others")
        self._received += 1
        self.received_bytes += len(head) + size + len(tag)

    def _refused(self, expected: str, found: object) -> PeerRefused:
        return PeerRefused(
            self._peer,
            expected=expected,
            found=found,
            fix="use the same version and model on both sides; look at who else can reach this port",
        )


def lost(peer: str, doing: str, error: object) -> PeerLost:
    """The error if the other side is gone or late."""
    return PeerLost(
        peer, expected=f"that it goes on ({doing})", found=error, fix="see whether it still runs, and connect again"
    )


def exactly(sock: socket.socket, size: int, until: float, peer: str) -> bytes:
    """Exactly so many bytes."""
    found = bytearray(size)
    read_into(sock, memoryview(found), until, peer)
    return bytes(found)


def read_into(sock: socket.socket, memory: memoryview, until: float, peer: str) -> None:
    """Fill the memory, before a time of the monotonic clock."""
    done = 0
    while done < len(memory):
        left = until - time.monotonic()
        if left <= 0:
            raise lost(peer, "send", "nothing in time")
        sock.settimeout(left)
        try:
            count = sock.recv_into(memory[done:])
        except OSError as error:
            raise lost(peer, "send", error) from error
        if not count:
            raise lost(peer, "send", "the end of the connection")
        done += count


def _tag(key: bytes, number: int, head: bytes, payload: memoryview | bytearray) -> bytes:
    tag = hmac.new(
        key, number.to_bytes(8, "little") + head, hashlib.sha256
    )  # three times as fast as BLAKE2 where the processor has SHA
    tag.update(payload)
    return tag.digest()[:_TAG_BYTES]
