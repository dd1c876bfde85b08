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

from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.formats.torch_save import archive, tensor_parts
from trainfold.backends.formats.torch_save.archive import archive_values, read_archive
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointTorn, TrainfoldError, UnsupportedLeaf
from trainfold.core.torch_files.stored_values import StoredTensor
from trainfold.weights import TorchFile, Wanted

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


@settings(max_examples=40)
@given(data=st.data())
def test_an_expanded_tensor_has_the_values_that_torch_sees_in_any_part(tmp_path_factory, data):
    """It has more elements than memory: a step of 0 in some dimensions."""
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    grown = [size if data.draw(st.booleans()) else 1 for size in sizes]
    tensor = torch.randn(grown).expand([wide if size == 1 else size for size, wide in zip(grown, sizes, strict=True)])
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    path = tmp_path_factory.mktemp("top") / "x.pt"
    torch.save({"w": tensor, "p": torch.nn.Parameter(tensor)}, path)
    box = tuple(tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))) for size in tensor.shape)  # fmt: skip
    with TorchFile(path).opened() as found:
        assert {name: each.shape for name, each in found.specs.items()} == dict.fromkeys("wp", tuple(tensor.shape))
        for name in "wp":
            assert torch.equal(found.read(name, box), tensor.detach()[tuple(slice(*each) for each in box)])


OTHERS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"a sparse tensor; save tensor\.to_dense\(\)"),
    "of_rows": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "parameter": (lambda: torch.nn.Parameter(torch.eye(3).to_sparse()), "a sparse tensor"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"a quantised tensor; save tensor\.dequantize\(\)"),
    "by_channels": (lambda: torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8), "a quantised tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "a tensor on meta, which has no values"),
    "overlapping": (lambda: torch.ones(6).unfold(0, 4, 1), "a view whose parts overlap: 48 bytes in 24"),
    "huge": (lambda: torch.zeros(1).expand(1 << 40), "an expanded tensor of 4,398,046,511,104 bytes, of which 4 are stored"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_tensor_of_another_kind_is_named_and_the_others_are_read_without_it(tmp_path, kind):
    """It is not an attack: the message says which tensor, what it is, and what to do; a selection without it is read, and the model of a conversion."""
    make, message = OTHERS[kind]
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"a.b": make()}, "step": 3}, path)
    for read in (
        TorchFile(path).specs,
        TorchFile(path, prefix="optimizer").specs,
        lambda: list(TorchFile(path).supply({"optimizer.a.b": Wanted("float32", (3, 3), ((0, 3), (0, 3)))})),
        lambda: TorchFile(path).opened().__enter__(),
    ):
        with pytest.raises(UnsupportedLeaf, match=rf"a\.b: expected elements in memory, .*found {message}"):
            read()
    assert TorchFile(path, prefix="model").specs().keys() == TorchFile(path, below="model").specs().keys() == {"w"}
    wanted = {"model.w": Wanted("float32", (2,), ((0, 2),))}
    assert [name for name, _ in TorchFile(path).supply(wanted)] == ["model.w"]
    assert TorchFile(path).objects() == {"step": 3}
    for top in ({}, {"model": {"w": torch.ones(2)}}):
        torch.save({"w": torch.ones(2), "optimizer": {"a.b": make()}, **top}, path)
        opened = open_source(path, key="model" if top else None)
        assert list(opened.model.specs()) == ["w"]
        assert set(opened.others) == {"optimizer", *({"w"} if top else ())}
    torch.save({"w": make()}, path)
    with pytest.raises(UnsupportedLeaf, match=message):
        open_source(path).model.specs()


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
