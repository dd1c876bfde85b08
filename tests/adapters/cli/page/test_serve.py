"""`trainfold page RUN --serve`: who is answered, what is sent, and that reading ends with the last client."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from kit.adapters import cli_cases

from trainfold.adapters.cli.page import gather
from trainfold.adapters.cli.page.gather import PageReader
from trainfold.adapters.cli.page.live_page import LivePage
from trainfold.adapters.cli.page.serve import PageServer
from trainfold.backends.flight.journal_file import JournalFile
from trainfold.backends.flight.journals import JOURNAL
from trainfold.core.flight.journal_line import JournalLine

saved = cli_cases.saved
run = cli_cases.run


class Counted:
    """A reader that counts its looks."""

    def __init__(self, run):
        self._reader, self.looks = PageReader(run), 0

    def has_changed(self):
        self.looks += 1
        return self._reader.has_changed()

    def read(self):
        return self._reader.read()


@pytest.fixture
def served(run):
    reader = Counted(run)
    live = LivePage(reader, every_secs=0.02)
    with PageServer(live, 0) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
        thread.start()
        yield server, reader, run
        live.ends.set()
        server.shutdown()
        thread.join()


def asked(server, path, *, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    return connection.getresponse()


def path_of(server):
    return "/" + server.url.split("/", 3)[3]


def test_the_page_its_script_and_nothing_else_is_served(served):
    """W22: bound to the loopback; other machines' names, other addresses and directories get nothing."""
    server, _, run = served
    assert server.server_address[0] == "127.0.0.1"
    at, port = path_of(server), server.server_address[1]
    page = asked(server, at)
    text = page.read().decode()
    assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert '<script src="live.js"></script>' in text
    assert "script-src 'self'" in page.getheader("Content-Security-Policy")
    assert asked(server, f"{at}live.js").status == 200
    assert asked(server, at, host=f"localhost:{port}").status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        found = asked(server, at, host=host)
        assert found.status == 421, host
        assert str(run) not in found.read().decode()
    for path in (
        "/",
        "/live.js",
        "/x/",
        f"{at}../../etc/passwd",
        f"{at}run.json",
        f"{at[:-1]}",
        f"{at}%2e%2e/",
        f"/{'a' * 22}/events",
    ):
        assert asked(server, path).status == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, at, method=method).status == 501


def messages(response):
    """The messages of an event stream."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_what_changes_is_sent_and_reading_ends_with_the_client(served):
    """W22: it follows a run, section by section, and does not read for a client that has gone."""
    server, reader, run = served
    response = asked(server, f"{path_of(server)}events")
    assert response.getheader("Content-Type").startswith("text/event-stream")
    stream = messages(response)
    assert set(next(stream)["sections"]) == {
        "overview",
        "starts",
        "losses",
        "saves",
        "checkpoints",
        "findings",
        "sizes",
    }
    JournalFile(run / JOURNAL).append([JournalLine(1e9, "started", 0), JournalLine(1e9 + 1, "warned", detail="<odd>")])
    news = next(stream)["sections"]
    assert "&lt;odd&gt;" in news["findings"]
    assert "sizes" not in news
    response.close()
    latest = time.monotonic() + 5
    while time.monotonic() < latest:
        before = reader.looks
        time.sleep(0.15)
        if reader.looks == before:
            break
    assert reader.looks == before


def test_a_run_that_cannot_be_read_any_more_is_a_message_and_no_end(served):
    server, _, run = served
    stream = messages(asked(server, f"{path_of(server)}events"))
    next(stream)
    (run / "run.json").rename(run / "gone.json")
    assert "cannot be read" in next(stream)["text"]


@pytest.mark.long
def test_ctrl_c_ends_it_cleanly(run):
    process = subprocess.Popen(
        [sys.executable, "-m", "trainfold", "page", str(run), "--serve"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    url = process.stderr.readline().split()[0]  # the one line that it prints
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as idle:
        idle.send(b"GET /")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err == ""
    assert out == ""


@pytest.mark.parametrize("failing", ["open_run", "read_journal"])
def test_a_read_that_failed_once_is_made_again(run, monkeypatch, failing):
    """W22: after one failed read the page stayed as it was until the run changed again, which a run at its end never does."""
    JournalFile(run / JOURNAL).append([JournalLine(1e9, "started", 0)])
    reader = PageReader(run)
    live = LivePage(reader, every_secs=0.0)
    assert not live._look()[2]
    JournalFile(run / JOURNAL).append([JournalLine(1e9 + 1, "warned", detail="the news")])

    def fails(*_, **__):
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(gather, failing, fails)
    version, sections, problem = live._look()
    assert "Input/output error" in problem + sections["findings"]
    version, sections, problem = live._look()
    assert not problem
    assert "the news" in sections["findings"]
    assert live._look()[0] == version, "then it is not read again until something changes"
