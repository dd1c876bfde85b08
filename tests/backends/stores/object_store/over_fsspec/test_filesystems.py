"""Runs through s3fs, gcsfs and adlfs, on emulators of S3, Google Cloud Storage and Azure, and through a network that fails; `make buckets` installs them."""

import pytest
import torch
from kit.backends.buckets.bucket_cases import check_no_loss, check_racing_writers, new_name
from kit.backends.buckets.filesystem_cases import LIBRARIES, SERVERS, client_at, lacks, run_at
from kit.backends.buckets.proxy import Proxy, one_in_four

import trainfold
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.core.errors import SaveFailed, TrainfoldError
from trainfold.properties import contracts
from trainfold.stores import fsspec_store

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # of a file of gcsfs
]


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    """The name of each that is installed, with its server."""
    if lacks(request.param):
        pytest.skip(lacks(request.param))
    return request.param


@pytest.fixture(scope="module")
def port(library):
    """Of a server with a bucket named bucket."""
    server = SERVERS[library]()
    yield server.port
    server.close()


@pytest.fixture
def failing(port):
    """A proxy before that server."""
    one = Proxy(port)
    yield one
    one.close()


def test_a_run_through_a_filesystem_keeps_the_contract(library, port):
    """C03: over HTTP."""
    contracts.check_store(lambda: run_at(library, port))


def test_a_run_through_a_filesystem_keeps_the_contract_through_a_network_that_fails(library, failing):
    """C03: one request in four fails in one of nine ways."""
    failing.fault, seen = one_in_four(7)
    contracts.check_store(lambda: run_at(library, failing.port))
    assert len(set(seen)) == 9


@pytest.mark.parametrize("faults", [300])
def test_nothing_that_was_acknowledged_through_a_filesystem_is_lost(library, failing, faults):
    """C03, E01: saves, retention and resumes through a network that fails."""
    run = new_name()
    check_no_loss(lambda: run_at(library, failing.port, run), failing, faults)


def test_a_bucket_that_is_not_there_and_a_connection_that_is_cut_are_named(library, port, failing):
    """C03: no save and no list ends with an error of the library; only s3fs and adlfs say that a bucket is not there when they list."""
    failing.fault = lambda number, method, path: "cut"
    cut = run_at(library, failing.port)
    nowhere = fsspec_store(client_at(library, port).filesystem, "no-such-bucket/run")
    for store in (cut, nowhere):
        with pytest.raises(TrainfoldError):
            trainfold.save(trainfold.attach(torch.nn.Linear(1, 1)).capture(), store)
    with pytest.raises(TrainfoldError):
        cut.read("run.json")


def test_of_many_writers_one_creates_and_no_replacement_is_lost(library, port):
    """C03: the two promises of a commit, with four threads."""
    client = client_at(library, port)
    buckets = [Bucket(client, "run") for _ in range(4)]
    check_racing_writers(buckets)


def test_a_large_file_goes_up_in_parts_and_its_ranges_come_back(library, port):
    """N06: 20 MiB; and nothing is left where the parts end too early."""
    store, live = run_at(library, port), trainfold.attach(torch.nn.Linear(1 << 10, 5 << 10))
    live.advance(samples=1)
    state = live.capture()
    trainfold.save(state, store)
    found = trainfold.load(run_at(library, port, store.url.partition("bucket/")[2]), like=state)
    assert torch.equal(found.model.params["weight"], state.model.params["weight"])
    with pytest.raises(SaveFailed, match="parts of"):
        store.write("step-00000009/a", [bytes(17 << 20)], size_bytes=18 << 20)
    assert store.size("step-00000009/a") is None


def test_a_bucket_that_is_not_there_is_said_to_be(library, port):
    store = fsspec_store(run_at(library, port)._bucket._store.filesystem, "no-such-bucket/run")
    with pytest.raises(SaveFailed, match="create it, or correct its name"):
        store.commit("run.json", b"{}")


def test_a_cache_of_the_filesystem_hides_nothing(library, port):
    """C03: what another program has put since the filesystem looked."""
    client = client_at(library, port)
    ours, theirs = Bucket(client, "run"), Bucket(FsspecPrefix(client.filesystem, client.path), "run")
    ours.put("step-1/a", b"1")
    client.filesystem.ls(f"{client.path}/step-1")
    client.filesystem.find(client.path)
    theirs._store.filesystem = type(client.filesystem)(**client.filesystem.storage_options, skip_instance_cache=True)
    theirs.put("step-1/b", b"12")
    theirs.put("step-1/a", b"123")
    assert {key: found.size_bytes for key, found in ours.below("").items()} == {"step-1/a": 3, "step-1/b": 2}
    assert sorted(ours.names("step-1")[0]) == ["a", "b"]
    assert ours.head("step-1/a").size_bytes == 3
