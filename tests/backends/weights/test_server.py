"""Weights over TCP: the contract, in parts, from a process that may be killed, and with clients that are not what they should be."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from trainfold.backends.peers import listener
from trainfold.backends.peers.introduction import MAGIC, introduced
from trainfold.backends.weights.served import ServedWeights
from trainfold.backends.weights.server import WeightServer
from trainfold.core.errors import PeerLost, PeerRefused
from trainfold.core.weights.source import Wanted
from trainfold.properties.contracts import check_weight_source

TOKEN = "a token that both sides know"
TENSORS = {
    "w": torch.arange(12.0).view(4, 3),
    "b": torch.ones(2).bfloat16(),
    "n": torch.tensor(3),
    "e": torch.empty(0, 2),
}


class Held:
    def __init__(self, tensors=TENSORS):
        self.tensors = tensors

    def supply(self, wanted):
        return ((name, self.tensors[name]) for name in wanted if name in self.tensors)


class Broken:
    def supply(self, wanted):
        yield from Held().supply(wanted)
        raise OSError("the disk is gone")


def client(server, **options):
    return ServedWeights("127.0.0.1", server.port, token=TOKEN, **{"secs": 5.0, **options})


WANTED = {"w": Wanted("float32", (4, 3), ((1, 3), (0, 3)))}


def test_a_server_keeps_the_contract_of_a_source():
    """J01: over TCP too."""
    with WeightServer(Held(), token=TOKEN) as server:
        check_weight_source(lambda: client(server), TENSORS)


def test_several_clients_ask_at_once():
    large = {"w": torch.randn(3000, 1000)}  # more than one frame
    wanted = {"w": Wanted("float32", (3000, 1000), ((0, 3000), (0, 1000)))}
    found = []
    with WeightServer(Held(large), token=TOKEN) as server:
        threads = [
            threading.Thread(target=lambda: found.append(dict(client(server).supply(wanted))["w"])) for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(torch.equal(each, large["w"]) for each in found)
    assert len(found) == 4


def test_a_failure_of_the_servers_source_is_raised_by_the_client():
    """J04."""
    with WeightServer(Broken(), token=TOKEN) as server, pytest.raises(PeerRefused, match="OSError: the disk is gone"):
        dict(client(server).supply(WANTED))


def test_a_client_without_the_token_gets_nothing_and_the_next_one_is_served():
    with WeightServer(Held(), token=TOKEN, secs=1.0) as server:
        other = ServedWeights("127.0.0.1", server.port, token=TOKEN + "!", secs=5.0)
        with pytest.raises((PeerRefused, PeerLost)):
            dict(other.supply(WANTED))
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(64), b""):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(greeting)
        assert dict(client(server).supply(WANTED))["w"].tolist() == TENSORS["w"][1:3].tolist()


def test_a_client_that_is_one_too_many_is_given_the_reason():
    with WeightServer(Held(), token=TOKEN, most_clients=1, secs=30.0) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            introduced(first, TOKEN, is_server=False, secs=5.0, peer="the server")
            until_true(lambda: server._listener.clients == 1)
            with pytest.raises(PeerLost, match="expected at most 1 that are connected, found one more"):
                dict(client(server).supply(WANTED))
        until_true(lambda: server._listener.clients == 0)
        assert dict(client(server).supply(WANTED))


def test_programs_that_do_not_know_the_token_take_no_place():
    """U02: they had places of clients for as long as a frame may take, a minute by default."""
    with WeightServer(Held(), token=TOKEN, most_clients=1, secs=30.0) as server, contextlib.ExitStack() as stack:
        for _ in range(8):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert stranger.recv(len(MAGIC)) == MAGIC
        assert dict(client(server).supply(WANTED))


def test_strangers_have_a_bound_and_a_short_time(monkeypatch):
    """U02: memory and threads are not theirs; their time is not that of a frame."""
    monkeypatch.setattr(listener, "_STRANGERS", 2)
    monkeypatch.setattr(listener, "_PROOF_SECS", 0.2)
    with WeightServer(Held(), token=TOKEN, secs=30.0) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert stranger.recv(len(MAGIC)) == MAGIC
        with socket.create_connection(("127.0.0.1", server.port)) as third:
            assert third.recv(len(MAGIC)) == b""
        until_true(lambda: not server._listener._strangers)
        assert dict(client(server).supply(WANTED))


def until_true(condition):
    until = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"wanted": 3},
        {"wanted": {"w": ["float32", [4, 3], [[0, 9], [0, 3]], None]}},
        {"wanted": {"w": ["float32", [4], [[0, 4], [0, 3]], None]}},
        {"wanted": {"w": ["float32", [True], [[0, 1]], None]}},
        {"wanted": {"w": [1, [4], [[0, 4]], None]}},
        {"wanted": {"w": ["float32", [4], [[0, 4]], "no such name"]}},
    ],
)
def test_what_a_client_asks_is_checked(message):
    """U02: it gets the reason and loses its connection, and the server goes on."""
    with WeightServer(Held(), token=TOKEN, secs=2.0) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            channel = introduced(sock, TOKEN, is_server=False, secs=2.0, peer="the server")
            channel.send(message)
            with pytest.raises(PeerRefused, match="the dtypes, shapes and boxes of tensors"):
                channel.receive()
        assert dict(client(server).supply(WANTED))


@pytest.mark.parametrize(
    "message",
    [
        {"name": "other", "dtype": "float32", "shape": [2, 3]},
        {"name": "w", "dtype": "float32", "shape": [1 << 40, 3]},
        {"name": "w", "dtype": "object", "shape": [2, 3]},
        {"name": ["w"], "dtype": "float32", "shape": [2, 3]},
        {},
    ],
)
def test_what_a_server_sends_is_checked_before_memory_is_taken(message):
    """U02."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listening.accept()
        with sock:
            channel = introduced(sock, TOKEN, is_server=True, secs=5.0, peer="a client")
            channel.receive()
            channel.send(message)

    thread = threading.Thread(target=serve)
    thread.start()
    source = ServedWeights("127.0.0.1", listening.getsockname()[1], token=TOKEN, secs=5.0)
    with pytest.raises(PeerRefused, match="a tensor that was asked for"):
        dict(source.supply(WANTED))
    thread.join()
    listening.close()


PROGRAM = """
import sys, time, torch
from trainfold.weights import WeightServer

class Slow:
    def supply(self, wanted):
        yield "w", torch.ones(4, 3)
        time.sleep(60)

server = WeightServer(Slow(), token=sys.argv[1])
print(server.port, flush=True)
time.sleep(60)
"""


def test_a_server_that_is_killed_in_the_middle_is_an_error_at_once():
    """J04: a real process, killed while it serves."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, TOKEN], stdout=subprocess.PIPE, text=True) as process:
        source = ServedWeights("127.0.0.1", int(process.stdout.readline()), token=TOKEN, secs=30.0)
        wanted = {**WANTED, "b": Wanted("float32", (1,), ((0, 1),))}
        supplied = source.supply(wanted)
        assert next(supplied)[0] == "w"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(PeerLost, match=f"127.0.0.1:{source._port}"):
            next(supplied)
        with pytest.raises(PeerLost, match="accept a connection"):
            next(source.supply(wanted))
