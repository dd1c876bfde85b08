"""Archives of `torch.save` are read as Python's own reader of archives sees them, and refused where they grow, lie about their sizes or are cut off."""

import os
import zipfile
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import dcp_cases as cases
from kit.depth import IS_DEEP

from trainfold.backends.formats.torch_save import archive, tensor_parts
from trainfold.backends.formats.torch_save.archive import archive_values, read_archive
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointTorn, TrainfoldError
from trainfold.core.torch_files.stored_values import StoredTensor
from trainfold.weights import TorchFile

CASES = 50_000 if IS_DEEP else 300


def opened(path, then):
    with OpenFiles(path.parent) as files:
        return then(files.whole(path.name))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(6.0).view(2, 3), "step": 3}, path)
    return path


def test_members_are_those_that_another_reader_finds(saved):
    def members(file):
        return {name: each.read(0, each.size) for name, each in read_archive(file).items()}

    with zipfile.ZipFile(saved) as theirs:
        assert opened(saved, members) == {each.partition("/")[2]: theirs.read(each) for each in theirs.namelist()}


def rewritten(path, *, compression=zipfile.ZIP_STORED, extra=()):
    """The same members, written by another program."""
    with zipfile.ZipFile(path) as before:
        members = [(each, before.read(each)) for each in before.namelist()]
    with zipfile.ZipFile(path, "w", compression) as after:
        for name, data in [*members, *extra]:
            after.writestr(name, data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_grow_or_have_two_meanings_are_refused(saved):
    """U02: a compressed member could be of any size; of two with one name, programs take one or the other."""
    rewritten(saved)
    assert opened(saved, lambda file: archive_values(file, read_archive(file)))["step"] == 3
    rewritten(saved, extra=[("x/data.pkl", b"N.")])
    with pytest.raises(CheckpointHostile, match=r"another name for each member, found data\.pkl"):
        opened(saved, read_archive)


def test_a_compressed_member_is_refused(saved):
    """U02: a bomb of a few bytes is one of these."""
    rewritten(saved, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointHostile, match="members that are not compressed, as torch writes them, found x/data"):
        opened(saved, read_archive)


def test_a_tensor_that_is_larger_than_its_memory_is_refused(tmp_path):
    """U02: a view of one element can claim any size; torch would write out no more than the element."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(CheckpointHostile, match="a tensor inside its memory of 4 bytes"):
        TorchFile(path).specs()


def test_another_byte_order_and_a_missing_pickle_are_named(saved, monkeypatch):
    data = saved.read_bytes()
    saved.write_bytes(data.replace(b"little", b"biggie"))
    with pytest.raises(CheckpointDamaged, match="bytes in little-endian order"):
        TorchFile(saved).specs()
    saved.write_bytes(data.replace(b"data.pkl", b"data.pkx"))
    with pytest.raises(CheckpointDamaged, match=r"a data\.pkl of at most \d+ bytes, found none"):
        TorchFile(saved).specs()
    for size in (0, 10, 100, len(data) - 1):
        os.truncate(saved, 0)
        saved.write_bytes(data[:size])
        with pytest.raises(TrainfoldError):
            TorchFile(saved).specs()
    saved.write_bytes(data)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointTorn, match="expected 24 bytes"):
        cases.everything(TorchFile(saved, prefix=""))


def test_whichever_bytes_are_changed_it_is_read_or_refused(saved):
    """U02: fuzzed."""
    random, whole = Random(SystemRandom().getrandbits(32) if IS_DEEP else 3), saved.read_bytes()
    refused = 0
    for _ in range(CASES):
        data = bytearray(whole)
        for _ in range(random.choice([1, 1, 2, 4])):
            data[random.randrange(len(data))] = random.randrange(256)
        saved.write_bytes(data)
        try:
            cases.everything(TorchFile(saved))
        except TrainfoldError:
            refused += 1
    assert CASES / 5 < refused < CASES


@settings(max_examples=40)
@given(st.data(), cases.tensors())
def test_any_part_of_any_tensor_is_that_of_the_tensor(data, tensors):
    """M24: also of views: other strides, an offset, memory that two have."""
    state = dict(tensors)
    for name, each in tensors.items():
        if each.ndim >= 2:
            state[f"{name}.turned"] = each.transpose(0, 1)
        if each.ndim and each.shape[0] > 1:
            state[f"{name}.rest"] = each[1:]
        if each.is_complex():
            state[f"{name}.conj"] = each.conj()
            state[f"{name}.conj.imag"] = each.clone().conj().imag  # has a bit for its sign
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        torch.save({"state": {"deep": state}, "epoch": 1}, path)
        check_parts(data, TorchFile(path, prefix="state.deep"), state)


def check_parts(data, source, state):
    assert source.specs() == cases.specs_of(state)
    for name, each in state.items():
        box = data.draw(cases.box_in(each.shape))
        wanted = {name: cases.Wanted(source.specs()[name].dtype, tuple(each.shape), box)}
        part = each[tuple(slice(*side) for side in box)].resolve_conj().resolve_neg()
        assert cases.all_bits(dict(source.supply(wanted))) == cases.all_bits({name: part})


class Memory:
    """The bytes of a storage, which notes how many are read at once."""

    name, size = "memory", 4 * 10_000

    def __init__(self):
        self.whole = torch.arange(10_000.0)
        self.lengths = []

    def read_into(self, start, memory):
        self.lengths.append(len(memory))
        memory[:] = self.whole.numpy().tobytes()[start : start + len(memory)]


@given(st.data(), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 700)), min_size=1, max_size=4))
def test_a_part_of_a_view_is_read_in_short_pieces(data, dims):
    """Of a view of a large memory, no more than a piece is in memory, whatever its strides."""
    member, shape, strides = Memory(), tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    stored = StoredTensor("0", "float32", shape, strides, 7, member.size)
    box = data.draw(cases.box_in(shape))
    into = torch.empty([stop - start for start, stop in box])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_parts, "_PIECE_BYTES", 240)
        tensor_parts.read_box(member, stored, box, into)
    part = tuple(slice(*side) for side in box)
    assert torch.equal(into, member.whole[7:].as_strided(shape, strides)[part])
    if not stored.is_contiguous:
        assert max(member.lengths, default=0) <= 240


def test_a_large_pickle_is_read_once_for_its_bytes(saved, monkeypatch):
    """And again if they change; what a caller gets of its values, it may change."""
    monkeypatch.setattr(archive, "_LARGE_BYTES", 1)
    monkeypatch.setattr(archive, "_LAST", [])
    read, calls = archive.read_values, []
    monkeypatch.setattr(archive, "read_values", lambda *args: calls.append(1) or read(*args))
    for step in (3, 4):
        torch.save({"w": torch.ones(2), "step": step, "tags": [1]}, saved)
        for _ in range(2):
            found = TorchFile(saved).objects()
            assert found == {"step": step, "tags": [1]}
            found["tags"].append(2)
        assert TorchFile(saved).at("step") == step
    assert len(calls) == 2


def test_old_files_and_folders_are_named(tmp_path):
    path = Path(tmp_path, "old.pt")
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(TrainfoldError, match=r"an archive, as torch\.save has written since torch 1\.6"):
        TorchFile(path).specs()
    with pytest.raises(TrainfoldError, match=r"expected a file of torch\.save, found a directory"):
        TorchFile(tmp_path).specs()


def test_what_has_no_end_is_not_waited_for(tmp_path):
    """U02: a pipe in the place of a file."""
    os.mkfifo(tmp_path / "x.pt")
    with OpenFiles(tmp_path) as files, pytest.raises(CheckpointHostile, match="found a directory, a pipe or a device"):
        files.whole("x.pt")


def test_dicts_that_hold_one_another_are_not_written_out_for_ever(tmp_path):
    """U02: sixty dicts, each twice in the next, have 2**60 names; a dict that is in two others is fine."""
    deep = shared = {"w": torch.ones(1)}
    for _ in range(60):
        deep = {"a": deep, "b": deep}
    torch.save(deep, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointHostile,
        match="at most 16 names for each value, found 1,152,921,504,606,846,976 for 121: dicts that are in several others",
    ):
        TorchFile(tmp_path / "x.pt").specs()
    torch.save({"net": shared, "ema": shared}, tmp_path / "y.pt")
    assert list(TorchFile(tmp_path / "y.pt").specs()) == ["net.w", "ema.w"]


def test_values_of_many_levels_are_refused(tmp_path):
    """U02: and no error of Python's own depth."""
    deep = {}
    for _ in range(150):
        deep = {"a": [deep]}
    torch.save(deep, tmp_path / "x.pt")
    with pytest.raises(CheckpointHostile, match="values of at most 100 levels"):
        TorchFile(tmp_path / "x.pt").specs()
