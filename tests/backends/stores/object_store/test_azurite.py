"""A run on an emulator of Azure, over HTTP and through a proxy that fails; `make buckets` installs it."""

import pytest
import torch
from kit.backends.buckets.azure_cases import PROGRAM, AzureServer, azure_at, environ_of
from kit.backends.buckets.bucket_cases import check_no_loss, new_name
from kit.backends.buckets.proxy import Proxy, one_in_four
from kit.backends.tier_cases import lose_machines, state_at

import trainfold
from trainfold.core.format.fingerprint import fingerprint
from trainfold.properties import contracts
from trainfold.retention import keep_last
from trainfold.stores import TwoTiers

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROGRAM is None, reason="needs azurite: `make buckets` installs it"),
]


@pytest.fixture(scope="module")
def port():
    """Of a server with a container named bucket."""
    server = AzureServer()
    yield server.port
    server.close()


@pytest.fixture
def failing(port):
    """A proxy before that server."""
    one = Proxy(port)
    yield one
    one.close()


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
    run = new_name()
    check_no_loss(lambda: azure_at(failing.port, run), failing, faults)


def test_the_manager_of_a_large_file_reads_what_it_wrote(port):
    """A file of 20 MiB goes up in blocks, and its ranges come back."""
    store, model = azure_at(port), torch.nn.Linear(1 << 10, 5 << 10)
    live = trainfold.attach(model)
    live.advance(samples=1)
    state = live.capture()
    trainfold.save(state, store)
    found = trainfold.load(azure_at(port, store.url.removeprefix("az://bucket/")), like=state)
    assert torch.equal(found.model.params["weight"], model.weight)


@pytest.mark.filterwarnings(
    "ignore::trainfold.backends.runs.load.CheckpointPassedOver"
)  # of uploads that did not finish
def test_a_machine_with_a_far_tier_in_azure_loses_only_what_was_not_said_to_be_uploaded(failing, tmp_path):
    """SIGKILL at some request, and the disk is gone."""
    far = azure_at(failing.port)
    name = far.url.removeprefix("az://bucket/")
    lose_machines(failing, far.url, environ_of(failing.port), lambda: azure_at(failing.port, name), tmp_path, first=25)


def test_two_tiers_in_azure_are_one_run_through_a_network_that_fails(failing, tmp_path):
    """One request in four fails: the far tier has its retention, and the disk that is lost comes back with the same bits."""
    failing.fault, seen = one_in_four(11)
    name = azure_at(failing.port).url.removeprefix("az://bucket/")
    steps = [state_at(step) for step in (1, 2, 3)]
    run = TwoTiers(tmp_path / "a", azure_at(failing.port, name), keep_far=keep_last(2))
    with trainfold.CheckpointManager(run) as manager:
        for state in steps:
            manager.save(state)
    assert [each for each in sorted(azure_at(failing.port, name).list()) if each.startswith("step-")] == [
        "step-00000002",
        "step-00000003",
    ]
    with trainfold.CheckpointManager(TwoTiers(tmp_path / "b", azure_at(failing.port, name))) as manager:
        assert fingerprint(manager.load(state_at(0))) == fingerprint(steps[-1])
    assert len(seen) > 5
