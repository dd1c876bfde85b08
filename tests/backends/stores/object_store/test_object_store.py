"""A run in an object store keeps the contract of stores, in memory, over HTTP, and through a network that fails."""

import random

from kit.backends.bucket_cases import FAULTS, store_at
from obstore.store import MemoryStore

from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.properties import contracts


def test_an_object_store_keeps_the_contract_in_memory():
    """C03: the same rules as for a disk."""
    contracts.check_store(lambda: ObjectStore(MemoryStore(), url="memory://run"))


def test_an_object_store_keeps_the_contract_over_http(s3):
    """C03: a real server, real connections."""
    contracts.check_store(lambda: store_at(s3.port))


def test_an_object_store_keeps_the_contract_through_a_network_that_fails(proxy):
    """C03: one request in four is cut, lost after it was carried out, refused, late, cut in the middle, or sent twice."""
    chance = random.Random(7)
    proxy.fault = lambda number, method, path: chance.choice(FAULTS) if chance.random() < 0.25 else None
    contracts.check_store(lambda: store_at(proxy.port))
    assert len({each[-1] for each in proxy.requests}) == len(FAULTS) + 1
