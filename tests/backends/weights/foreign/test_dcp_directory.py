"""Directories of torch's distributed checkpoints: what torch writes is read in any parts, and torch reads what is written here, bit for bit."""

import io
import os
import pickle
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.backends import dcp_cases as cases
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import trainfold
from trainfold.backends.formats.detect import detect_format
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    InvalidArgument,
    InvalidState,
)
from trainfold.core.weights.source import Wanted
from trainfold.properties.contracts import check_weight_source
from trainfold.stores import MemoryStore
from trainfold.weights import CheckpointWeights, DcpDirectory, write_dcp_directory


@settings(max_examples=60)
@given(st.data(), cases.tensors())
def test_what_ranks_have_written_with_any_cuts_is_read_in_any_parts(data, tensors):
    """M24: chunks of a grid, of which some are empty, by any number of ranks; a part of each tensor is the part of the whole."""
    cuts = {name: data.draw(cases.cut_of(each.shape)) for name, each in tensors.items()}
    with TemporaryDirectory() as folder:
        cases.write_parts(folder, tensors, cuts, ranks=data.draw(st.integers(1, 3)))
        source = DcpDirectory(folder)
        assert source.specs() == cases.specs_of(tensors)
        assert cases.all_bits(cases.everything(source)) == cases.all_bits(tensors)
        boxes = {name: data.draw(cases.box_in(each.shape)) for name, each in tensors.items()}
        wanted = {name: Wanted(spec.dtype, spec.shape, boxes[name]) for name, spec in source.specs().items()}
        parts = {name: each[tuple(slice(*side) for side in boxes[name])] for name, each in tensors.items()}
        assert cases.all_bits(dict(source.supply(wanted))) == cases.all_bits(parts)


@settings(max_examples=20)
@given(cases.tensors(), st.integers(300, 5000))
def test_torch_reads_what_is_written_here(tensors, file_bytes):
    """M24: `torch.distributed.checkpoint.load` and `dcp_to_torch_save` return the tensors bit for bit, and so does this library."""
    with TemporaryDirectory() as top:
        first, second = f"{top}/first", f"{top}/second"
        cases.save(first, {"model": tensors, "step": 7})
        write_dcp_directory(second, DcpDirectory(first, prefix="model"), objects={"step": 7}, file_bytes=file_bytes)
        assert cases.all_bits(cases.everything(DcpDirectory(second, prefix="model"))) == cases.all_bits(tensors)
        assert DcpDirectory(second).objects() == {"step": 7}
        state = {"model": {name: torch.zeros_like(each) for name, each in tensors.items()}, "step": 0}
        cases.load(second, state)
        assert state["step"] == 7
        assert cases.all_bits(state["model"]) == cases.all_bits(tensors)
        dcp_to_torch_save(second, f"{top}/whole.pt")
        found = torch.load(f"{top}/whole.pt")
        assert found["step"] == 7
        assert cases.all_bits(found.get("model", {})) == cases.all_bits(tensors)


TENSORS = {
    "h.weight": torch.arange(24.0).view(6, 4),
    "h.bias": torch.tensor([1.0, float("nan"), -0.0]).bfloat16(),
    "empty": torch.empty(0, 3),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}


def test_it_is_a_source_as_the_others(tmp_path):
    """J01: the contract of sources; and elements in another order than row by row."""
    cases.save(tmp_path / "a", TENSORS)
    check_weight_source(lambda: DcpDirectory(tmp_path / "a"), TENSORS)
    turned = {
        "w": torch.arange(24.0).view(4, 6).t(),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    cases.save(tmp_path / "b", {"model": turned})
    check_weight_source(lambda: DcpDirectory(tmp_path / "b", prefix="model"), turned)


def test_a_rank_reads_only_the_chunks_that_it_needs(tmp_path, monkeypatch):
    """Of 4 chunks of 1 MiB, a part of one reads that one, and only its rows."""
    tensors = {"w": torch.randn(4096, 256)}
    cases.write_parts(
        tmp_path, tensors, {"w": [((row, row + 1024), (0, 256)) for row in range(0, 4096, 1024)]}, ranks=4
    )
    source, read = DcpDirectory(tmp_path), []
    source.specs()
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: read.append(sum(map(len, buffers))) or real(fd, buffers, at)
    )
    for rows, most in (((1024, 2048), 1 << 20), ((1500, 1600), 100 * 1024), ((1000, 1100), 100 * 1024)):
        read.clear()
        part = dict(source.supply({"w": Wanted("float32", (4096, 256), (rows, (0, 256)))}))["w"]
        assert torch.equal(part, tensors["w"][slice(*rows)])
        assert sum(read) == most


def test_the_names_that_programs_have(tmp_path):
    """`get_state_dict` nests the keys of a state; a prefix takes the model out of them, and the objects have their values."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    cases.save(
        tmp_path,
        {"app": {"model": model_state, "optim": optimizer_state}, "train": {"step": 1, "losses": [0.5, (1, "a")]}},
    )
    source = DcpDirectory(tmp_path, prefix="app.model")
    assert sorted(source.specs()) == ["bias", "weight"]
    assert "state.weight.exp_avg" in DcpDirectory(tmp_path, prefix="app.optim").specs()
    objects = DcpDirectory(tmp_path, prefix="app.optim").objects()
    assert objects["param_groups.0.params"] == ["weight", "bias"]
    assert objects["param_groups.0.betas"] == (0.9, 0.999)
    assert DcpDirectory(tmp_path, prefix="train").objects() == {"step": 1, "losses": [0.5, (1, "a")]}
    other = trainfold.attach(torch.nn.Linear(3, 2), weights=source)
    other.take_weights()
    assert torch.equal(other.capture().model.params["weight"], model.weight)


def test_a_state_is_written_with_its_optimizer_and_torch_continues_with_it(tmp_path):
    """M24: model, optimizer by name and step; torch's own loop takes the same next step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.01)
    state = trainfold.init_state(model, adamw, seed=0)
    step = trainfold.make_step(model, lambda model, batch: trainfold.Loss(model(batch["x"]).square().sum(), 4), adamw)
    batch = {"x": torch.randn(4, 3)}
    state, _ = step(state, batch)
    write_dcp_directory(tmp_path / "a", state)
    mine = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(mine, optimizer)
    loaded = {"model": model_state, "optim": optimizer_state, "step": -1}
    cases.load(tmp_path / "a", loaded)
    set_state_dict(mine, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    assert loaded["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 0.01
    (mine(batch["x"]).square().sum() / 4).backward()
    optimizer.step()
    state, _ = step(state, batch)
    assert cases.all_bits(dict(mine.named_parameters())) == cases.all_bits(dict(state.model.params))


def test_a_checkpoint_of_a_run_is_written_and_tied_weights_are_there_under_both_names(tmp_path):
    """M24: from files to files; and from a state, whose aliases torch asks for too."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    run = MemoryStore()
    state = trainfold.attach(model).capture()
    trainfold.save(state, run)
    write_dcp_directory(tmp_path / "a", CheckpointWeights(run))
    found = cases.everything(DcpDirectory(tmp_path / "a", prefix="model"))
    assert cases.all_bits(found) == cases.all_bits({"a.weight": model["a"].weight, "b.weight": model["a"].weight})
    write_dcp_directory(tmp_path / "b", state, model="")
    found = {name: torch.zeros(3, 3) for name in ("a.weight", "b.weight")}
    cases.load(tmp_path / "b", found)
    assert torch.equal(found["b.weight"], model["a"].weight)


def test_what_torch_has_no_name_for_is_not_written(tmp_path):
    state = trainfold.attach(torch.nn.Linear(2, 1)).capture()
    with pytest.raises(InvalidState, match="optimizer: expected slots and groups, as torch names them, found dict"):
        write_dcp_directory(tmp_path / "a", state.evolve(optimizer={"mine": 1}))
    with pytest.raises(InvalidArgument, match=r"other names than those of tensors, found model\.weight"):
        write_dcp_directory(tmp_path / "a", state, objects={"model.weight": 1})
    with pytest.raises(trainfold.errors.UnsupportedLeaf, match="expected numbers, text"):
        write_dcp_directory(tmp_path / "a", state, objects={"x": object()})
    write_dcp_directory(tmp_path / "a", state)
    with pytest.raises(InvalidArgument, match="a directory that does not exist yet"):
        write_dcp_directory(tmp_path / "a", state.evolve(model=None))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def shortened(folder):
    os.truncate(folder / "__0_0.distcp", 100)


def without(folder):
    (folder / "__0_0.distcp").unlink()


def alone(folder):
    (folder / ".metadata").rename(folder / "__0.metadata")


def changed(new, *, at=0):
    def change(folder):
        data = bytearray((folder / "__0_0.distcp").read_bytes())
        start = data.index(b"torch._utils", at)
        data[start : start + len(new)] = new
        (folder / "__0_0.distcp").write_bytes(bytes(data))

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (shortened, CheckpointTorn, r"__0_0\.distcp: .*expected bytes \d+ to \d+, found 100 bytes"),
        (without, CheckpointMissing, "a file that can be read"),
        (alone, CheckpointMissing, r"found __0\.metadata, which one rank has written for itself"),
        (changed(b"os\nsystem\nxx"), CheckpointHostile, r"found os\.system"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused_before_anything_is_read(change, error, said, tmp_path):
    """U02: by the name of the file and of the tensor."""
    cases.save(tmp_path, {"w": TENSORS["h.weight"], "b": TENSORS["h.bias"]})
    change(tmp_path)
    source = DcpDirectory(tmp_path)
    with pytest.raises(error, match=said):
        dict(
            source.supply(
                {name: Wanted(s.dtype, s.shape, tuple((0, n) for n in s.shape)) for name, s in source.specs().items()}
            )
        )


def test_no_tensor_is_given_of_a_directory_that_lacks_one_of_its_files(tmp_path):
    """E01: nothing is loaded in part."""
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    cases.write_parts(tmp_path, tensors, {name: [((0, 4),)] for name in tensors}, ranks=2)
    (tmp_path / "__1_0.distcp").unlink()
    source, given = DcpDirectory(tmp_path), []
    wanted = {name: Wanted("float32", (4,), ((0, 4),)) for name in tensors}
    with pytest.raises(CheckpointMissing, match=r"__1_0\.distcp"):
        given.extend(name for name, _ in source.supply(wanted))
    assert given == []
    assert [name for name, _ in source.supply({"a": wanted["a"]})] == ["a"]


def test_chunks_that_are_not_what_the_metadata_say_are_named(tmp_path):
    """U02: each is looked at before its bytes are used."""
    for name, tensor in (("a", torch.ones(2, 3)), ("b", torch.ones(3, 2)), ("c", torch.ones(2, 3, dtype=torch.int32))):
        cases.save(tmp_path / name, {"w": tensor})
    for name, said in (
        ("b", r"expected float32 of \[2, 3\].*found float32 of \[3, 2\]"),
        ("c", r"found int32 of \[2, 3\]"),
    ):
        shutil.copy(tmp_path / name / "__0_0.distcp", tmp_path / "a" / "__0_0.distcp")
        with pytest.raises(CheckpointDamaged, match=said):
            cases.everything(DcpDirectory(tmp_path / "a"))


def test_another_encoding_of_chunks_is_refused_by_name(tmp_path):
    """Extensions, and safetensors inside of such files, which torch itself does not read back."""
    tensors = {"w": torch.ones(2, 3)}
    cases.write_parts(
        tmp_path / "a",
        tensors,
        {"w": [((0, 2), (0, 3))]},
        ranks=1,
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    with pytest.raises(CheckpointForeign, match=r"expected a tensor that torch\.save has written, found other bytes"):
        cases.everything(DcpDirectory(tmp_path / "a"))
    cases.write_parts(tmp_path / "b", tensors, {"w": [((0, 2), (0, 3))]}, ranks=1)
    path = Path(tmp_path / "b" / ".metadata")
    made = pickle.loads(path.read_bytes())
    for info in made.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    path.write_bytes(pickle.dumps(made))
    with pytest.raises(CheckpointForeign, match=r"found stream\.zstd/1; load it with torch"):
        cases.everything(DcpDirectory(tmp_path / "b"))


class Inverted(StreamTransformExtension):
    """A transform as a compression is one, without the library of one."""

    @staticmethod
    def registry_name():
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version):
        return Inverted()

    def get_descriptor(self):
        return "stream.inverted/1"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(bytes(255 - each for each in bytes(data)))
                return len(data)

        return Writer()

    def transform_from(self, input):  # noqa: A002 - as torch calls it
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")  # torch says that there is one process
def test_what_an_extension_of_torch_has_changed_is_refused_by_name(tmp_path):
    writer = FileSystemWriter(tmp_path / "a", _extensions=[Inverted()])
    dcp.save({"w": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    assert list(DcpDirectory(tmp_path / "a").specs()) == ["w"]
    with pytest.raises(
        CheckpointForeign, match=r"found stream\.inverted/1; load it with torch and save it again without extensions"
    ):
        cases.everything(DcpDirectory(tmp_path / "a"))


@pytest.mark.filterwarnings("ignore")  # torch says that there is one process
@pytest.mark.parametrize(
    "save",
    [
        lambda state, path: dcp.async_save(state, checkpoint_id=path, no_dist=True).result(),
        lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=False), no_dist=True),
        lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=3), no_dist=True),
        lambda state, path: dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True), no_dist=True),
        lambda state, path: dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True),
    ],
    ids=["async", "a file a tensor", "threads", "deduplicated", "not nested"],
)  # fmt: skip
def test_whichever_way_torch_writes_the_tensors_and_bytes_are_those_that_were_saved(tmp_path, save):
    saved = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16(), "loader": b"\x00\xff"}
    save(dict(saved), tmp_path / "a")
    source = DcpDirectory(tmp_path / "a")
    found = cases.everything(source) | source.objects()
    assert found.keys() == saved.keys()
    assert found["loader"] == saved["loader"]
    assert all(torch.equal(found[name], saved[name]) for name in ("w", "b"))


def test_a_directory_that_is_written_again_is_read_as_it_is_now(tmp_path):
    """Its metadata were kept, and said where the tensors of the directory before had been. A block reads what it has opened."""
    path = tmp_path / "a"
    cases.save(path, {"m.w": torch.ones(4, 2), "step": 1})
    source = DcpDirectory(path)
    model = source.under("m")
    assert cases.everything(model)["w"].shape == (4, 2)
    with model.opened() as opened:
        shutil.rmtree(path)
        cases.save(path, {"m.b": torch.zeros(1), "m.w": torch.zeros(3), "step": 2})
        for each in (model, DcpDirectory(path, prefix="m")):
            assert {name: spec.shape for name, spec in each.specs().items()} == {"b": (1,), "w": (3,)}
            assert torch.equal(cases.everything(each)["w"], torch.zeros(3))
        assert source.metadata.tensors["m.w"].shape == (3,)
        assert (source.objects(), source.object_of("step")) == ({"step": 2}, 2)
        assert torch.equal(opened.read("w", ((0, 4), (0, 2))), torch.ones(4, 2))
    shutil.rmtree(path)
    with pytest.raises(CheckpointMissing):
        model.specs()


@pytest.mark.filterwarnings("ignore")  # torch says that there is one process
def test_what_each_rank_has_saved_for_itself_is_refused_with_the_way_out(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", use_collectives=False, no_dist=True)
    with pytest.raises(CheckpointMissing, match=r"found __0\.metadata, .*; load it with torch on as many ranks"):
        DcpDirectory(tmp_path / "a").specs()
    assert detect_format(tmp_path / "a").format == "unknown"


def test_a_hostile_object_is_refused_and_not_run(tmp_path):
    """U02: an object is a pickle of its own."""
    mark = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    cases.save(tmp_path / "a", {"w": torch.ones(2), "step": Runs()})
    assert sorted(DcpDirectory(tmp_path / "a").specs()) == ["w"]
    with pytest.raises(CheckpointHostile, match=r"found posix\.mkdir"):
        DcpDirectory(tmp_path / "a").objects()
    assert not mark.exists()
