"""Ports for servers and ranks of tests."""

import socket


def free_port():
    """One of the loopback that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
