"""Files that belong to a checkpoint: their bytes at the moment of the save, confined, bounded, and put into a directory whole."""

import errno
import os
import socket
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.runs.api import save
from trainfold.backends.side import file_reads
from trainfold.backends.side.checkpoint_files import read_side_files, write_side_files
from trainfold.backends.side.side_files import SideFiles
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.protocol import Store
from trainfold.backends.weights.hub_files import HubFiles
from trainfold.core.errors import CheckpointHostile, CheckpointMissing, InvalidArgument, InvalidState, UnknownComponent
from trainfold.core.state.state import OfRankZero, Opaque, Progress, TrainState


def saved(store: Store, step: int, **extra):
    save(TrainState(trainer=Progress(step=step), extra=extra), store)


def held(files):
    return {name: bytes(data.tolist()) for name, data in files.capture().value.value["files"].items()}


NAMES = st.sampled_from(["a", "b/c", "b/d.json"])
MOVES = st.one_of(
    st.tuples(st.just("write"), NAMES, st.binary(max_size=3)),
    st.tuples(st.just("rename"), NAMES, st.binary(max_size=3)),
    st.tuples(st.just("remove"), NAMES, st.just(b"")),
    st.tuples(st.just("save"), NAMES, st.just(b"")),
)


@settings(deadline=None, max_examples=60)
@given(moves=st.lists(MOVES, max_size=8), changes=st.booleans())
def test_a_checkpoint_has_the_files_of_its_moment_or_those_of_the_start(tmp_path_factory, moves, changes):
    """C13: declared files are saved with the checkpoint, whatever happens to them between two saves. A plain dict is the model."""
    top, store = tmp_path_factory.mktemp("files"), MemoryStore()
    (top / "first").write_bytes(b"1")
    model = {"first": b"1"}
    files, first, kept = SideFiles(top, changes=changes), dict(model), {}
    held(files)
    for step, (move, name, data) in enumerate(moves):
        place = top / name
        if move == "save":
            old = mock.patch.object(file_reads.time, "time_ns", return_value=1 << 62)  # every stamp is
            with old, mock.patch("trainfold.backends.side.side_files.warn_for_all"):
                saved(store, step, notes=files.capture())
            kept[step] = {f"notes/{each}": data for each, data in (model if changes else first).items()}
        elif move == "remove":
            place.unlink(missing_ok=True)
            model.pop(name, None)
        else:
            place.parent.mkdir(exist_ok=True)
            written = place if move == "write" else top.parent / "staged"
            written.write_bytes(data)
            written.replace(place)
            model[name] = data
    for step, expected in kept.items():
        assert read_side_files(store, step=step) == expected


def test_a_file_is_read_again_only_if_it_has_changed_and_never_while_it_does(tmp_path, monkeypatch):
    """A file whose stamp is too young to show another write is read again; one that is written at each attempt is refused."""
    place, reads = tmp_path / "a", []
    place.write_bytes(b"12")
    real = file_reads._bytes_of

    def read(fd, size_bytes):
        reads.append(size_bytes)
        return real(fd, size_bytes)

    monkeypatch.setattr(file_reads, "_bytes_of", read)
    files = SideFiles({"a": place}, changes=True)
    for times, old in ((1, False), (2, False), (3, True), (3, True)):
        monkeypatch.setattr(file_reads.time, "time_ns", lambda old=old: (1 << 62) if old else 0)
        assert held(files) == {"a": b"12"}
        assert len(reads) == times

    def torn(fd, size_bytes):
        found = real(fd, size_bytes)
        place.write_bytes(found + b"3")
        return found

    place.write_bytes(b"1")
    monkeypatch.setattr(file_reads, "_bytes_of", torn)
    with pytest.raises(InvalidState, match=r"stays as it is.*3 attempts"):
        files.capture()
    monkeypatch.setattr(file_reads, "_bytes_of", real)
    assert held(files) == {"a": b"1333"}


def test_what_is_not_a_file_of_the_run_is_refused_by_name(tmp_path):
    """C13, R08: no link out of the directory, no pipe, no name that leads elsewhere; and a bound on their size."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"123")
    (tmp_path / "in" / "same").symlink_to("a")
    assert set(held(SideFiles(tmp_path / "in"))) == {"a", "same"}
    with pytest.raises(InvalidState, match=r"same: expected at most 1 bytes.*found 3.*max_bytes="):
        SideFiles(tmp_path / "in", max_bytes=4).capture()
    for to, found in (("nowhere", "a link to nothing"), (".", "a link to a directory")):
        (tmp_path / "in" / "odd").symlink_to(to)
        with pytest.raises(InvalidState, match=f"odd: .*{found}"):
            SideFiles(tmp_path / "in").capture()
        (tmp_path / "in" / "odd").unlink()
    (tmp_path / "out").write_bytes(b"secret")
    (tmp_path / "in" / "link").symlink_to("../out")
    with pytest.raises(CheckpointHostile, match=r"link: .*a link to .*out"):
        SideFiles(tmp_path / "in").capture()
    assert held(SideFiles({"x": tmp_path / "in" / "link"})) == {"x": b"secret"}  # named by the user
    os.mkfifo(tmp_path / "pipe")
    for place, found in ((tmp_path / "pipe", "special file"), (tmp_path / "no", "nothing"), (tmp_path, "directory")):
        with pytest.raises(InvalidState, match=f"{place.name}: .*{found}"):
            SideFiles({"a": place}).capture()
    for odd in ("../x", "/x", "a//b", "", "a\0", ".", "a\\b", "x" * 256):
        with pytest.raises(InvalidArgument, match="relative path"):
            SideFiles({odd: tmp_path / "out"})
    for odd in ({"a": tmp_path, "a/b": tmp_path}, 3, {}, ["a"]):
        with pytest.raises(InvalidArgument, match=r"SideFiles\.files"):
            SideFiles(odd)


def test_a_directory_is_taken_whole_or_refused_by_the_name_of_what_cannot_be_taken(tmp_path, monkeypatch):
    """C13: a pipe, a socket and a directory that could not be read were left out without a word."""
    below = tmp_path / "in" / "below"
    below.mkdir(parents=True)
    (tmp_path / "in" / "a").write_bytes(b"1")
    (tmp_path / "in" / "link").symlink_to("below/odd")

    def bind(path):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))

    for make in (os.mkfifo, bind):
        make(below / "odd")
        with pytest.raises(InvalidState, match=r"link: .*a link to a special file"):
            SideFiles(tmp_path / "in").capture()
        with pytest.raises(InvalidState, match=r"below/odd: .*a special file, such as a pipe.*; remove it, or name"):
            SideFiles(tmp_path / "in" / "below").capture()
        (below / "odd").unlink()
    (tmp_path / "in" / "link").unlink()
    real = os.scandir

    def refused(path, *, with_errno):
        if path == str(below):
            raise OSError(with_errno, os.strerror(with_errno), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", partial(refused, with_errno=errno.EACCES))
    with pytest.raises(InvalidState, match="below: expected a directory that can be read, found Permission"):
        SideFiles(tmp_path / "in").capture()
    monkeypatch.setattr(os, "scandir", partial(refused, with_errno=errno.ENOENT))
    assert held(SideFiles(tmp_path / "in")) == {"a": b"1"}, "removed meanwhile"


def test_files_of_a_checkpoint_are_put_into_a_directory_whole_or_not_at_all(tmp_path, monkeypatch):
    """C13: also those that a hub directory had beside its weights; nothing that is there is overwritten."""
    (tmp_path / "in").mkdir()
    for name, data in (("tokenizer.json", b"{}"), ("empty", b"")):
        (tmp_path / "in" / name).write_bytes(data)
    hub, store = HubFiles("tokenizer*"), MemoryStore()
    hub.take(tmp_path / "in")
    deep = SideFiles({"1_Pooling/config.json": tmp_path / "in" / "tokenizer.json", "b": tmp_path / "in" / "empty"})
    saved(store, 3, words=Opaque(hub.state_dict()), deep=deep.capture())
    out = tmp_path / "out"
    expected = {"words/tokenizer.json": b"{}", "deep/1_Pooling/config.json": b"{}", "deep/b": b""}
    real = os.fsync
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(5, "the disk")))
    with pytest.raises(Exception, match="the disk"):
        write_side_files(store, out)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    monkeypatch.setattr(os, "fsync", real)
    for _ in range(2):
        assert {each.path for each in write_side_files(store, out)} == set(expected)
        assert {name: (out / name).read_bytes() for name in expected} == expected == read_side_files(store)
    assert [each.name for each in write_side_files(store, tmp_path / "one", components=["words"])] == ["tokenizer.json"]
    (out / "deep" / "b").write_bytes(b"1")
    with pytest.raises(InvalidArgument, match="nothing is overwritten"):
        write_side_files(store, out)
    with pytest.raises(UnknownComponent):
        read_side_files(store, components=["wrds"])
    with pytest.raises(CheckpointMissing, match=r"SideFiles\(\.\.\.\)"):
        read_side_files(store, components=["trainer"])


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a/b/"])
def test_a_name_in_a_checkpoint_that_leads_out_of_the_directory_is_hostile(tmp_path, name):
    """R08: no file is written elsewhere, also if the manifest is well made."""
    store = MemoryStore()
    saved(store, 1, notes=OfRankZero(Opaque({"files": {name: torch.zeros(2, dtype=torch.uint8)}})))
    with pytest.raises(CheckpointHostile, match="do not use this checkpoint"):
        write_side_files(store, tmp_path / "out")
    assert not list(tmp_path.iterdir())
