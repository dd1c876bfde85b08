"""What is read of an object that was replaced after the list is that of one version, and all of it."""

import itertools

import pytest
from obstore.store import MemoryStore

from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.object_store.small_reads import SmallReads

SIZES = (0, 10, 4 << 10, 16 << 10, (16 << 10) + 1, 40_000)
SPANS = ((0, None), (0, 4), (0, 4 << 10), (5, 20), (7, None), (5_000, 30_000), (20_000, None))


def contents(size, mark):
    return (b"%08d" % mark * (size // 8 + 1))[:size]


@pytest.mark.parametrize(("size", "then"), list(itertools.product(SIZES, SIZES)))
def test_an_object_that_was_replaced_after_the_list_is_read_as_it_is(size, then):
    """R04: it was cut to the size that the list had, such as a log of a run in a bucket, and stayed so for later reads."""
    bucket = Bucket(MemoryStore(), "memory://run")
    old, new = contents(size, 1), contents(then, 2)
    bucket.put("a", old)
    listed = bucket.below("")["a"]
    bucket.put("a", new)
    for start, stop in SPANS:
        reads = SmallReads(bucket)
        assert reads.read("a", listed, start, stop) == new[start:stop]
        assert reads.read("a", bucket.below("")["a"], start, stop) == new[start:stop]


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_small_object_is_read_once_for_each_version(size, monkeypatch):
    """N06: and one that has not changed costs one request."""
    bucket, asked = Bucket(MemoryStore(), "memory://run"), []
    bucket.put("a", contents(size, 1))
    listed, get = bucket.below("")["a"], bucket.get
    monkeypatch.setattr(
        Bucket, "get", lambda self, key, *, start=0, stop=None: asked.append(key) or get(key, start=start, stop=stop)
    )
    reads = SmallReads(bucket)
    for _ in range(3):
        assert reads.read("a", listed, 2, 9) == contents(size, 1)[2:9]
    assert len(asked) == 1
