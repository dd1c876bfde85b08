"""A directory of distributed checkpoints is there, whole, or not at all; what a killed writer has finished is kept."""

import tracemalloc
import zipfile

import pytest
import torch
from kit.backends import dcp_cases as cases

from trainfold.backends.formats.dcp.dcp_writer import write_dcp
from trainfold.backends.formats.torch_save.archive import archive_values, read_archive
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.core.errors import InvalidState
from trainfold.core.torch_files.dcp_plan import plan_dcp
from trainfold.weights import DcpDirectory

TENSORS = {f"layers.{number}.w": torch.full((64, 64), float(number)) for number in range(6)}


def test_a_killed_writer_leaves_nothing_and_the_next_one_writes_what_is_missing(tmp_path):
    """T33: files that are finished are not read and written again."""
    plan, read = plan_dcp(cases.specs_of(TENSORS), {"step": 3}, file_bytes=40_000), []
    assert len(plan.files) == 3

    def until(stop):
        def part(name, _box):
            if len(read) == stop:
                raise KeyboardInterrupt
            read.append(name)
            return TENSORS[name]

        return part

    with pytest.raises(KeyboardInterrupt):
        write_dcp(plan, until(5), tmp_path / "a", identity="1")
    assert not (tmp_path / "a").exists()
    read.clear()
    write_dcp(plan, until(-1), tmp_path / "a", identity="1")
    assert read == ["layers.4.w", "layers.5.w"]
    assert cases.all_bits(cases.everything(DcpDirectory(tmp_path / "a"))) == cases.all_bits(TENSORS)
    assert sum(each.stat().st_size for each in (tmp_path / "a").iterdir()) == sum(plan.sizes.values())


def test_other_tensors_than_planned_are_refused(tmp_path):
    plan = plan_dcp(cases.specs_of(TENSORS))
    with pytest.raises(InvalidState, match=r"layers\.0\.w: expected .*float32.*found .*float64"):
        write_dcp(plan, lambda name, _: TENSORS[name].double(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_directory_of_many_tensors_takes_little_time_and_memory_to_plan():
    """300 tensors; the figures for 100,000 are those of the benchmark."""
    specs = {f"layers.{number}.mlp.weight": cases.LeafSpec("bfloat16", (4096, 4096)) for number in range(300)}
    tracemalloc.start()
    plan = plan_dcp(specs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(plan.sizes.values()) > 300 * 4096 * 4096 * 2
    assert peak < 5_000_000


def test_a_tensor_of_more_than_4_gib_is_found_by_all_readers(tmp_path):
    """M24: sizes of 64 bits; the file has holes, and only what is around the tensor is written."""
    spec = cases.LeafSpec("bfloat16", (5 << 20, 512))
    (file,) = plan_dcp({"w": spec}).files
    (entry,) = file.entries
    head, tail = entry.around()
    path = tmp_path / "x.pt"
    with path.open("wb") as opened:
        opened.write(head)
        opened.truncate(len(head) + entry.data_bytes)
        opened.seek(len(head) + entry.data_bytes)
        opened.write(tail)
    assert path.stat().st_size == file.size_bytes > 5 << 30
    with zipfile.ZipFile(path) as theirs:
        assert theirs.getinfo("archive/data/0").file_size == 5 << 30
    assert torch.load(path, mmap=True).shape == spec.shape
    with OpenFiles(tmp_path) as files:
        members = read_archive(whole := files.whole("x.pt"))
        assert members["data/0"].start == len(head)
        assert members["data/0"].size == 5 << 30
        assert archive_values(whole, members).shape == spec.shape
