"""Frames between programs: whatever is changed on the way, cut off, late or made by a stranger is refused, and what arrives is what was sent."""

import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainfold.backends.peers.channel
from trainfold.backends.peers.channel import PIECE_BYTES
from trainfold.backends.peers.introduction import MAGIC, check_token, introduced
from trainfold.core.errors import PeerLost, PeerRefused

TOKEN = "a token that both sides know"


@pytest.fixture
def pair():
    """Two connected sockets."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


class Wire:
    """Two sockets, and between them a wire that records, and changes one byte, repeats, or ends."""

    def __init__(self, change=None):
        self.near, a = socket.socketpair()
        b, self.far = socket.socketpair()
        self.change, self.count = change, 0
        ways = ((a, b, True), (b, a, False))
        self.threads = [threading.Thread(target=self.carry, args=each) for each in ways]
        for each in self.threads:
            each.start()

    def end(self):
        for each in self.threads:
            each.join()

    def carry(self, source, target, is_mine):
        try:
            while data := bytearray(source.recv(1 << 16)):
                if is_mine and self.change is not None:
                    place, what = self.change
                    index = place - self.count
                    self.count += len(data)
                    if 0 <= index < len(data):
                        if what == "end":
                            target.sendall(data[:index])
                            break
                        data[index] ^= what
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):  # wakes the other thread, too
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def both(near, far, *, tokens=(TOKEN, TOKEN), secs=5.0, talk=lambda mine, theirs: None):
    """What each side raised, and what the far side got."""
    outcomes = {}

    def far_side():
        try:
            channel = introduced(far, tokens[1], is_server=True, secs=secs, peer="near")
            message = channel.receive()
            memory = memoryview(bytearray(message["bytes"]))
            channel.receive_bytes(memory)
            outcomes["got"] = message, bytes(memory)
        except (PeerLost, PeerRefused) as error:
            outcomes["far"] = error
        finally:
            far.close()

    thread = threading.Thread(target=far_side)
    thread.start()
    try:
        channel = introduced(near, tokens[0], is_server=False, secs=secs, peer="far")
        talk(channel, outcomes)
    except (PeerLost, PeerRefused) as error:
        outcomes["near"] = error
    finally:
        near.close()
        thread.join()
    return outcomes


def say(data):
    def talk(channel, _):
        channel.send({"bytes": len(data), "name": "w"})
        channel.send_bytes(memoryview(data))

    return talk


@settings(deadline=None, max_examples=20)
@given(st.binary(max_size=2000))
def test_what_was_sent_arrives(data):
    """J04, U02: bytes and values, as they are."""
    wire = Wire()
    found = both(wire.near, wire.far, talk=say(data))
    wire.end()
    assert found == {"got": ({"bytes": len(data), "name": "w"}, data)}


def test_more_than_a_frame_arrives_in_pieces(pair):
    data = bytes(range(256)) * (PIECE_BYTES // 256) + b"more"
    near, far = pair
    assert both(near, far, talk=say(data))["got"][1] == data


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 260), st.one_of(st.integers(1, 255), st.just("end")))
def test_a_byte_that_is_changed_or_missing_is_never_used(place, what):
    """U02: anywhere: in the greeting, the proof, a head, a payload or a digest. At least one side refuses, and the far side gets nothing else."""
    wire = Wire((place, what))
    found = both(wire.near, wire.far, secs=0.3, talk=say(b"0123456789" * 8))
    wire.end()
    if place < wire.count:
        assert "got" not in found, found
        assert "far" in found
    else:
        assert found["got"][1] == b"0123456789" * 8


def test_another_token_is_refused_on_both_sides(pair):
    near, far = pair
    found = both(near, far, tokens=(TOKEN, TOKEN + "!"))
    assert "a program that knows the token" in str(found["far"])
    assert "near" in found


def test_a_side_that_speaks_to_itself_is_refused(pair):
    """A reflected greeting is refused: each side proves another text."""
    near, far = pair

    def echo():
        with suppress(OSError):
            while data := far.recv(4096):
                far.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(PeerRefused, match="a program that knows the token"):
        introduced(near, TOKEN, is_server=False, secs=5.0, peer="far")
    near.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_frames_cannot_be_repeated(pair):
    """A frame that was valid once is refused the second time."""
    near, far = pair
    sent = []

    class Recorded:
        def sendall(self, data):
            sent.append(bytes(data))
            near.sendall(data)

        def __getattr__(self, name):
            return getattr(near, name)

    outcomes = {}

    def far_side():
        channel = introduced(far, TOKEN, is_server=True, secs=5.0, peer="near")
        outcomes["first"] = channel.receive()
        try:
            channel.receive()
        except PeerRefused as error:
            outcomes["second"] = str(error)

    thread = threading.Thread(target=far_side)
    thread.start()
    channel = introduced(Recorded(), TOKEN, is_server=False, secs=5.0, peer="far")
    begin = len(sent)
    channel.send({"a": 1})
    near.sendall(b"".join(sent[begin:]))
    thread.join()
    assert outcomes["first"] == {"a": 1}
    assert "bytes that it has sent" in outcomes["second"]


@pytest.mark.parametrize("linger_secs", [0.0, 5.0])
@pytest.mark.parametrize("is_for_now", [False, True])
def test_a_refusal_arrives_also_at_a_side_that_is_still_sending(linger_secs, is_for_now, monkeypatch):
    """It saw a broken connection, and tried again until its time was over."""
    near, far = connected_over_tcp()  # with resets, as between machines
    monkeypatch.setattr(trainfold.backends.peers.channel, "_LINGER_SECS", linger_secs)
    reason = PeerLost("near", expected="this", found="that", fix="do so")

    def far_side():
        with far:
            channel = introduced(far, TOKEN, is_server=True, secs=5.0, peer="near")
            channel.receive()
            channel.refuse(reason, is_for_now=is_for_now)

    thread = threading.Thread(target=far_side)
    thread.start()
    with near:
        channel = introduced(near, TOKEN, is_server=False, secs=5.0, peer="far")

        def talk():
            channel.send({"bytes": 1})
            if not linger_secs:
                thread.join()
                monkeypatch.setattr(trainfold.backends.peers.channel, "_LINGER_SECS", 5.0)
            for _ in range(8):
                channel.send_bytes(memoryview(bytes(PIECE_BYTES)))
            channel.receive()

        with pytest.raises(PeerLost if is_for_now else PeerRefused, match="far: expected this, found that; do so"):
            talk()
    thread.join()


def connected_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", "trainfold's protocol for peers"),
        (b"\x80\x04" + bytes(100), "trainfold's protocol for peers"),
        (MAGIC + bytes(32 + 32), "a program that knows the token"),
    ],
)
def test_strangers_are_refused(pair, hello, said):
    near, far = pair
    near.sendall(hello)
    with pytest.raises(PeerRefused, match=said):
        introduced(far, TOKEN, is_server=True, secs=5.0, peer="a stranger")


def test_a_side_that_says_nothing_is_given_up_in_time(pair):
    _, far = pair
    with pytest.raises(PeerLost, match=r"nothing in time|timed out"):
        introduced(far, TOKEN, is_server=True, secs=0.1, peer="a stranger")


@pytest.mark.parametrize("token", ["", "short", None, 3])
def test_a_token_that_can_be_guessed_is_refused(token):
    with pytest.raises(PeerRefused, match=r"secrets\.token_urlsafe"):
        check_token(token, "server")
