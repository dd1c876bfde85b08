"""The store in memory: its log, its faults, and the disk states that crashes leave."""

import errno
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.stores.memory import CrashAt, ErrorAt, MemoryStore, SimulatedCrash, read_only
from trainfold.core.digest import digest_of
from trainfold.core.errors import NoSpace, NotWritable, RunLocked, SaveFailed

MANIFEST = "step-1/manifest.json"


def save(store, step=1, data=b"weights"):
    """A minimal save: a data file, then the commit."""
    store.write(f"step-{step}/a", [data[:3], data[3:]], size_bytes=len(data))
    store.commit(f"step-{step}/manifest.json", digest_of(data).encode())


def whole_steps(store):
    """The steps that a reader accepts: their manifest names the digest that the data file has."""
    found = []
    for directory in store.list():
        if "manifest.json" in store.list(directory):
            claimed = store.read(f"{directory}/manifest.json").decode()
            assert digest_of(store.read(f"{directory}/a")) == claimed, "a committed checkpoint is torn"
            found.append(directory)
    return found


def test_the_log_says_in_order_what_was_done():
    store = MemoryStore()
    save(store)
    assert [str(effect) for effect in store.effects] == [
        "begin step-1/a",
        "part step-1/a 3 bytes",
        "part step-1/a 4 bytes",
        "finish step-1/a",
        "sync step-1",
        "sync .",
        f"commit {MANIFEST} 37 bytes",
        "sync step-1",
    ]
    assert "<3 bytes>" in repr(store.effects[1])


@given(steps=st.integers(1, 4), data=st.data())
def test_from_any_crash_what_was_acknowledged_is_whole_and_nothing_torn_is_visible(steps, data):
    """C01: a checkpoint becomes visible only by one atomic commit after every file is durable."""
    store = MemoryStore()
    acknowledged = {}
    for step in range(1, steps + 1):
        save(store, step, bytes([step]) * 10)
        acknowledged[f"step-{step}"] = len(store.effects)
    length = data.draw(st.integers(0, len(store.effects)))
    for kwargs in ({}, {"keep_unsynced": True}, {"torn_write": True}):
        seen = whole_steps(store.after_crash(length, **kwargs))
        assert {name for name, at in acknowledged.items() if at <= length} <= set(seen)


def test_every_crash_during_a_replacement_leaves_the_old_or_the_new():
    """C08: re-saving a step has no window in which neither exists."""
    store = MemoryStore()
    save(store, data=b"old bytes")
    before = len(store.effects)
    store.write("step-1/b", [b"new bytes"], size_bytes=9)
    old = store.read(MANIFEST)
    store.commit(MANIFEST, digest_of(b"new bytes").encode(), replaces=digest_of(old))
    for length in range(before, len(store.effects) + 1):
        for kwargs in ({}, {"keep_unsynced": True}, {"torn_write": True}):
            after = store.after_crash(length, **kwargs)
            claimed = after.read(MANIFEST).decode()
            assert claimed in {digest_of(after.read(f"step-1/{name}")) for name in after.list("step-1")}


def test_every_crash_during_a_deletion_leaves_no_committed_half():
    """C02: after a kill during its deletion, a checkpoint is either whole or gone."""
    store = MemoryStore()
    save(store)
    before = len(store.effects)
    store.delete("step-1/")
    states = [state for _, state in store.crash_states()]
    assert len(states) == 3 * (len(store.effects) + 1)
    for state in states[3 * before :]:
        whole_steps(state)
    assert whole_steps(states[-1]) == []


def test_an_unsynced_name_may_be_lost_and_a_write_may_be_torn():
    store = MemoryStore()
    store.write("step-1/a", [b"123456", b"789"], size_bytes=9)
    assert store.after_crash(4).list() == []
    assert store.after_crash(4, keep_unsynced=True).read("step-1/a") == b"123456789"
    assert store.after_crash(2, torn_write=True).read("step-1/a") == b"1234"
    assert store.after_crash(2).list() == []


def test_after_a_crash_the_store_is_dead_and_a_survivor_is_free():
    store = MemoryStore(fault=CrashAt(5))
    with pytest.raises(SimulatedCrash, match="before effect 5: sync"), store.lock():
        save(store)
    for verb in (store.list, lambda: store.read("step-1/a"), lambda: store.reserve(1)):
        with pytest.raises(SimulatedCrash):
            verb()
    survivor = store.after_crash(len(store.effects), keep_unsynced=True)
    with survivor.lock():
        save(survivor)
    assert whole_steps(survivor) == ["step-1"]


@given(index=st.integers(0, 7), code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS]))
def test_an_error_at_any_effect_fails_the_save_by_name_and_keeps_what_was_there(index, code):
    """C15: a save that meets a full, read-only or broken disk fails, and the earlier checkpoint stays."""
    clean = MemoryStore()
    save(clean)
    before = len(clean.effects)

    def fault(at, effect):
        return ErrorAt(before + index, code)(at, effect)

    store = MemoryStore(fault=fault)
    save(store)
    kind = {errno.EIO: SaveFailed, errno.ENOSPC: NoSpace, errno.EROFS: NotWritable}[code]
    with pytest.raises(kind) as caught:
        save(store, 2)
    assert type(caught.value) is kind
    assert "memory:" in caught.value.where
    assert "step-1" in whole_steps(store)


def test_a_full_store_takes_no_more_and_leaves_nothing_of_what_failed():
    store = MemoryStore(capacity_bytes=60)
    save(store)
    with pytest.raises(NoSpace, match="expected 1000 bytes free, found 16"):
        store.reserve(1000)
    with pytest.raises(NoSpace):
        store.write("step-2/a", [b"x" * 10, b"x" * 10], size_bytes=20)
    store.reserve(16)
    assert store.list() == ["step-1"]
    assert whole_steps(store) == ["step-1"]


def test_a_disk_that_stays_full_can_still_be_cleaned():
    store = MemoryStore(fault=ErrorAt(8, errno.ENOSPC, lasting=True))
    save(store)
    for _ in range(2):
        with pytest.raises(NoSpace):
            save(store, 2)
    store.point("latest", "step-2")  # a hint is best effort: it must not make a save fail
    assert store.point_target("latest") is None
    store.delete("step-1/")
    assert store.list() == []


def test_a_read_only_store_refuses_before_anything_is_written():
    store = MemoryStore(fault=read_only)
    with pytest.raises(NotWritable):
        store.reserve(1)
    with pytest.raises(NotWritable):
        save(store)
    assert store.effects == ()


def test_a_fault_may_be_any_error_and_does_not_kill_the_store():
    store = MemoryStore(fault=lambda index, effect: KeyError("mine") if index == 1 else None)
    with pytest.raises(KeyError, match="mine"):
        save(store)
    save(store)
    assert whole_steps(store) == ["step-1"]


def test_the_lock_is_one_for_all_threads():
    store = MemoryStore()
    found = []

    def other():
        with pytest.raises(RunLocked, match="a writer of this process"), store.lock():
            pass
        found.append(True)

    with store.lock():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [True]
