"""Whether a process is gone is said only where it can be known."""

import os
import subprocess
import sys

import pytest

from trainfold.backends import lock_holder
from trainfold.backends.lock_holder import has_ended, is_dead, myself, seen_from_here, start_of, this_machine

MAKES_NAMESPACES = os.geteuid() == 0 and not subprocess.run(
    ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc", "/proc"],
    capture_output=True, check=False,
).returncode  # fmt: skip
needs_namespaces = pytest.mark.skipif(not MAKES_NAMESPACES, reason="needs the right to mount /proc")


def said(question, *flags, before=":", as_user=0):
    """What a process in namespaces of its own says."""
    user = f"os.setgroups([]); os.setgid({as_user}); os.setuid({as_user})"
    program = f"import os; from trainfold.backends.lock_holder import *; {user}; print({question})"
    command = ["unshare", "--mount", *flags, "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def process():
    """One that lives."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_lives_is_gone_or_is_another(process):
    """C03: what a lock asks."""
    started = start_of(process.pid)
    assert is_dead(process.pid, started) is is_dead(process.pid) is False
    assert is_dead(process.pid, f"{int(started) - 1}") is True
    process.kill()
    process.wait()
    assert is_dead(process.pid, started) is True
    assert not has_ended(myself())
    assert not has_ended(f"process {10**30} on {os.uname().nodename}")


def test_a_process_that_ends_and_is_not_waited_for_is_gone():
    """C03: the launcher of a job may never wait."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(process.pid) is True


@needs_namespaces
def test_a_living_process_of_another_user_is_not_gone_where_its_user_alone_sees_it(process):
    """C03: with hidepid, /proc has no entry of it, and a second user took the run of a living holder."""
    question = f"is_dead({process.pid}, '{start_of(process.pid)}'), is_dead(4_194_303 * 100)"
    assert said(question, before="mount -t proc -o hidepid=2 proc /proc", as_user=65534) == "None True"


@needs_namespaces
def test_numbers_of_another_namespace_say_nothing():
    """C03: a container that has not mounted its own /proc sees other processes under its numbers."""
    assert said("start_of(1) or '-', is_dead(1, '1'), is_dead(77777)", "--pid", "--fork") == "- None None"


def test_where_a_machine_cannot_be_named_a_holder_of_its_name_is_its_own(monkeypatch):
    """N03: without /proc, each look gave the machine another name, and a second manager of a process was refused for one in another container."""

    def hidden(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(lock_holder, "Path", hidden)
    assert this_machine() != this_machine()
    assert seen_from_here(myself(), this_machine()) == myself()
