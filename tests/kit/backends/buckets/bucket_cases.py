"""What runs in buckets of tests have in common: their names, their clients' patience, counted requests, racing writers, and a manager whose network fails."""

import itertools
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import obstore
import torch

import trainfold
from kit.backends.buckets.proxy import one_in_four
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.core.errors import TrainfoldError

_RUNS = itertools.count()


def check_racing_writers(buckets):
    """Check the two promises of a commit, with a thread for each bucket: one of them creates, and no replacement is lost."""
    begin = threading.Barrier(len(buckets))

    def write(bucket):
        begin.wait()
        created = bucket.put_if("a", b"0", None) is not None
        done = 0
        while done < 5:
            found = bucket.get("a")
            done += bucket.put_if("a", b"%d" % (int(found.data) + 1), found.version) is not None
        return created

    with ThreadPoolExecutor(len(buckets)) as pool:
        assert sum(pool.map(write, buckets)) == 1
    assert buckets[0].get("a").data == b"%d" % (5 * len(buckets))


def check_no_loss(open_run, proxy, faults):
    """Check that nothing which a manager acknowledged is lost: saves, retention and resumes through a network of which every fourth request fails.

    Args:
        open_run: opens the run, through the proxy.
        proxy: it fails until there were so many faults.
        faults: how many.
    """
    fault, seen = one_in_four(faults)
    model = torch.nn.Linear(3, 3)
    acknowledged, saved = 0, {}
    while len(seen) < faults:
        live = trainfold.attach(model)
        proxy.fault = fault
        try:
            with (
                warnings.catch_warnings(),
                trainfold.CheckpointManager(open_run(), every=1, keep_last=2, mode="sync") as manager,
            ):
                warnings.simplefilter("ignore")
                manager.restore(live)
                step = live.progress.step
                assert step >= acknowledged, "an acknowledged checkpoint was not found"
                if step in saved:
                    assert torch.equal(model.weight, saved[step])
                for _ in range(3):
                    with torch.no_grad():
                        model.weight.add_(torch.randn(3, 3))
                    live.advance(samples=1)
                    saved[live.progress.step] = model.weight.detach().clone()
                    manager.step(live)
                    acknowledged = live.progress.step
        except TrainfoldError:
            continue  # the run's program is started again
        finally:
            model = torch.nn.Linear(3, 3)
    assert acknowledged >= faults // 100
    proxy.fault = lambda number, method, path: None
    live = trainfold.attach(model)
    with trainfold.CheckpointManager(open_run()) as manager:
        manager.restore(live)
    assert live.progress.step >= acknowledged


class Counting:
    """The calls of obstore, which appends (verb, key, range) of each to a list."""

    def __init__(self, calls):
        self.calls, self.exceptions = calls, obstore.exceptions

    def __getattr__(self, verb):
        def call(store, *args, **kwargs):
            found = getattr(obstore, verb)(store, *args, **kwargs)
            options = kwargs.get("options") or {}
            self.calls.append((verb, args[0] if args else None, options.get("range")))
            return found

        return call


def counted(client):
    """A run in a store of obstore, and the list of the requests that it makes."""
    store, calls = ObjectStore(client, url="memory://run"), []
    store._bucket._api = Counting(calls)
    return store, calls


def new_name():
    """The name of a run of its own."""
    return f"runs/{next(_RUNS)}-{time.time_ns()}"


def impatient(retries=12):
    """Settings of a client that tries again at once, and often."""
    quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=4), "base": 2}
    return {
        "client_options": {"allow_http": True, "timeout": timedelta(seconds=30)},
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=60), "backoff": quick},
    }
