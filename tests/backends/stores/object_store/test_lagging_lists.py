"""A bucket whose lists lag: they show what there was some changes ago. Reads of one object do not lag."""

import random
import warnings

import pytest
import torch
from kit.backends.buckets.lagging_bucket import Lagging, opened
from obstore.store import MemoryStore

import trainfold
from trainfold.backends.stores.object_store import writer_lease
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.protocol import glimpse
from trainfold.core.errors import TrainfoldError
from trainfold.properties import contracts


@pytest.mark.parametrize("seed", range(3))
def test_a_bucket_whose_lists_lag_keeps_the_contract(seed):
    """C03: what a process has committed, written and deleted is in its lists."""
    contracts.check_store(lambda: opened(Lagging(MemoryStore(), seed)))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 100))])
def test_nothing_acknowledged_is_lost_when_machines_are_lost_and_lists_lag(seed, monkeypatch):
    """C03, E01: the next process resumes from the last checkpoint that was acknowledged, or from the one that was being committed."""
    monkeypatch.setattr(writer_lease, "is_dead", lambda pid, started: True)
    chance, api = random.Random(seed), Lagging(MemoryStore(), seed)
    acknowledged, saved = 0, {}
    for _ in range(8):
        api.left = float("inf")
        model = torch.nn.Linear(2, 2)
        live = trainfold.attach(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_by_another(api, acknowledged)
            try:
                with trainfold.CheckpointManager(opened(api), every=1, keep_last=2, mode="sync") as manager:
                    manager.restore(live)
                    assert live.progress.step in {acknowledged, acknowledged + 1}, "an acknowledged checkpoint is lost"
                    if live.progress.step in saved:
                        assert torch.equal(model.weight, saved[live.progress.step])
                    acknowledged = live.progress.step
                    api.left = chance.randrange(3, 40)
                    while True:
                        with torch.no_grad():
                            model.weight.add_(torch.randn(2, 2))
                        live.advance(samples=1)
                        saved[live.progress.step] = model.weight.detach().clone()
                        manager.step(live)
                        acknowledged = live.progress.step
            except TrainfoldError:
                continue
    assert acknowledged > 4


def read_by_another(api, acknowledged):
    """A process that only reads sees it too."""
    if acknowledged:
        like = trainfold.TrainState(trainer=trainfold.Progress())
        found = trainfold.load(opened(api), like=like, components=("trainer",))
        assert found.trainer.step in {acknowledged, acknowledged + 1}


class Empty(Lagging):
    """Its lists are those of a bucket in which nothing was put."""

    def list(self, store, prefix=None, **_):
        return [[]]


@pytest.mark.parametrize("end", ["given back", "killed"])
def test_a_writer_learns_from_the_lease_what_those_before_it_have_committed(monkeypatch, end):
    """E01: each passes on what it was given; one that was killed after a commit has named it before."""
    monkeypatch.setattr(writer_lease, "is_dead", lambda pid, started: True)
    client, names = MemoryStore(), []
    for step in range(1, 4):
        store = opened(Empty(client, 0))
        held = store.lock()
        held.__enter__()
        assert store.list() == names
        names.append(f"step-0000000{step}")
        store.commit(f"{names[-1]}/manifest.json", b"{}")
        if end == "given back":
            held.__exit__(None, None, None)
        else:
            store._lease._stop.set()
    assert opened(Empty(client, 0)).list() == names, "one that only reads asks too"


def test_files_of_other_ranks_that_a_list_lacks_are_asked_for():
    """E01: rank 0 commits what all ranks have written, although its list of the directory is older."""
    client = MemoryStore()
    one, other = opened(Lagging(client, 0)), ObjectStore(client, url="memory://run")
    other.write("step-1/b", [b"123"], size_bytes=3)
    assert one.list("step-1") == []
    seen = glimpse(one, "step-1")
    assert seen.size("step-1/b") == 3
    assert seen.read("step-1/b", start=1) == b"23"
    assert seen.size("step-1/c") is None
