"""A run in an object store keeps the contract of stores, in memory, over HTTP, and through a network that fails."""

import pytest
from kit.backends.buckets.proxy import FAULTS, one_in_four
from kit.backends.buckets.s3_cases import store_at
from obstore.store import MemoryStore

import trainfold
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts


def test_an_object_store_keeps_the_contract_in_memory():
    """C03: the same rules as for a disk."""
    contracts.check_store(lambda: ObjectStore(MemoryStore(), url="memory://run"))


def test_an_object_store_keeps_the_contract_over_http(s3):
    """C03: a real server, real connections."""
    contracts.check_store(lambda: store_at(s3.port))


@pytest.mark.parametrize("header", [b"if-none-match", b"if-match"])
def test_a_server_that_does_not_know_a_condition_is_refused_with_its_name(proxy, header):
    """C03: before anything is saved, and it leaves nothing there."""
    proxy.dropped = frozenset({header})
    store = store_at(proxy.port)
    with pytest.raises(InvalidArgument, match=f"^{store.url}: expected a store that refuses"):
        trainfold.save(TrainState(trainer=Progress(step=1)), store)
    assert store.list() == []
    assert store._bucket.below("") == {}


def test_an_object_store_keeps_the_contract_through_a_network_that_fails(proxy):
    """C03: one request in four is cut, lost after it was carried out, refused, late, cut in the middle, or sent twice."""
    proxy.fault, _ = one_in_four(7)
    contracts.check_store(lambda: store_at(proxy.port))
    assert len({each[-1] for each in proxy.requests}) == len(FAULTS) + 1
