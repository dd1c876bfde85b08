"""Weights that are open are read into one memory, one after the other, whichever source has them on disk."""

import pytest
import torch
from kit.backends import dcp_cases as cases

import trainfold
from trainfold.backends.weights.opened import ReusedMemory, opened_weights
from trainfold.core.layout.slices import whole_box
from trainfold.properties.contracts import check_weight_source
from trainfold.weights import CheckpointWeights, DcpDirectory, TorchFile

TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2).bfloat16(), "c": torch.arange(20.0).view(5, 4).t()}


def in_dcp(folder):
    cases.save(folder, TENSORS)
    return DcpDirectory(folder)


def in_file(folder):
    folder.mkdir()
    torch.save({"model": TENSORS}, folder / "a.pt")
    return TorchFile(folder / "a.pt", prefix="model")


def in_run(folder):
    model = torch.nn.Module()
    for name, each in TENSORS.items():
        model.register_buffer(name, each.contiguous())
    trainfold.save(trainfold.attach(model).capture(), str(folder))
    return CheckpointWeights(folder)


@pytest.mark.parametrize("write", [in_dcp, in_file, in_run])
def test_the_next_tensor_is_read_into_the_memory_of_the_one_before(write, tmp_path):
    """Fresh memory for each tensor took longer than to read it; values are the same."""
    source = write(tmp_path / "a")
    check_weight_source(lambda: source, TENSORS)
    with opened_weights(source) as weights:
        memory, places = ReusedMemory(weights), set()
        for name in ("c", "a", "b", "a"):
            box = whole_box(tuple(TENSORS[name].shape))
            found = memory.read(name, box)
            assert torch.equal(found, TENSORS[name])
            places.add(found.data_ptr())
    assert len(places) == 1
