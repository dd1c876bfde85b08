"""A bucket whose lists lag: they show what there was some changes ago. Reads of one object do not lag."""

import random
from collections import deque

import obstore

from trainfold.backends.stores.object_store.object_store import ObjectStore

LAG = 6


class Lagging:
    """The calls of obstore on one bucket, whose lists are up to some changes old; it fails from a change on, as if the machine were lost."""

    def __init__(self, client, seed, lag=LAG):
        self.client, self.exceptions, self.left = client, obstore.exceptions, float("inf")
        self._chance = random.Random(seed)
        self._states = deque([[]], maxlen=lag + 1)

    def __getattr__(self, verb):
        def call(store, *args, **kwargs):
            if verb in {"put", "delete"}:
                self.left -= 1
                if self.left < 0:
                    raise obstore.exceptions.GenericError("the machine is gone")
            found = getattr(obstore, verb)(store, *args, **kwargs)
            if verb in {"put", "delete"}:
                self._states.append([each for page in obstore.list(self.client) for each in page])
            return found

        return call

    def list(self, store, prefix=None, **_):
        start = f"{prefix}/" if prefix else ""
        return [[each for each in self._chance.choice(self._states) if each["path"].startswith(start)]]

    def list_with_delimiter(self, store, prefix=None):
        start, found = f"{prefix}/" if prefix else "", self.list(store, prefix)[0]
        below = {each["path"][len(start) :] for each in found}
        return {
            "objects": [each for each in found if "/" not in each["path"][len(start) :]],
            "common_prefixes": sorted({start + name.partition("/")[0] for name in below if "/" in name}),
        }


def opened(api):
    """The run, as a new process opens it."""
    store = ObjectStore(api.client, url="memory://run")
    store._bucket._api = api
    return store
