"""Runs at ``gs://``, with the key of a service account, over a translation of Google's XML interface that is our own; `make buckets` installs what is behind it.

See `kit.backends.buckets.gcs_front` for what it proves, and what not. Through gcsfs, which speaks the interface that the emulator has, see test_filesystems.py.
"""

import pytest
import torch
from kit.backends.buckets import gcs_cases
from kit.backends.buckets.bucket_cases import check_no_loss, check_racing_writers, new_name
from kit.backends.buckets.proxy import Proxy, one_in_four

import trainfold
from trainfold.backends.stores.local import open_store
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.core.errors import CheckpointError, InvalidArgument, SaveFailed
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(gcs_cases.PROGRAM is None, reason="needs fake-gcs-server: `make buckets` installs it"),
]
STATE = TrainState(trainer=Progress(step=3))


@pytest.fixture(scope="module")
def gcs():
    """The server, with a bucket named bucket."""
    server = gcs_cases.Gcs()
    yield server
    server.close()


@pytest.fixture
def failing(gcs):
    """A proxy before it."""
    one = Proxy(gcs.port)
    yield one
    one.close()


@pytest.fixture
def account(gcs, tmp_path, monkeypatch):
    """The file of the service account, where the provider's own chain looks for it."""
    file = tmp_path / "account.json"
    file.write_text(gcs.front.account())
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    return file


def test_a_run_at_gs_keeps_the_contract(gcs, account):
    """C03: over HTTP, by its URL, each request signed by the account."""
    contracts.check_store(lambda: open_store(f"gs://bucket/{new_name()}"))
    assert gcs.front.unsigned == 0


def test_a_run_at_gs_keeps_the_contract_through_a_network_that_fails(gcs, failing):
    """C03: one request in four fails in one of nine ways."""
    failing.fault, seen = one_in_four(7)
    contracts.check_store(lambda: gcs.run(failing.port))
    assert len(set(seen)) == 9


@pytest.mark.parametrize("faults", [300])
def test_nothing_that_was_acknowledged_at_gs_is_lost(gcs, failing, faults):
    """C03, E01: saves, retention and resumes through a network that fails."""
    run = new_name()
    check_no_loss(lambda: gcs.run(failing.port, run), failing, faults)


def test_of_many_writers_at_gs_one_creates_and_no_replacement_is_lost(gcs):
    """C03: by x-goog-if-generation-match, with four threads."""
    run = new_name()
    buckets = [Bucket(gcs.client(run), "run") for _ in range(4)]
    check_racing_writers(buckets)


def test_a_large_file_goes_up_in_parts_and_its_ranges_come_back_from_gs(gcs):
    """N06: 20 MiB."""
    store, live = gcs.run(), trainfold.attach(torch.nn.Linear(1 << 10, 5 << 10))
    live.advance(samples=1)
    state = live.capture()
    trainfold.save(state, store)
    found = trainfold.load(gcs.run(run=store.url.removeprefix("gs://bucket/")), like=state)
    assert torch.equal(found.model.params["weight"], state.model.params["weight"])
    assert gcs.front.uploads == {}


def test_a_server_that_does_not_know_the_condition_is_refused(gcs, failing):
    """C03: before anything is saved."""
    failing.dropped = frozenset({b"x-goog-if-generation-match"})
    store = gcs.run(failing.port)
    with pytest.raises(InvalidArgument, match="expected a store that refuses"):
        trainfold.save(STATE, store)
    assert store.list() == []


def test_another_account_is_refused_and_its_key_is_not_shown(gcs, account):
    """C03: not known to the server."""
    other = gcs_cases.GcsFront(gcs.front.json_port)
    text = other.account(gcs.port)
    other.close()
    account.write_text(text)
    url = f"gs://bucket/{new_name()}"
    with pytest.raises((SaveFailed, CheckpointError)) as refused:
        trainfold.save(STATE, url)
    assert url in str(refused.value)
    assert "PRIVATE" not in str(refused.value)
    assert "Bearer" not in str(refused.value)
    gcs.front.unsigned = 0
