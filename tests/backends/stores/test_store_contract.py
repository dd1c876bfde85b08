"""Every store keeps the contract."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.properties import contracts


def test_the_memory_store_keeps_the_contract():
    """O05: the storage protocol is a few verbs on names that are text."""
    contracts.check_store(MemoryStore)


def test_a_memory_store_with_a_clock_keeps_the_contract_and_tells_what_the_clock_said():
    """So a test of ages does not need the machine's clock."""
    ticks = itertools.count(1_800_000_000)
    contracts.check_store(lambda: MemoryStore(clock=lambda: float(next(ticks))))
    store = MemoryStore(clock=lambda: 1.8e9)
    store.commit("run.json", b"{}")
    assert store.committed_at("run.json") == 1.8e9
    store.delete("run.json")
    assert store.committed_at("run.json") is None
    assert MemoryStore().committed_at("run.json") is None


def test_a_local_store_tells_when_a_checkpoint_was_committed(tmp_path):
    """It reads the file's time, so a copy that preserves the times preserves the ages."""
    store = LocalStore(tmp_path / "run")
    store.commit("step-1/manifest.json", b"{}")
    os.utime(tmp_path / "run" / "step-1" / "manifest.json", (1, 1.5e9))
    assert store.committed_at("step-1/manifest.json") == 1.5e9
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert LocalStore(tmp_path / "copy").committed_at("step-1/manifest.json") == 1.5e9


def test_the_local_store_keeps_the_contract_on_a_disk(tmp_path):
    """C03: the same contract, on the real commit of this store."""
    counter = itertools.count()
    contracts.check_store(lambda: LocalStore(tmp_path / f"run-{next(counter)}"))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm, a tmpfs")
def test_the_local_store_keeps_the_contract_in_a_tmpfs():
    counter = itertools.count()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        contracts.check_store(lambda: LocalStore(f"{directory}/run-{next(counter)}"))


def test_the_local_store_keeps_the_contract_without_hard_links(tmp_path, monkeypatch):
    """C03: if the filesystem refuses links, a commit is a rename under the run's lock."""

    def no_link(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_link)
    counter = itertools.count()
    contracts.check_store(lambda: LocalStore(tmp_path / f"run-{next(counter)}"))
