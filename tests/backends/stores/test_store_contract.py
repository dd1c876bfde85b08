"""Every store keeps the contract, and the contract finds stores that do not."""

import itertools
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import SaveFailed
from trainfold.core.layout.file_preference import FilePreference
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


class Liar:
    """Passes every call to a memory store; each subclass breaks one rule."""

    def __init__(self):
        self.inner = MemoryStore()

    def __getattr__(self, name):
        return getattr(self.inner, name)


class LastCommitWins(Liar):
    def commit(self, name, data, *, replaces=None):
        self.inner.delete(name)
        self.inner.commit(name, data)


class KeepsPartsUntilTheEnd(Liar):
    def write(self, name, parts, *, size_bytes):
        self.inner.write(name, list(parts), size_bytes=size_bytes)


class ShortReads(Liar):
    def read_into(self, name, buffer, *, start=0):
        data = self.inner.read(name, start=start, stop=start + len(buffer))
        buffer[: len(data)] = data


class ListsInAnyOrder(Liar):
    def list(self, prefix=""):
        return self.inner.list(prefix)[::-1]


class FinishesWhatIsDropped(Liar):
    @contextmanager
    def written_unsynced(self, name, parts, *, size_bytes):
        self.inner.write(name, parts, size_bytes=size_bytes)
        yield lambda: None


class DropsWhatIsFinished(Liar):
    @contextmanager
    def written_unsynced(self, name, parts, *, size_bytes):
        yield lambda: self.inner.write(name, parts, size_bytes=size_bytes)
        self.inner.delete(name)


class ReservesNothing(Liar):
    def reserve(self, size_bytes):
        pass


class ReservesByAnotherError(Liar):
    def reserve(self, size_bytes):
        if size_bytes > 1 << 40:
            raise SaveFailed("here", expected="less", found=size_bytes, fix="save less")


class ReservesInFiles(Liar):
    """It writes a file to try whether it can, and leaves the file behind if there is not enough room."""

    def reserve(self, size_bytes):
        self.inner.write("step-1/probe", [b"1"], size_bytes=1)
        self.inner.reserve(size_bytes)
        self.inner.delete("step-1/probe")


class ReservesByMakingRoom(Liar):
    def reserve(self, size_bytes):
        for name in self.inner.list():
            self.inner.delete(f"{name}/")
        self.inner.reserve(size_bytes)


class TellsMilliseconds(Liar):
    def committed_at(self, name):
        return None if self.inner.size(name) is None else 1.8e12


class TellsTheTimeOfTheLastWrite(Liar):
    """It reports the time of a directory, which each new file in it changes."""

    def committed_at(self, name):
        told = self.inner.size(name) and 1.8e9 + sum(map(len, map(self.inner.list, self.inner.list())))
        return told and float(told)


class PrefersAnotherSizeEachTime(Liar):
    @property
    def prefers(self):
        self.inner.asked = getattr(self.inner, "asked", 0) + 1
        return FilePreference(object_bytes=self.inner.asked)


class PrefersANumber(Liar):
    prefers = 1 << 20


class KeepsTheTimeOfWhatIsDeleted(Liar):
    def __init__(self):
        super().__init__()
        self.times = {}

    def commit(self, name, data, *, replaces=None):
        self.inner.commit(name, data, replaces=replaces)
        self.times[name] = 1.8e9

    def committed_at(self, name):
        self.inner.size(name)
        return self.times.get(name)


class Young(Liar):
    """Its clock goes on with each commit, also with one that is to be as old as what it replaces."""

    def __init__(self):
        self.inner = MemoryStore(clock=map(float, itertools.count(1_800_000_000)).__next__)

    def commit_as_old(self, name, data, *, replaces):
        self.inner.commit(name, data, replaces=replaces)


class ReplacesAnything(Liar):
    def commit_as_old(self, name, data, *, replaces):
        self.inner.commit(name, data, replaces=digest_of(self.inner.read(name)))


@pytest.mark.parametrize(
    ("liar", "rule"),
    [
        (TellsMilliseconds, r"the time of a commit .*: .*can be seconds since 1970"),
        (TellsTheTimeOfTheLastWrite, r"the time of a commit .*: .*time after other things"),
        (KeepsTheTimeOfWhatIsDeleted, r"the time of a commit .*: .*time after its deletion"),
        (Young, "a commit may be as old as what it replaces: .*time: expected"),
        (ReplacesAnything, "a commit may be as old as what it replaces: .*expected CommitConflict"),
        (LastCommitWins, "a commit happens once"),
        (PrefersAnotherSizeEachTime, "the files that it prefers are sizes or not said: .*asked again"),
        (PrefersANumber, "the files that it prefers are sizes or not said: .*FilePreference"),
        (KeepsPartsUntilTheEnd, "one buffer can serve for all parts"),
        (ShortReads, "ranges are slices"),
        (ListsInAnyOrder, "names are listed one level at a time"),
        (FinishesWhatIsDropped, "files that are synced later are whole or gone: .*not finished"),
        (DropsWhatIsFinished, "files that are synced later are whole or gone: .*names afterwards"),
        (ReservesNothing, r"room is checked before writing: .*expected NoSpace, and nothing was raised"),
        (ReservesByAnotherError, "room is checked before writing: .*expected NoSpace, found SaveFailed"),
        (ReservesInFiles, "room is checked before writing: .*names"),
        (ReservesByMakingRoom, "room is checked before writing: .*names"),
    ],
)
def test_a_store_that_lies_is_caught_by_name(liar, rule):
    with pytest.raises(contracts.ContractBroken, match=rule):
        contracts.check_store(liar)
