"""A run on an emulator of Azure, over HTTP and through a proxy that fails; `make buckets` installs it."""

import base64
import datetime as dt
import hashlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import warnings
from contextlib import suppress

import pytest
import torch
from kit.backends.bucket_cases import Proxy, one_in_four
from obstore.store import AzureStore

import trainfold
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.core.errors import TrainfoldError
from trainfold.properties import contracts

PROGRAM = shutil.which("azurite-blob", path=os.environ.get("TRAINFOLD_AZURITE", os.environ["PATH"]))
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROGRAM is None, reason="needs azurite: `make buckets` installs it"),
]
ACCOUNT = "devstoreaccount1"  # that of every emulator, and its key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
RUNS = itertools.count()


def make_container(port):
    """Make the container ``bucket``; the client makes none."""
    date = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:2023-11-03"
    text = "PUT" + "\n" * 12 + f"{headers}\n/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signed = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/bucket?restype=container", method="PUT",
        headers={**dict(line.split(":", 1) for line in headers.split("\n")), "Authorization": f"SharedKey {ACCOUNT}:{signed}", "Content-Length": "0"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Of a server with a container named bucket."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--inMemoryPersistence"]  # fmt: skip
    folder = tmp_path_factory.mktemp("azurite")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    late = time.monotonic() + 60
    while True:
        with suppress(OSError):
            make_container(port)
            break
        assert process.poll() is None, (folder / "log").read_text()
        if time.monotonic() > late:
            process.kill()
            process.wait()
            pytest.fail("the server did not start")
        time.sleep(0.1)
    yield port
    process.kill()
    process.wait()


@pytest.fixture
def failing(port):
    """A proxy before that server."""
    one = Proxy(port)
    yield one
    one.close()


def azure_at(port, run=None):
    """A run in the container, by default one of its own."""
    run = f"runs/{next(RUNS)}" if run is None else run
    quick = {
        "init_backoff": dt.timedelta(milliseconds=1),
        "max_backoff": dt.timedelta(milliseconds=4),
        "base": 2,
    }
    client = AzureStore(
        "bucket", prefix=run, account_name=ACCOUNT, account_key=KEY, endpoint=f"http://127.0.0.1:{port}/{ACCOUNT}",
        client_options={"allow_http": True, "timeout": dt.timedelta(seconds=30)},
        retry_config={"max_retries": 12, "retry_timeout": dt.timedelta(seconds=60), "backoff": quick},
    )  # fmt: skip
    return ObjectStore(client, url=f"az://bucket/{run}")


def test_a_run_in_azure_keeps_the_contract(port):
    """C03: over HTTP."""
    contracts.check_store(lambda: azure_at(port))


def test_a_run_in_azure_keeps_the_contract_through_a_network_that_fails(failing):
    """C03: one request in four fails in one of nine ways."""
    failing.fault, _ = one_in_four(7)
    contracts.check_store(lambda: azure_at(failing.port))


@pytest.mark.parametrize("faults", [300])
def test_nothing_that_was_acknowledged_in_azure_is_lost(failing, faults):
    """C03, E01: saves, retention and resumes through a network that fails."""
    failing.fault, seen = one_in_four(faults)
    acknowledged = 0
    while len(seen) < faults:
        live = trainfold.attach(torch.nn.Linear(3, 3))
        with suppress(TrainfoldError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with trainfold.CheckpointManager(
                azure_at(failing.port, "runs/f"), every=1, keep_last=2, mode="sync"
            ) as manager:
                manager.restore(live)
                assert live.progress.step >= acknowledged, "an acknowledged checkpoint was not found"
                for _ in range(3):
                    live.advance(samples=1)
                    manager.step(live)
                    acknowledged = live.progress.step
    assert acknowledged > 3


def test_the_manager_of_a_large_file_reads_what_it_wrote(port):
    """A file of 20 MiB goes up in blocks, and its ranges come back."""
    store, model = azure_at(port), torch.nn.Linear(1 << 10, 5 << 10)
    live = trainfold.attach(model)
    live.advance(samples=1)
    state = live.capture()
    trainfold.save(state, store)
    found = trainfold.load(azure_at(port, store.url.removeprefix("az://bucket/")), like=state)
    assert torch.equal(found.model.params["weight"], model.weight)
