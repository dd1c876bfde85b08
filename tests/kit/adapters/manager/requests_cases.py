"""Helpers shared by the tests of requests."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def child():
    """Starts programs in processes of their own, and ends those that a test leaves."""
    started = []

    def start(program):
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", PREAMBLE + textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


PREAMBLE = """
import os, signal, sys, threading, time
from trainfold.adapters.requests.sources import SignalRequests
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background without
def say(*words): print(*words, flush=True)
def until(happens):
    for _ in range(6000):
        if happens(): return
        time.sleep(0.01)
    raise SystemExit("it never happened")
"""


def heard(process, line):
    """Wait for a line of a program."""
    said = process.stdout.readline().strip()
    assert said == line, f"{said!r}: {process.communicate()}"


def ended(process):
    """The lines that a program says from here on, and its exit code."""
    said = (
        process.stdout.read()
    )  # not communicate(), which knows nothing of lines that were read ahead with those heard
    complaints = process.stderr.read()
    return said.splitlines(), process.wait(timeout=120), complaints


# --- signals, in real processes --------------------------------------------------------------------------------------
