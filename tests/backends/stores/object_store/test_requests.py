"""What a save, a resume and a list cost: counts of requests, which are what a bucket is slow at and charges for."""

import logging

import pytest
import torch
from kit.backends.buckets.bucket_cases import counted
from kit.backends.buckets.s3_cases import store_at
from obstore.store import LocalStore, MemoryStore

import trainfold
from trainfold.adapters.cli.locate import open_run
from trainfold.adapters.cli.ls import list_store
from trainfold.backends.stores.object_store import open_url, pieces_ahead
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.object_store.pieces_ahead import PiecesAhead
from trainfold.backends.stores.protocol import glimpse
from trainfold.core.state.state import Progress, TrainState
from trainfold.retention import make_best_record, save_best, updated
from trainfold.stores import TwoTiers


def trained(width=600):
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_save_costs_six_requests_besides_its_files_and_a_resume_few_more_than_its_ranges():
    """Whatever the run holds already; four requests more where an old checkpoint is deleted."""
    client = MemoryStore()
    store, calls = counted(client)
    live = trainfold.attach(*trained())
    costs = []
    with trainfold.CheckpointManager(store, every=1, keep_last=3, mode="sync") as manager:
        manager.restore(live)
        for _ in range(6):
            calls.clear()
            live.advance(samples=1)
            manager.step(live)
            costs.append(len(calls) - sum(".safetensors" in str(key) for verb, key, _ in calls if verb == "put"))
    assert max(costs[1:3]) <= 6
    assert max(costs) <= 11

    store, calls = counted(client)
    with trainfold.CheckpointManager(store, every=1, mode="sync") as manager:
        manager.restore(trainfold.attach(*trained()))
    assert len(calls) <= 30
    assert sum(verb == "list" for verb, *_ in calls) <= 6


def test_an_upload_after_a_rewind_costs_what_one_before_it_does(tmp_path):
    """What the rewind has left behind stays for good, and each upload read the best and wrote its pointer again for it."""
    far, calls = counted(MemoryStore())
    live, costs = trainfold.attach(*trained(3)), []
    for first in (0, 2):
        run = TwoTiers(tmp_path / "near", far)
        with trainfold.CheckpointManager(run) as manager:
            if first:
                manager.restore(live, step=first)
                live.advance(samples=1)
                live.advance(samples=1)
            for _ in range(4):
                live.advance(samples=1)
                manager.save(live)
                run.wait()
                costs.append(len(calls))
                calls.clear()
            wanted = make_best_record(metric="loss", direction="min")
            if not first:
                save_best(run, updated(wanted, {"loss": 0.5}, step=2))
    assert max(costs[6:]) <= max(costs[2:4])


def test_a_load_lists_the_run_once_and_asks_once_for_the_lease():
    """One list says which checkpoints there are and, for the attempt that follows, which files they have."""
    client = MemoryStore()
    store, calls = counted(client)
    live = trainfold.attach(*trained())
    trainfold.save(live.capture(), store)
    calls.clear()
    trainfold.load(store, like=live.capture())
    assert [key for verb, key, _ in calls if verb == "list"] == [None]
    assert [verb for verb, key, _ in calls if key == ".lease"] == ["get"]


def test_a_resume_reads_the_ranges_that_it_needs():
    """Of a component that is not asked for, only the header of its file."""
    client = MemoryStore()
    model, optimizer = trained()
    live = trainfold.attach(model, optimizer)
    store, calls = counted(client)
    trainfold.save(live.capture(), store)
    calls.clear()
    trainfold.load(store, like=live.capture(), components=("model",))
    read = {str(key) for verb, key, size in calls if verb == "get" and ".safetensors" in str(key) and size != (0, 4096)}
    assert {key.partition("/")[2].partition("-")[0] for key in read} <= {"model", "rng"}, (
        "a small file is read whole with its header"
    )
    needed = sum(each.nbytes for each in model.state_dict().values())
    assert (
        needed
        <= sum(size[1] - size[0] for verb, key, size in calls if verb == "get" and "model" in str(key))
        <= needed + 8192
    )


def test_ranges_that_touch_are_joined_in_whatever_pieces_they_are_read(monkeypatch):
    """Requests of one size, and one for what was passed already."""
    monkeypatch.setattr(pieces_ahead, "_PIECE_BYTES", 16 << 20)
    store, calls = counted(MemoryStore())
    data = torch.arange(20 << 18, dtype=torch.int32).numpy().tobytes()
    store.write("step-1/a", [data], size_bytes=len(data))
    calls.clear()
    found = memoryview(bytearray(len(data)))
    with store.reading("step-1/a", [(0, 1000), (1000, len(data))]) as read_into:
        for start in range(0, len(data), 300_000):
            read_into(found[start : start + 300_000], start)
        read_into(found[:10], 5)  # behind the others: a request of its own
    assert bytes(found[10:]) == data[10:]
    assert bytes(found[:10]) == data[5:15]
    *joined, passed = sorted((size for _, _, size in calls), key=lambda size: (size[0] == 5, size))
    assert joined == [(0, 16 << 20), (16 << 20, len(data))]
    assert passed == (5, 15)


class Given:
    """Helpers that note what they are given, and leave it to the caller."""

    def __init__(self):
        self.count = 0

    def give(self, task):
        self.count += 1
        return task


def ahead(directory, spans):
    """Ranges of an object of 9 MiB, which comes in chunks, and what is given to the helpers."""
    client, given = LocalStore(directory), Given()
    client.put("a", bytes(9 << 20))
    return PiecesAhead(Bucket(client, "memory://run"), "a", spans, given), given


def test_small_ranges_that_lie_apart_are_asked_for_together(tmp_path):
    """Each costs the time of an answer, whatever it has."""
    pieces, given = ahead(tmp_path, [(start, start + 100) for start in range(0, 9 << 20, 1 << 20)])
    pieces.read_into(memoryview(bytearray(100)), 0)
    assert given.count == 4
    pieces.read_into(memoryview(bytearray(100)), 1 << 20)
    assert given.count == 5
    pieces.read_into(memoryview(bytearray(100)), 8 << 20)  # passed over: not asked for
    assert given.count == 6
    pieces.close()


def test_the_next_large_range_is_asked_for_when_little_is_left_of_the_one_before_it(tmp_path, monkeypatch):
    """Requests that take turns on one network come no sooner, and their store has more to do."""
    monkeypatch.setattr(pieces_ahead, "_PIECE_BYTES", 6 << 20)
    pieces, given = ahead(tmp_path, [(0, 9 << 20)])
    room = memoryview(bytearray(1 << 20))
    counts = []
    for start in range(0, 9 << 20, len(room)):
        pieces.read_into(room, start)
        counts.append(given.count)
    assert counts == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    pieces.close()


@pytest.mark.parametrize("checkpoints", [10, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_a_list_of_many_checkpoints_costs_few_lists_and_a_head_for_each(checkpoints, proxy, monkeypatch):
    """`trainfold ls`, over HTTP: at most 20 requests of listing, and as many heads as it shows."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    store = store_at(proxy.port)
    for step in range(1, checkpoints + 1):
        trainfold.save(TrainState(trainer=Progress(step=step)), store)
    again = store_at(proxy.port, run=store.url.removeprefix("s3://bucket/"))
    monkeypatch.setattr(open_url, "open_url", lambda place: again)
    proxy.requests.clear()
    answer = list_store(*open_run(store.url))
    assert len(answer.data["checkpoints"]) == checkpoints
    lists = [each for each in proxy.requests if "list-type=2" in each[1]]
    heads = [each for each in proxy.requests if "manifest.json" in each[1]]
    assert len(lists) <= 1 + checkpoints * 2 // 1000 <= 20
    assert len(heads) == checkpoints
    assert len(proxy.requests) <= len(lists) + len(heads) + 3  # the lease, run.json, a pointer


def test_a_glimpse_says_what_the_store_says_and_looks_again_after_a_write():
    """Every question that it answers from its list has the answer of the store."""
    store, _ = counted(MemoryStore())
    store.commit("run.json", b"{}")
    store.write("step-1/a", [b"123"], size_bytes=3)
    store.point("latest", "step-1")
    for seen in (glimpse(store), glimpse(store, "step-1")):
        for name in ("run.json", "step-1/a", "step-1/b", "none"):
            assert seen.size(name) == store.size(name)
            assert seen.committed_at(name) == store.committed_at(name)
        for directory in ("", "step-1", "none"):
            assert seen.list(directory) == store.list(directory)
        assert seen.read("step-1/a", start=1) == b"23"
        assert seen.pointers() == {"latest": "step-1"}
        with pytest.raises(trainfold.errors.CheckpointMissing):
            seen.read("step-1/b")
    seen = glimpse(store)
    assert seen.list() == ["run.json", "step-1"]
    seen.commit("step-1/manifest.json", b"{}")
    assert seen.list("step-1") == ["a", "manifest.json"]
    seen.delete("step-1/")
    assert seen.list() == ["run.json"]


def test_of_a_run_with_very_many_files_only_what_is_asked_for_is_listed(monkeypatch):
    """A run with more objects than a few lists can show is looked at by names, as before."""
    from trainfold.backends.stores.object_store import object_store

    monkeypatch.setattr(object_store, "_MOST_LISTED", 2)
    store, calls = counted(MemoryStore())
    for number in range(4):
        store.write(f"step-1/{number}", [b"1"], size_bytes=1)
    seen = glimpse(store)
    calls.clear()
    assert seen.list("step-1") == ["0", "1", "2", "3"]
    assert seen.size("step-1/2") == 1
    assert seen.pointers() == {}
