"""How two programs begin to talk: each proves that it knows the token, without sending it."""

import hashlib
import hmac
import secrets
import socket
import time
from typing import Final

from trainfold.backends.peers.channel import Channel, exactly, lost
from trainfold.core.errors import PeerRefused

MAGIC: Final = b"trainfold-peer-1"
_NONCE_BYTES: Final = 32
_LEAST_TOKEN: Final = 16


def introduced(  # noqa: PLR0913 - keywords
    sock: socket.socket, token: str, *, is_server: bool, secs: float, peer: str, proof_secs: float | None = None
) -> Channel:
    """Let both sides of a new connection prove that they know the token, without sending it.

    Each sends a random number, and then a keyed digest of both numbers. The keys of the frames come from the token and the numbers, one a direction.

    Args:
        sock: connected.
        token: of at least 16 characters; the same on both sides.
        is_server: whether this side has accepted the connection.
        secs: how long a frame may take.
        peer: the other side, for messages.
        proof_secs: how long this may take; None for as long as a frame.

    Raises:
        PeerRefused: if the other side does not speak this protocol, or does not know the token.
        PeerLost: if it is gone or late.
    """
    secret, mine = token.encode(), secrets.token_bytes(_NONCE_BYTES)
    within = secs if proof_secs is None else min(secs, proof_secs)
    until = time.monotonic() + within
    sock.settimeout(within)
    try:
        sock.sendall(MAGIC + mine)
        hello = exactly(sock, len(MAGIC) + _NONCE_BYTES, until, peer)
        if hello[: len(MAGIC)] != MAGIC:
            raise PeerRefused(peer, expected="trainfold's protocol for peers, version 1", found=repr(hello[: len(MAGIC)])[:80],
                              fix="use the same version on both sides; look at who else can reach this port")  # fmt: skip
        theirs = hello[len(MAGIC) :]
        numbers = mine + theirs if is_server else theirs + mine  # those of the server first
        sides = (b"server", b"client") if is_server else (b"client", b"server")
        sock.sendall(_proof(secret, sides[0] + numbers))
        if not hmac.compare_digest(
            exactly(sock, hashlib.sha256().digest_size, until, peer), _proof(secret, sides[1] + numbers)
        ):
            raise PeerRefused(
                peer,
                expected="a program that knows the token",
                found="another one",
                fix="give both sides the same token",
            )
    except OSError as error:
        raise lost(peer, "answer", error) from error
    keys = [_proof(secret, b"frames of the " + side + numbers) for side in sides]
    return Channel(sock, keys[0], keys[1], secs=secs, peer=peer)


def check_token(token: object, where: str) -> str:
    """Check a token.

    Raises:
        PeerRefused: unless it is a text of at least 16 characters.

    Examples:
        >>> check_token("a-token-of-some-length", "server") == "a-token-of-some-length"
        True
    """
    if isinstance(token, str) and len(token) >= _LEAST_TOKEN:
        return token
    raise PeerRefused(
        where,
        expected=f"a token of at least {_LEAST_TOKEN} characters",
        found="a shorter one" if isinstance(token, str) else type(token).__name__,
        fix="make one with secrets.token_urlsafe(), and give it to both sides through the environment or a file",
    )


def _proof(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).digest()
