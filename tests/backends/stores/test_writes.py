"""The files of a rank become durable together: see `Writes`."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.backends.formats.native.writer import Writes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import SaveFailed
from trainfold.core.state.state import Progress, TrainState

contents = st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=9_000), max_size=4)


class Forwards:
    """Forwards to a store what it does not have itself."""

    def __init__(self, inner):
        self.inner, self.written = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        self.written.append(name)
        self.inner.write(name, parts, size_bytes=size_bytes)


def listed(store):
    return {name: store.read(f"d/{name}") for name in store.list("d")}


@given(files=contents, before=contents)
def test_the_store_holds_what_single_writes_would_have_left(tmp_path_factory, files, before):
    """C01: in a directory, in memory, and in a store of a user that has only a write."""
    for store in (LocalStore(tmp_path_factory.mktemp("run")), MemoryStore(), Forwards(MemoryStore())):
        for name, data in before.items():
            store.write(f"d/{name}", [data], size_bytes=len(data))
        with Writes(store) as writes:
            for name, data in files.items():
                writes.write(f"d/{name}", [data[:5], data[5:]], size_bytes=len(data))
            writes.finish()
        assert listed(store) == before | files


def test_a_block_that_does_not_finish_leaves_no_file_and_no_descriptor(tmp_path):
    """C15: the first file is whole, the second has too few bytes, and both are dropped."""
    store = LocalStore(tmp_path)
    open_before = {*Path("/proc/self/fd").iterdir()}

    def write_two():
        with Writes(store) as writes:
            writes.write("d/a", [b"12"], size_bytes=2)
            assert store.list("d") == []  # it has its name when it is durable
            writes.write("d/b", [b"1"], size_bytes=2)

    with pytest.raises(SaveFailed, match="2 bytes"):
        write_two()
    assert [*tmp_path.glob("d/*"), *tmp_path.glob("d/.*")] == []
    assert {*Path("/proc/self/fd").iterdir()} <= open_before


def test_a_sync_that_fails_names_its_file_and_the_files_after_it_are_dropped(tmp_path):
    """C15: a file whose sync failed is not synced again."""
    store, synced = LocalStore(tmp_path), []

    def fsync(fd):
        synced.append(fd)
        if len(synced) == 2:
            raise OSError(5, "a broken disk")

    def write_three():
        with Writes(store) as writes:
            for name in "abc":
                writes.write(f"d/{name}", [b"1"], size_bytes=1)
            writes.finish()

    with mock.patch.object(os, "fsync", fsync), pytest.raises(SaveFailed, match="d/b"):
        write_three()
    assert store.list("d") == ["a"]
    assert len(synced) == len(set(synced)) == 2


class Derived(LocalStore):
    def __init__(self, path):
        super().__init__(path)
        self.written = []

    def write(self, name, parts, *, size_bytes):
        self.written.append(name)
        super().write(name, parts, size_bytes=size_bytes)


@pytest.mark.parametrize("make", [lambda path: Forwards(LocalStore(path)), Derived])
def test_a_store_with_a_write_of_its_own_has_it_called(tmp_path, make):
    """The store that it forwards to, or derives from, could sync later, and it would not see what is written."""
    store, state = make(tmp_path), TrainState(trainer=Progress(step=1), extra={"w": torch.ones(3)})
    save(state, store)
    assert [name.partition("/")[2] for name in store.written] == ["w-00000-of-00001.safetensors"]
    assert torch.equal(load(store, like=state).extra["w"], torch.ones(3))


def test_a_save_writes_all_bytes_before_it_syncs_the_first_file(tmp_path):
    """One sync takes the other files along, and a disk that syncs does not write: between two files nothing is synced."""
    calls = []
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "rename")}

    def watched(name):
        def call(*arguments, **keywords):
            calls.append(name)
            return real[name](*arguments, **keywords)

        return call

    state = TrainState(trainer=Progress(step=1), extra={"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(7)})
    save(state, tmp_path / "run")
    state = state.evolve(trainer=Progress(step=2))
    with mock.patch.multiple(os, **{name: watched(name) for name in real}):
        save(state, tmp_path / "run")
    first = calls.index("fsync")
    assert set(calls[:first]) == {"pwrite"}
    assert calls[first : first + 6] == ["fsync", "rename"] * 3
