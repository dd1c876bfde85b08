"""Teeth of `check_store`: stores that lie are found out, by the rule that they break."""

import itertools
from contextlib import contextmanager

import pytest

from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import SaveFailed
from trainfold.core.layout.file_preference import FilePreference
from trainfold.properties import contracts


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
