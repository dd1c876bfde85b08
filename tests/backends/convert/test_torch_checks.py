"""All that torch has written is read: a changed bit is found in an object too, and a file without a tensor's memory is not whole."""

import argparse
import zipfile

import pytest
import torch
from kit.backends import dcp_cases as cases

from trainfold.backends.convert.torch_checks import torch_problems


@pytest.mark.parametrize("what", ["tensor", "object"])
def test_a_changed_bit_is_found_in_each_part_of_a_directory(tmp_path, what):
    """U05: of an object of any class too, which is not made."""
    tensor = torch.arange(50.0)
    cases.save(tmp_path, {"model": {"w": tensor}, "args": argparse.Namespace(mark="unmistakable")})
    whole = torch_problems(tmp_path, "dcp")
    assert (whole.problems, whole.files, whole.without) == ([], ["__0_0.distcp"], [])
    file = tmp_path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(tensor.numpy().tobytes() if what == "tensor" else b"unmistakable") + 5] ^= 1
    file.write_bytes(data)
    assert ["CRC-32" in each.expected for each in torch_problems(tmp_path, "dcp").problems] == [True]


@pytest.mark.parametrize("found", ["none", "7"])
def test_a_file_whose_sums_are_right_has_the_memory_of_each_tensor(tmp_path, found):
    """U05: as where another program has left out a member, or cut it."""
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: torch.zeros(3)}}}, path)
    with zipfile.ZipFile(path) as before:
        members = {each: before.read(each) for each in before.namelist()}
    with zipfile.ZipFile(path, "w") as after:
        for name, data in members.items():
            if not name.endswith("data/1"):
                after.writestr(name, data)
            elif found != "none":
                after.writestr(name, data[: int(found)])
    (problem,) = torch_problems(path, "torch").problems
    assert (problem.expected, str(problem.found)) == ("12 bytes of data/1", found)


def test_files_beside_a_model_are_read_or_named(tmp_path):
    """An old form of file has no sums, and neither has text of that name."""
    torch.save({"a": 1}, tmp_path / "a.bin")
    torch.save({"a": 1}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "c.txt").write_text("text")
    found = torch_problems(tmp_path, "hf")
    assert (found.problems, found.files, found.without) == ([], ["a.bin"], ["b.pt"])
